// Packed weights and their products with rows of bfloat16.
//
// Weights lie in panels of 32 outputs. A product is summed in float32 along the inputs, two by two, in index
// order; block formats sum every block of 32 inputs by itself and then add scale · sum (+ minimum · sum of
// inputs) block by block. How many rows are computed together has no part in it, so no row's bits depend on
// the others.

#pragma once

#include <cstring>
#include <vector>

#include "vectors.h"

namespace paceline {

constexpr int64_t kPanel = 32;  // outputs
constexpr int64_t kBlock = 32;  // inputs that share a scale

enum Format : int32_t {
  kBf16 = 0,  // [inputs / 2][32 outputs][2]
  kQ4 = 1,    // per block: 32 scales, 32 minima (float16), then nibbles; w = scale · q + minimum, q in 0 … 15
  kQ8 = 2,    // per block: 32 scales (float16), then bytes; w = scale · q, q in −128 … 127
};

// paired: output 2i of a panel pair is gate i, so that panel p holds outputs 16p … 16p + 15 of both halves.
struct Matrix {
  const uint8_t* data;
  const float* bias;  // float32 [outputs], null: none
  int64_t outputs;
  int64_t inputs;
  int32_t format;
  int32_t paired;
};

inline int64_t panels_of(const Matrix& m) { return m.paired ? ceil_div(m.outputs / 2, kLanes) : ceil_div(m.outputs, kPanel); }

constexpr int64_t kQ4Header = 2 * kPanel * 2, kQ4Block = kQ4Header + kPanel * kBlock / 2;
constexpr int64_t kQ8Header = kPanel * 2, kQ8Block = kQ8Header + kPanel * kBlock;

inline int64_t panel_bytes(int32_t format, int64_t inputs) {
  if (format == kQ4) return inputs / kBlock * kQ4Block;
  if (format == kQ8) return inputs / kBlock * kQ8Block;
  return inputs * kPanel * int64_t(sizeof(bf16));
}

// The output that stands at place 0 … 31 of a panel, −1 where there is none.
inline int64_t output_at(const Matrix& m, int64_t panel, int64_t place) {
  if (!m.paired) return panel * kPanel + place < m.outputs ? panel * kPanel + place : -1;
  const int64_t half = m.outputs / 2, index = panel * kLanes + place % kLanes;
  return index >= half ? -1 : place < kLanes ? index : half + index;
}

inline __m512bh as_bf16(__m512i bits) { return (__m512bh)bits; }

inline __m512bh input_pair(const bf16* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return as_bf16(_mm512_set1_epi32(pair));
}

// bfloat16 of 0 … 15, twice, so that the bit above a nibble does not matter.
inline __m512i nibble_table() {
  alignas(64) static constexpr uint16_t table[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140,
      0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110,
      0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  return _mm512_load_si512(table);
}

// How a block's quants become bfloat16. pair: the weights of inputs 2 · index and 2 · index + 1 of a block, for
// outputs 0 … 15 (half 0) or 16 … 31 (half 1) of the panel.
struct Nibbles {
  static constexpr bool kMinima = true;
  static constexpr int64_t kBytes = kQ4Block;
  static inline __m512i pair(const uint8_t* block, int index, int half) {
    const __m512i four = _mm512_loadu_si512(block + kQ4Header + half * 256 + index / 4 * 64);
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(four, unsigned(index % 4 * 4)), nibble_table());
  }
};

struct Bytes {
  static constexpr bool kMinima = false;
  static constexpr int64_t kBytes = kQ8Block;
  static inline __m512i pair(const uint8_t* block, int index, int half) {
    const uint8_t* at = block + kQ8Header + index * 64 + half * 32;
    const auto wide = [](const uint8_t* from) {
      return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from))));
    };
    // Small whole numbers: the upper half of a float32 is the bfloat16.
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(wide(at), 16), wide(at + 16));
  }
};

template <int R>
using Sums = __m512[R][2];

// Weights are read once a step: fetched past the outer caches, they leave there what the next round needs, and
// what the other processes need between rounds.
constexpr int64_t kAheadBytes = 1024, kAheadBlocks = 2;

inline void fetch(const void* from, int64_t size) {
  for (int64_t line = 0; line < size; line += 64) _mm_prefetch((const char*)from + line, _MM_HINT_NTA);
}

template <int R>
inline void product(const bf16* panel, int64_t inputs, const bf16* x, int64_t stride, Sums<R>& sums) {
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2, panel += 2 * kPanel) {
    fetch((const char*)panel + kAheadBytes, 128);
    const __m512bh w0 = as_bf16(_mm512_loadu_si512(panel)), w1 = as_bf16(_mm512_loadu_si512(panel + kPanel));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = input_pair(x + r * stride + k);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, pair);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, pair);
    }
  }
}

inline __m512 halves(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

// quants: null, or the panel's, unpacked. input_sums: of every block of 32 inputs, [rows, inputs / 32].
template <class Packed, int R, bool kUnpacked>
inline void product(const uint8_t* panel, const bf16* quants, int64_t inputs, const bf16* x, int64_t stride,
                    const float* input_sums, Sums<R>& sums) {
  const int64_t blocks = inputs / kBlock;
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b, panel += Packed::kBytes) {
    fetch(panel + kAheadBlocks * Packed::kBytes, Packed::kBytes);
    Sums<R> part;
    for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int i = 0; i < kBlock / 2; ++i) {
      __m512bh w0, w1;
      if constexpr (kUnpacked) {
        const bf16* at = quants + (b * kBlock / 2 + i) * 2 * kPanel;
        w0 = as_bf16(_mm512_loadu_si512(at));
        w1 = as_bf16(_mm512_loadu_si512(at + kPanel));
      } else {
        w0 = as_bf16(Packed::pair(panel, i, 0));
        w1 = as_bf16(Packed::pair(panel, i, 1));
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512bh pair = input_pair(x + r * stride + b * kBlock + 2 * i);
        part[r][0] = _mm512_dpbf16_ps(part[r][0], w0, pair);
        part[r][1] = _mm512_dpbf16_ps(part[r][1], w1, pair);
      }
    }
    const __m512 d0 = halves(panel), d1 = halves(panel + 32);
    for (int r = 0; r < R; ++r) {
      sums[r][0] = _mm512_fmadd_ps(d0, part[r][0], sums[r][0]);
      sums[r][1] = _mm512_fmadd_ps(d1, part[r][1], sums[r][1]);
    }
    if constexpr (Packed::kMinima) {
      const __m512 m0 = halves(panel + 64), m1 = halves(panel + 96);
      for (int r = 0; r < R; ++r) {
        const __m512 sum = _mm512_set1_ps(input_sums[r * blocks + b]);
        sums[r][0] = _mm512_fmadd_ps(m0, sum, sums[r][0]);
        sums[r][1] = _mm512_fmadd_ps(m1, sum, sums[r][1]);
      }
    }
  }
}

template <class Packed>
const bf16* unpacked(const uint8_t* panel, int64_t inputs) {
  thread_local std::vector<bf16> memory;
  if (int64_t(memory.size()) < inputs * kPanel) memory.resize(size_t(inputs * kPanel));
  bf16* to = memory.data();
  for (int64_t b = 0; b < inputs / kBlock; ++b, panel += Packed::kBytes)
#pragma GCC unroll 16
    for (int i = 0; i < kBlock / 2; ++i, to += 2 * kPanel) {
      _mm512_storeu_si512(to, Packed::pair(panel, i, 0));
      _mm512_storeu_si512(to + kPanel, Packed::pair(panel, i, 1));
    }
  return memory.data();
}

// Rows of bfloat16 as products take them. sums: float32 [rows, inputs / 32], for kQ4 alone.
struct Inputs {
  const bf16* rows;
  int64_t stride;
  const float* sums;
};

inline void sum_blocks(const bf16* x, int64_t inputs, float* sums) {
  for (int64_t b = 0; b < inputs / kBlock; ++b, x += kBlock)
    sums[b] = sum_of(_mm512_add_ps(load(x, 0xffff), load(x + kLanes, 0xffff)));
}

// What happens to the sums of a row. put: first 16 and last 16 outputs of a panel.
template <class To>
struct Store {
  To* out;  // [rows, outputs]
  void put(const Matrix& m, int64_t row, int64_t panel, __m512 low, __m512 high) const {
    const int64_t first = panel * kPanel;
    To* at = out + row * m.outputs + first;
    store(at, lanes(m.outputs - first), low);
    if (m.outputs - first > kLanes) store(at + kLanes, lanes(m.outputs - first - kLanes), high);
  }
};

struct AddTo {
  bf16* residual;  // [rows, outputs]
  void put(const Matrix& m, int64_t row, int64_t panel, __m512 low, __m512 high) const {
    const int64_t first = panel * kPanel, left = m.outputs - first;
    bf16* at = residual + row * m.outputs + first;
    store(at, lanes(left), _mm512_add_ps(load(at, lanes(left)), low));
    if (left > kLanes) {
      const __mmask16 mask = lanes(left - kLanes);
      store(at + kLanes, mask, _mm512_add_ps(load(at + kLanes, mask), high));
    }
  }
};

struct SiluMul {
  bf16* out;  // [rows, outputs / 2]
  void put(const Matrix& m, int64_t row, int64_t panel, __m512 gate, __m512 up) const {
    const int64_t first = panel * kLanes, size = m.outputs / 2;
    store(out + row * size + first, lanes(size - first), _mm512_mul_ps(silu(gate), up));
  }
};

constexpr int64_t kMostRows = 12, kMostBlockRows = 6;  // of a tile: what fits the registers
// From here on it pays to unpack a panel of quants once for all tiles.
constexpr int64_t kUnpackedRows = 13;

// Sums of a tile: [rows][32].
using Found = float[kMostRows][kPanel];

template <int R>
void tile(const Matrix& m, const uint8_t* panel, const bf16* quants, const Inputs& in, int64_t row, Found& found) {
  Sums<R> sums;
  const bf16* x = in.rows + row * in.stride;
  const float* input_sums = in.sums ? in.sums + row * (m.inputs / kBlock) : nullptr;
  bool done = false;
  if constexpr (R <= kMostBlockRows) {
    done = m.format != kBf16;
    if (m.format == kQ4) {
      if (quants) product<Nibbles, R, true>(panel, quants, m.inputs, x, in.stride, input_sums, sums);
      else product<Nibbles, R, false>(panel, nullptr, m.inputs, x, in.stride, input_sums, sums);
    } else if (m.format == kQ8) {
      if (quants) product<Bytes, R, true>(panel, quants, m.inputs, x, in.stride, nullptr, sums);
      else product<Bytes, R, false>(panel, nullptr, m.inputs, x, in.stride, nullptr, sums);
    }
  }
  if (!done) product<R>((const bf16*)panel, m.inputs, x, in.stride, sums);
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(found[r], sums[r][0]);
    _mm512_store_ps(found[r] + kLanes, sums[r][1]);
  }
}

inline void tile(int64_t rows, const Matrix& m, const uint8_t* panel, const bf16* quants, const Inputs& in,
                 int64_t row, Found& found) {
  switch (rows) {
    case 1: return tile<1>(m, panel, quants, in, row, found);
    case 2: return tile<2>(m, panel, quants, in, row, found);
    case 3: return tile<3>(m, panel, quants, in, row, found);
    case 4: return tile<4>(m, panel, quants, in, row, found);
    case 5: return tile<5>(m, panel, quants, in, row, found);
    case 6: return tile<6>(m, panel, quants, in, row, found);
    case 7: return tile<7>(m, panel, quants, in, row, found);
    case 8: return tile<8>(m, panel, quants, in, row, found);
    case 9: return tile<9>(m, panel, quants, in, row, found);
    case 10: return tile<10>(m, panel, quants, in, row, found);
    case 11: return tile<11>(m, panel, quants, in, row, found);
    default: return tile<12>(m, panel, quants, in, row, found);
  }
}

inline void biases(const Matrix& m, int64_t panel, float* bias) {
  for (int64_t place = 0; place < kPanel; ++place) {
    const int64_t output = output_at(m, panel, place);
    bias[place] = m.bias && output >= 0 ? m.bias[output] : 0.0f;
  }
}

// Outputs of one panel for the rows first … last − 1.
template <class Finish>
void multiply(const Matrix& m, int64_t number, const Inputs& in, int64_t first, int64_t last, const Finish& to) {
  const uint8_t* panel = m.data + number * panel_bytes(m.format, m.inputs);
  const int64_t most = m.format == kBf16 ? kMostRows : kMostBlockRows;
  const bf16* quants = nullptr;
  if (last - first >= kUnpackedRows && m.format == kQ4) quants = unpacked<Nibbles>(panel, m.inputs);
  if (last - first >= kUnpackedRows && m.format == kQ8) quants = unpacked<Bytes>(panel, m.inputs);
  alignas(64) float bias[kPanel];
  biases(m, number, bias);
  const __m512 low = _mm512_load_ps(bias), high = _mm512_load_ps(bias + kLanes);
  alignas(64) Found found;
  for (int64_t row = first; row < last;) {
    const int64_t left = last - row;
    // Even shares: 8 rows of a block format are 4 + 4, not 6 + 2.
    const int64_t size = ceil_div(left, ceil_div(left, most));
    tile(size, m, panel, quants, in, row, found);
    for (int64_t r = 0; r < size; ++r)
      to.put(m, row + r, number, _mm512_add_ps(_mm512_load_ps(found[r]), low),
             _mm512_add_ps(_mm512_load_ps(found[r] + kLanes), high));
    row += size;
  }
}

// Few rows: all rows of some panels, so that weights are read once. Many: blocks of rows that stay in the cache.
constexpr int64_t kRowsPerTicket = 96;

struct Tickets {
  int64_t panels_each, panel_tickets, row_tickets;
  int64_t count() const { return panel_tickets * row_tickets; }
};

inline Tickets tickets_of(const Matrix& m, int64_t rows) {
  const int64_t panels = panels_of(m), row_tickets = ceil_div(rows, kRowsPerTicket);
  const int64_t each = panels >= 256 ? 8 : panels >= 64 ? 4 : 2;
  return {each, ceil_div(panels, each), row_tickets};
}

template <class Finish>
void multiply_ticket(const Matrix& m, const Tickets& t, int64_t ticket, const Inputs& in, int64_t rows,
                     const Finish& to) {
  const int64_t first = ticket / t.panel_tickets * kRowsPerTicket;
  const int64_t last = first + kRowsPerTicket < rows ? first + kRowsPerTicket : rows;
  const int64_t panel = ticket % t.panel_tickets * t.panels_each, panels = panels_of(m);
  for (int64_t p = panel; p < panel + t.panels_each && p < panels; ++p) multiply(m, p, in, first, last, to);
}

}  // namespace paceline

// What a decoder layer does between its linear layers, for bfloat16 on CPUs with AVX-512.
//
// Every result is a fixed sequence of float32 operations on one row (or on one query and its keys in logical
// order): sums run over vectors of 16 lanes in index order and end in one fixed tree, lanes behind the last
// element are zero, a row belongs to one thread, and no expression is left to the compiler to contract. So
// the bits of a row depend neither on the rows beside it nor on the number of threads.
//
// bf16 tensors are contiguous unless a stride is given. Indices are int64.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int64_t kLanes = 16;
// Below this much work (elements, or key × query products) waking a second thread costs more than it saves.
constexpr int64_t kElementsWorthThreads = 1 << 14;
constexpr int64_t kProductsWorthThreads = 1 << 9;
constexpr int kMostQueries = 4;
constexpr int kMostChunks = 16;

inline __mmask16 lanes(int64_t left) {
  return left >= kLanes ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
}

inline __m512 load(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

// Rounds to nearest even; NaN stays NaN.
inline __m512i rounded(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7fc0));
}

inline void store(bf16* to, __mmask16 mask, __m512 value) {
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(rounded(value)));
}

inline float sum_of(__m512 value) {
  const __m512 a = _mm512_add_ps(value, _mm512_shuffle_f32x4(value, value, 0x4e));
  const __m512 b = _mm512_add_ps(a, _mm512_shuffle_f32x4(a, a, 0xb1));
  const __m512 c = _mm512_add_ps(b, _mm512_permute_ps(b, 0x4e));
  return _mm512_cvtss_f32(_mm512_add_ps(c, _mm512_permute_ps(c, 0xb1)));
}

// Sums of a[0] … a[3], four partial sums each: lane 4i + j belongs to a[j].
inline __m512 partial_sums(const __m512* a) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
  const __m512d low = _mm512_castps_pd(ab), high = _mm512_castps_pd(cd);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
}

// Sums of 16 vectors, in order, from the partial sums of each four.
inline __m512 sums(const __m512* quads) {
  const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44),
                                 _mm512_shuffle_f32x4(quads[0], quads[1], 0xee));
  const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44),
                                 _mm512_shuffle_f32x4(quads[2], quads[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Cephes' expf: 2^n · p(r) with x = n ln 2 + r; relative error about 1e-7.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-128.0f), _mm512_min_ps(_mm512_set1_ps(128.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

template <class Row>
void for_rows(int64_t rows, bool many, int threads, const Row& row) {
  if (!many || threads == 1 || rows == 1) {
    for (int64_t i = 0; i < rows; ++i) row(i);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; ++i) row(i);
}

inline float inverse_rms(const bf16* x, int64_t size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 value = load(x + i, lanes(size - i));
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const float mean = sum_of(squares) / float(size);
  return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
}

inline void norm(const bf16* x, const bf16* weight, bf16* y, int64_t size, float eps) {
  const __m512 scale = _mm512_set1_ps(inverse_rms(x, size, eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = lanes(size - i);
    store(y + i, mask, _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), scale), load(weight + i, mask)));
  }
}

// Rotates the pairs (i, i + size / 2). Products and sum are rounded one by one.
inline void rotate(const bf16* x, const float* cosine, const float* sine, float scale, bf16* y, int64_t size) {
  const int64_t half = size / 2;
  const __m512 factor = _mm512_set1_ps(scale);
  const auto turned = [&](const bf16* own, const bf16* other, int64_t at, __mmask16 mask) {
    const __m512 c = _mm512_mul_ps(load(cosine + at, mask), factor);
    const __m512 s = _mm512_mul_ps(load(sine + at, mask), factor);
    return _mm512_add_ps(_mm512_mul_ps(load(own, mask), c), _mm512_mul_ps(load(other, mask), s));
  };
  for (int64_t i = 0; i < half; i += kLanes) {
    const __mmask16 mask = lanes(half - i);
    const __m512 first = turned(x + i, x + half + i, i, mask);
    const __m512 second = turned(x + half + i, x + i, half + i, mask);
    store(y + i, mask, first);
    store(y + half + i, mask, second);
  }
}

struct Keys {
  const bf16* keys;
  const bf16* values;
  const int64_t* slots;
  int64_t count;
  int64_t stride;  // elements from one position to the next
};

// Softmax attention of G queries of one row over the keys of one head. Chunks: vectors per head, 0 if only
// known at run time. scores: scratch, G × count rounded up to 16.
template <int G, int Chunks>
void attend(const bf16* queries, const Keys& k, int64_t head_dim, float* scores, bf16* out) {
  constexpr int most = Chunks ? Chunks : kMostChunks;
  const int chunks = Chunks ? Chunks : int((head_dim + kLanes - 1) / kLanes);
  const int64_t padded = (k.count + kLanes - 1) / kLanes * kLanes;
  __mmask16 masks[most];
  __m512 q[G][most];
  for (int c = 0; c < chunks; ++c) {
    masks[c] = lanes(head_dim - c * kLanes);
    for (int g = 0; g < G; ++g) q[g][c] = load(queries + g * head_dim + c * kLanes, masks[c]);
  }

  __m512 highest[G];
  for (int g = 0; g < G; ++g) highest[g] = _mm512_set1_ps(-__builtin_inff());
  for (int64_t first = 0; first < k.count; first += kLanes) {
    __m512 quads[G][4];
    for (int quad = 0; quad < 4; ++quad) {
      __m512 products[G][4];
      for (int j = 0; j < 4; ++j) {
        const int64_t at = first + quad * 4 + j;
        if (at >= k.count) {
          for (int g = 0; g < G; ++g) products[g][j] = _mm512_setzero_ps();
          continue;
        }
        const bf16* key = k.keys + k.slots[at] * k.stride;
        for (int c = 0; c < chunks; ++c) {
          const __m512 part = load(key + c * kLanes, masks[c]);
          for (int g = 0; g < G; ++g)
            products[g][j] = c ? _mm512_fmadd_ps(q[g][c], part, products[g][j]) : _mm512_mul_ps(q[g][c], part);
        }
      }
      for (int g = 0; g < G; ++g) quads[g][quad] = partial_sums(products[g]);
    }
    const __mmask16 mask = lanes(k.count - first);
    for (int g = 0; g < G; ++g) {
      const __m512 found = sums(quads[g]);
      _mm512_storeu_ps(scores + g * padded + first, found);
      highest[g] = _mm512_mask_max_ps(highest[g], mask, highest[g], found);
    }
  }

  float total[G];
  for (int g = 0; g < G; ++g) {
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(highest[g]));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t first = 0; first < k.count; first += kLanes) {
      float* place = scores + g * padded + first;
      const __m512 weight = _mm512_maskz_mov_ps(lanes(k.count - first),
                                                exponential(_mm512_sub_ps(_mm512_loadu_ps(place), top)));
      _mm512_storeu_ps(place, weight);
      sum = _mm512_add_ps(sum, weight);
    }
    total[g] = sum_of(sum);
  }

  __m512 weighted[G][most];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < chunks; ++c) weighted[g][c] = _mm512_setzero_ps();
  for (int64_t at = 0; at < k.count; ++at) {
    const bf16* value = k.values + k.slots[at] * k.stride;
    __m512 weight[G];
    for (int g = 0; g < G; ++g) weight[g] = _mm512_set1_ps(scores[g * padded + at]);
    for (int c = 0; c < chunks; ++c) {
      const __m512 part = load(value + c * kLanes, masks[c]);
      for (int g = 0; g < G; ++g) weighted[g][c] = _mm512_fmadd_ps(weight[g], part, weighted[g][c]);
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < chunks; ++c)
      store(out + g * head_dim + c * kLanes, masks[c], _mm512_div_ps(weighted[g][c], _mm512_set1_ps(total[g])));
}

template <int Chunks>
void attend(int queries, const bf16* q, const Keys& k, int64_t head_dim, float* scores, bf16* out) {
  switch (queries) {
    case 1: return attend<1, Chunks>(q, k, head_dim, scores, out);
    case 2: return attend<2, Chunks>(q, k, head_dim, scores, out);
    case 3: return attend<3, Chunks>(q, k, head_dim, scores, out);
    default: return attend<4, Chunks>(q, k, head_dim, scores, out);
  }
}

void attend(int queries, const bf16* q, const Keys& k, int64_t head_dim, float* scores, bf16* out) {
  switch (head_dim) {
    case 64: return attend<4>(queries, q, k, head_dim, scores, out);
    case 128: return attend<8>(queries, q, k, head_dim, scores, out);
    default: return attend<0>(queries, q, k, head_dim, scores, out);
  }
}

}  // namespace

extern "C" {

// residual += delta (none if null), then normed = RMSNorm(residual). All [rows, size].
void paceline_add_norm(bf16* residual, const bf16* delta, const bf16* weight, bf16* normed, int64_t rows,
                       int64_t size, float eps, int threads) {
  for_rows(rows, rows * size > kElementsWorthThreads, threads, [=](int64_t row) {
    bf16* x = residual + row * size;
    if (delta) {
      for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 mask = lanes(size - i);
        store(x + i, mask, _mm512_add_ps(load(x + i, mask), load(delta + row * size + i, mask)));
      }
    }
    norm(x, weight, normed + row * size, size, eps);
  });
}

// out [rows, size] = silu(gate) · up, with gate_up [rows, 2 · size], gate first.
void paceline_silu_mul(const bf16* gate_up, bf16* out, int64_t rows, int64_t size, int threads) {
  for_rows(rows, rows * size > kElementsWorthThreads, threads, [=](int64_t row) {
    const bf16* gate = gate_up + row * 2 * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 mask = lanes(size - i);
      const __m512 x = load(gate + i, mask);
      const __m512 below = _mm512_add_ps(exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)), _mm512_set1_ps(1.0f));
      store(out + row * size + i, mask, _mm512_mul_ps(_mm512_div_ps(x, below), load(gate + size + i, mask)));
    }
  });
}

// qkv [rows, heads + 2 · kv_heads, head_dim], overwritten. Queries and keys get their norms (null: none) and
// rotation, keys and values go to write_slots of the layer's memory [positions, kv_heads, head_dim], then
// every row attends over keys 0 … position of its path, whose slots start at key_slots[key_starts[row]].
// cosine, sine: float32 [positions, head_dim]. out: [rows, heads, head_dim]. kv_len_sum: keys of all rows.
void paceline_attention(bf16* qkv, const bf16* query_norm, const bf16* key_norm, float eps, const float* cosine,
                        const float* sine, float scale, const int64_t* positions, const int64_t* write_slots,
                        const int64_t* key_starts, const int64_t* key_slots, int64_t kv_len_sum,
                        int64_t longest, bf16* keys, bf16* values, bf16* out, int64_t rows, int64_t heads,
                        int64_t kv_heads, int64_t head_dim, int threads) {
  const int64_t width = (heads + 2 * kv_heads) * head_dim, stride = kv_heads * head_dim;
  for_rows(rows, rows * width > kElementsWorthThreads, threads, [=](int64_t row) {
    const float* c = cosine + positions[row] * head_dim;
    const float* s = sine + positions[row] * head_dim;
    for (int64_t head = 0; head < heads + kv_heads; ++head) {
      bf16* x = qkv + row * width + head * head_dim;
      const bool query = head < heads;
      if (query_norm) norm(x, query ? query_norm : key_norm, x, head_dim, eps);
      bf16* to = query ? x : keys + write_slots[row] * stride + (head - heads) * head_dim;
      rotate(x, c, s, query ? scale : 1.0f, to, head_dim);
    }
    const bf16* value = qkv + row * width + (heads + kv_heads) * head_dim;
    __builtin_memcpy(values + write_slots[row] * stride, value, size_t(stride) * sizeof(bf16));
  });

  const int64_t group = heads / kv_heads, parts = (group + kMostQueries - 1) / kMostQueries;
  const int64_t units = rows * kv_heads * parts, padded = (longest + kLanes - 1) / kLanes * kLanes;
  const auto unit = [=](int64_t number, float* scores) {
    const int64_t part = number % parts, head = number / parts % kv_heads, row = number / parts / kv_heads;
    const int64_t first = head * group + part * kMostQueries;
    const int64_t left = group - part * kMostQueries;
    const Keys k{keys + head * head_dim, values + head * head_dim, key_slots + key_starts[row],
                 positions[row] + 1, stride};
    attend(int(left < kMostQueries ? left : kMostQueries), qkv + row * width + first * head_dim, k, head_dim,
           scores, out + (row * heads + first) * head_dim);
  };
  if (threads == 1 || kv_len_sum * heads < kProductsWorthThreads) {
    std::vector<float> scores(size_t(kMostQueries * padded));
    for (int64_t number = 0; number < units; ++number) unit(number, scores.data());
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores(size_t(kMostQueries * padded));
#pragma omp for schedule(dynamic, 1)
    for (int64_t number = 0; number < units; ++number) unit(number, scores.data());
  }
}
}

// Rotary embedding and softmax attention of one row over keys in logical order.

#pragma once

#include <vector>

#include "matrix.h"

namespace paceline {

constexpr int kMostQueries = 4;
constexpr int64_t kAhead = 24;  // keys fetched before they are needed: they lie too far apart to be foreseen
constexpr int kMostPairs = 8;  // vectors of 32 bfloat16 per head: head_dim up to 256

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

inline __mmask32 pair_lanes(int64_t left) { return left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1; }

// Scores of 16 keys for G queries. Places behind the last key repeat it.
template <int G, int Pairs>
inline void score(const __m512bh (&q)[G][Pairs ? Pairs : kMostPairs], int pairs, const __mmask32* masks,
                  const Keys& k, int64_t first, __m512 (&found)[G]) {
  __m512 quads[G][4];
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    __m512 products[G][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t at = first + quad * 4 + j;
      const bf16* key = k.keys + k.slots[at < k.count ? at : k.count - 1] * k.stride;
      const bf16* later = k.keys + k.slots[at + kAhead < k.count ? at + kAhead : k.count - 1] * k.stride;
      for (int g = 0; g < G; ++g) products[g][j] = _mm512_setzero_ps();
      for (int c = 0; c < pairs; ++c) {
        _mm_prefetch((const char*)(later + c * 32), _MM_HINT_T0);
        const __m512bh part = as_bf16(_mm512_maskz_loadu_epi16(masks[c], key + c * 32));
        for (int g = 0; g < G; ++g) products[g][j] = _mm512_dpbf16_ps(products[g][j], q[g][c], part);
      }
    }
    for (int g = 0; g < G; ++g) quads[g][quad] = partial_sums(products[g]);
  }
  for (int g = 0; g < G; ++g) found[g] = sums(quads[g]);
}

// float32 lanes of elements 0 … 15 (high: 16 … 31) from those that hold the lower and the upper halves of
// every eight.
inline __m512 ordered(__m512 lower, __m512 upper, bool high) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i last = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  return _mm512_permutex2var_ps(lower, high ? last : first, upper);
}

// Softmax attention of G queries of one row over the keys of one head; weights are rounded to bfloat16. Pairs:
// vectors of 32 per head, 0 if only known at run time. scores: scratch, G × count rounded up to 16.
template <int G, int Pairs>
void attend(const bf16* queries, const Keys& k, int64_t head_dim, float* scores, bf16* out) {
  constexpr int most = Pairs ? Pairs : kMostPairs;
  const int pairs = Pairs ? Pairs : int(ceil_div(head_dim, 32));
  const int64_t padded = ceil_div(k.count, kLanes) * kLanes;
  __mmask32 masks[most];
  __m512bh q[G][most];
  for (int c = 0; c < pairs; ++c) {
    masks[c] = pair_lanes(head_dim - c * 32);
    for (int g = 0; g < G; ++g) q[g][c] = as_bf16(_mm512_maskz_loadu_epi16(masks[c], queries + g * head_dim + c * 32));
  }

  __m512 highest[G];
  for (int g = 0; g < G; ++g) highest[g] = _mm512_set1_ps(-__builtin_inff());
  for (int64_t first = 0; first < k.count; first += kLanes) {
    __m512 found[G];
    score<G, Pairs>(q, pairs, masks, k, first, found);
    for (int g = 0; g < G; ++g) {
      _mm512_storeu_ps(scores + g * padded + first, found[g]);
      highest[g] = _mm512_max_ps(highest[g], found[g]);
    }
  }

  // Two weights lie side by side as products of bfloat16 take them.
  __m512 total[G];
  for (int g = 0; g < G; ++g) {
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(highest[g]));
    bf16* weights = (bf16*)(scores + g * padded);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t first = 0; first < k.count; first += kLanes) {
      const __m512 weight =
          _mm512_maskz_mov_ps(lanes(k.count - first),
                              exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + g * padded + first), top)));
      store(weights + first, 0xffff, weight);
      sum = _mm512_add_ps(sum, weight);
    }
    total[g] = _mm512_set1_ps(sum_of(sum));
  }

  __m512 lower[G][most], upper[G][most];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < pairs; ++c) lower[g][c] = upper[g][c] = _mm512_setzero_ps();
  for (int64_t at = 0; at < k.count; at += 2) {
    const bf16* one = k.values + k.slots[at] * k.stride;
    const bf16* two = k.values + k.slots[at + 1 < k.count ? at + 1 : at] * k.stride;
    const bf16* later = k.values + k.slots[at + kAhead < k.count ? at + kAhead : at] * k.stride;
    const bf16* last = k.values + k.slots[at + 1 + kAhead < k.count ? at + 1 + kAhead : at] * k.stride;
    __m512bh weight[G];
    for (int g = 0; g < G; ++g) weight[g] = input_pair((const bf16*)(scores + g * padded) + at);
    for (int c = 0; c < pairs; ++c) {
      _mm_prefetch((const char*)(later + c * 32), _MM_HINT_T0);
      _mm_prefetch((const char*)(last + c * 32), _MM_HINT_T0);
      const __m512i a = _mm512_maskz_loadu_epi16(masks[c], one + c * 32);
      const __m512i b = _mm512_maskz_loadu_epi16(masks[c], two + c * 32);
      const __m512bh low = as_bf16(_mm512_unpacklo_epi16(a, b)), high = as_bf16(_mm512_unpackhi_epi16(a, b));
      for (int g = 0; g < G; ++g) {
        lower[g][c] = _mm512_dpbf16_ps(lower[g][c], weight[g], low);
        upper[g][c] = _mm512_dpbf16_ps(upper[g][c], weight[g], high);
      }
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < pairs; ++c)
      for (int half = 0; half < 2; ++half) {
        const int64_t first = c * 32 + half * kLanes;
        if (first >= head_dim) break;
        const __m512 value = ordered(lower[g][c], upper[g][c], half == 1);
        store(out + g * head_dim + first, lanes(head_dim - first), _mm512_div_ps(value, total[g]));
      }
}

template <int Pairs>
void attend(int queries, const bf16* q, const Keys& k, int64_t head_dim, float* scores, bf16* out) {
  switch (queries) {
    case 1: return attend<1, Pairs>(q, k, head_dim, scores, out);
    case 2: return attend<2, Pairs>(q, k, head_dim, scores, out);
    case 3: return attend<3, Pairs>(q, k, head_dim, scores, out);
    default: return attend<4, Pairs>(q, k, head_dim, scores, out);
  }
}

inline void attend(int queries, const bf16* q, const Keys& k, int64_t head_dim, float* scores, bf16* out) {
  switch (head_dim) {
    case 64: return attend<2>(queries, q, k, head_dim, scores, out);
    case 128: return attend<4>(queries, q, k, head_dim, scores, out);
    default: return attend<0>(queries, q, k, head_dim, scores, out);
  }
}

}  // namespace paceline

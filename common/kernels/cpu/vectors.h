// Vectors of 16 float32 lanes over bfloat16 and float32 memory.
//
// Every result is a fixed sequence of float32 operations on one row: sums run over vectors in index order and
// end in one fixed tree, lanes behind the last element are zero, and no expression is left to the compiler to
// contract. So the bits of a row depend neither on the rows beside it nor on the number of threads.

#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace paceline {

using bf16 = uint16_t;

constexpr int64_t kLanes = 16;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline __mmask16 lanes(int64_t left) {
  return left >= kLanes ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
}

inline __m512 load(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

// Rounds to nearest even.
inline void store(bf16* to, __mmask16 mask, __m512 value) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

inline void store(float* to, __mmask16 mask, __m512 value) { _mm512_mask_storeu_ps(to, mask, value); }

inline float sum_of(__m512 value) {
  const __m512 a = _mm512_add_ps(value, _mm512_shuffle_f32x4(value, value, 0x4e));
  const __m512 b = _mm512_add_ps(a, _mm512_shuffle_f32x4(a, a, 0xb1));
  const __m512 c = _mm512_add_ps(b, _mm512_permute_ps(b, 0x4e));
  return _mm512_cvtss_f32(_mm512_add_ps(c, _mm512_permute_ps(c, 0xb1)));
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

inline __m512 silu(__m512 x) {
  const __m512 below = _mm512_add_ps(exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)), _mm512_set1_ps(1.0f));
  return _mm512_div_ps(x, below);
}

// y = x / rms(x) · weight.
inline void rms_norm(const bf16* x, const bf16* weight, bf16* y, int64_t size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 value = load(x + i, lanes(size - i));
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const float mean = sum_of(squares) / float(size);
  const __m512 scale = _mm512_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps))));
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = lanes(size - i);
    store(y + i, mask, _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), scale), load(weight + i, mask)));
  }
}

}  // namespace paceline

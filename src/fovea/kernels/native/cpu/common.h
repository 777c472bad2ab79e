// Loads, stores and functions that all CPU kernels share. The kernels read and write rows of bf16 and compute
// in float32. All of them need AVX-512 with BF16.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace fovea {

using bf16 = uint16_t;

inline float widen(bf16 value) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(value) << 16)));
}

// Loads 16 values. Loads and stores need no alignment.
inline __m512 load16(const bf16* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m512 load16(const bf16* from, __mmask16 mask) {
    const __m256i half = _mm256_maskz_loadu_epi16(mask, from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline void store16(bf16* to, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(values));
}

inline void store16(bf16* to, __m512 values, __mmask16 mask) {
    _mm256_mask_storeu_epi16(to, mask, narrow(values));
}

// The values rounded to bf16, as float32.
inline __m512 rounded(__m512 values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(values)), 16));
}

// A mask of the first `count` of 16 lanes; count may be negative or larger than 16.
inline __mmask16 first(int64_t count) {
    return count >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
}

// e^x to about 2 units in the last place of float32: 2^n times a polynomial on [-ln2/2, ln2/2].
inline __m512 exp16(__m512 x) {
    // VMINPS and VMAXPS return their second operand if one of the two is NaN. x is the second, so NaN stays
    // NaN.
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

inline __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

}  // namespace fovea

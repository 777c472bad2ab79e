// Operations on rows between products: normalisation, rotary embedding and the write to the KV cache.

#include "kernels.h"

using namespace fovea;

namespace {

// x / rms(x), rounded to bf16, then scaled: the order in which Llama checkpoints were trained.
inline void rms_row(const bf16* x, const bf16* weight, int64_t width, float eps, bf16* out) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 v = load16(x + i, first(width - i));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    const float mean = _mm512_reduce_add_ps(sum) / static_cast<float>(width);
    const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 mask = first(width - i);
        const __m512 v = rounded(_mm512_mul_ps(load16(x + i, mask), scale));
        store16(out + i, _mm512_mul_ps(v, load16(weight + i, mask)), mask);
    }
}

// Rotary embedding in place; value i forms a pair with value i + dim / 2. cos and sin hold `dim` values each.
inline void rotate_head(bf16* head, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = first(half - i);
        const __m512 low = load16(head + i, mask), high = load16(head + half + i, mask);
        const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
        const __m512 c2 = _mm512_maskz_loadu_ps(mask, cos + half + i), s2 = _mm512_maskz_loadu_ps(mask, sin + half + i);
        store16(head + i, _mm512_fnmadd_ps(high, s, _mm512_mul_ps(low, c)), mask);
        store16(head + half + i, _mm512_fmadd_ps(low, s2, _mm512_mul_ps(high, c2)), mask);
    }
}

inline void copy(const bf16* from, bf16* to, int64_t count) { __builtin_memcpy(to, from, count * sizeof(bf16)); }

}  // namespace

extern "C" {

// out = RMS norm of x; x, out (rows, width), weight (width).
void fovea_rms_norm(const bf16* x, int64_t rows, int64_t width, const bf16* weight, float eps, bf16* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
    for (int64_t row = 0; row < rows; ++row) rms_row(x + row * width, weight, width, eps, out + row * width);
}

// Rotates the first `turned` heads of x (rows, heads, dim) in place; cos, sin (rows, dim).
void fovea_rotate(bf16* x, int64_t rows, int64_t heads, int64_t turned, int64_t dim, const float* cos, const float* sin,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (rows * turned * dim > 16384)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < turned; ++head)
            rotate_head(x + (row * heads + head) * dim, cos + row * dim, sin + row * dim, dim);
}

// Each row of x holds queries, keys and values: (rows, heads + 2 * kv_heads, dim). Normalises (if weights are
// given) and rotates queries and keys in place, and writes keys and values to their slots of kv (slots, 2,
// kv_heads, dim).
void fovea_rotate_store(bf16* x, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, const float* cos,
                        const float* sin, const bf16* q_weight, const bf16* k_weight, float eps, bf16* kv,
                        const int64_t* slots, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > 16384)
    for (int64_t row = 0; row < rows; ++row) {
        bf16* at = x + row * (heads + 2 * kv_heads) * dim;
        for (int64_t head = 0; head < heads + kv_heads; ++head) {
            const bf16* weight = head < heads ? q_weight : k_weight;
            if (weight) rms_row(at + head * dim, weight, dim, eps, at + head * dim);
            rotate_head(at + head * dim, cos + row * dim, sin + row * dim, dim);
        }
        copy(at + heads * dim, kv + slots[row] * 2 * kv_heads * dim, 2 * kv_heads * dim);
    }
}

}  // extern "C"

// The steps after the sums of a product: bias, activation, gate, residual and rounding. They are the same for
// every format of weights.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "levels.h"
#include "tiles.h"

namespace fovea {

inline __m512 gelu_tanh(__m512 x) {
    const __m512 cubed = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 inner = _mm512_fmadd_ps(cubed, _mm512_set1_ps(0.044715f), x);
    return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(inner, _mm512_set1_ps(1.5957691216f))));
}

// GELU with erf by formula 7.1.26 of Abramowitz and Stegun, absolute error below 1.5e-7.
inline __m512 gelu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 z = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f));
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
    __m512 p = _mm512_set1_ps(1.061405429f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), exp16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(z, z))));
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 twice = _mm512_mask_blend_ps(negative, _mm512_sub_ps(_mm512_set1_ps(2.0f), tail), tail);
    return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), twice);
}

inline __m512 activated(int kind, __m512 x) {
    switch (kind) {
        case SILU: case SILU_GATED: return _mm512_mul_ps(x, sigmoid(x));
        case GELU_TANH: case GELU_TANH_GATED: return gelu_tanh(x);
        case GELU: case GELU_GATED: return gelu(x);
        case QUICK_GELU: return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(x, _mm512_set1_ps(1.702f))));
        default: return x;
    }
}

// Finishes one row of a panel's sums c (64) and stores the first `width` results to out: bias, activation,
// gate, residual, rounding. A gated panel holds 32 gates, then the 32 values that they scale.
inline void finish_row(const float* c, const float* bias, int kind, const bf16* residual, bf16* out, int64_t width) {
    __m512 values[TILES];
    for (int t = 0; t < TILES; ++t) {
        values[t] = _mm512_loadu_ps(c + t * LANES);
        if (bias) values[t] = _mm512_add_ps(values[t], _mm512_loadu_ps(bias + t * LANES));
    }
    const bool gated = kind >= SILU_GATED && kind <= GELU_GATED;
    for (int t = 0; t < (gated ? TILES / 2 : TILES); ++t) {
        const __mmask16 mask = first(width - t * LANES);
        if (!mask) break;
        __m512 value = activated(kind, values[t]);
        if (gated) value = _mm512_mul_ps(value, values[t + TILES / 2]);
        if (residual) value = _mm512_add_ps(rounded(value), load16(residual + t * LANES, mask));
        store16(out + t * LANES, value, mask);
    }
}

// The arguments of one product: the weight, its input rows x (`ldx` values apart) and the rows of out.
struct Call {
    const Weight& weight;
    const bf16* x;
    int64_t ldx;
    int kind;
    const bf16* residual;
    bf16* out;
    LevelRows rows;  // x in 8 bits, if the weight is quantized

    bool gated() const { return kind >= SILU_GATED && kind <= GELU_GATED; }
    int64_t width() const { return gated() ? weight.n / 2 : weight.n; }
    int64_t step() const { return gated() ? PANEL / 2 : PANEL; }
};

// Finishes the sums c (rows, 64) of rows [start, start + rows) of a panel and stores them to call.out.
inline void finish_rows(const Call& call, int64_t panel, int64_t start, int64_t rows, const float* c) {
    const float* bias = call.weight.bias ? call.weight.bias + panel * PANEL : nullptr;
    const int64_t width = call.width(), step = call.step();
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (start + r) * width + panel * step;
        finish_row(c + r * PANEL, bias, call.kind, call.residual ? call.residual + at : nullptr, call.out + at,
                   std::min(step, width - panel * step));
    }
}

}  // namespace fovea

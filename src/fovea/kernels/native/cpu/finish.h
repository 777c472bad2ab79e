// The steps after the sums of a product: bias, activation, gate, residual and rounding. They are the same for
// every format of weights.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "levels.h"
#include "tiles.h"

namespace fovea {

FOVEA_INLINE Floats gelu_tanh(Floats x) {
    const Floats inner = hn::MulAdd(hn::Mul(hn::Mul(x, x), x), hn::Set(f32, 0.044715f), x);
    return hn::Mul(x, sigmoid(hn::Mul(inner, hn::Set(f32, 1.5957691216f))));
}

// GELU with erf by formula 7.1.26 of Abramowitz and Stegun, absolute error below 1.5e-7.
FOVEA_INLINE Floats gelu(Floats x) {
    const Floats one = hn::Set(f32, 1.0f);
    const Floats z = hn::Mul(hn::Abs(x), hn::Set(f32, 0.70710678f));
    const Floats t = hn::Div(one, hn::MulAdd(z, hn::Set(f32, 0.3275911f), one));
    Floats p = hn::Set(f32, 1.061405429f);
    p = hn::MulAdd(p, t, hn::Set(f32, -1.453152027f));
    p = hn::MulAdd(p, t, hn::Set(f32, 1.421413741f));
    p = hn::MulAdd(p, t, hn::Set(f32, -0.284496736f));
    p = hn::MulAdd(p, t, hn::Set(f32, 0.254829592f));
    const Floats tail = hn::Mul(hn::Mul(p, t), exponential(hn::Neg(hn::Mul(z, z))));
    const auto negative = hn::Lt(x, hn::Zero(f32));
    const Floats twice = hn::IfThenElse(negative, tail, hn::Sub(hn::Set(f32, 2.0f), tail));
    return hn::Mul(hn::Mul(x, hn::Set(f32, 0.5f)), twice);
}

FOVEA_INLINE Floats activated(int kind, Floats x) {
    switch (kind) {
        case SILU: case SILU_GATED: return hn::Mul(x, sigmoid(x));
        case GELU_TANH: case GELU_TANH_GATED: return gelu_tanh(x);
        case GELU: case GELU_GATED: return gelu(x);
        case QUICK_GELU: return hn::Mul(x, sigmoid(hn::Mul(x, hn::Set(f32, 1.702f))));
        default: return x;
    }
}

// Finishes one row of a panel's sums c (64) and stores the first `width` results to out: bias, activation,
// gate, residual, rounding. A gated panel holds 32 gates, then the 32 values that they scale.
inline void finish_row(const float* c, const float* bias, int kind, const bf16* residual, bf16* out, int64_t width) {
    const bool gated = kind >= SILU_GATED && kind <= GELU_GATED;
    const auto sum = [&](int64_t at) {
        const Floats value = hn::LoadU(f32, c + at);
        return bias ? hn::Add(value, hn::LoadU(f32, bias + at)) : value;
    };
    for (int64_t at = 0; at < width; at += LANES) {
        Floats value = activated(kind, sum(at));
        if (gated) value = hn::Mul(value, sum(at + PANEL / 2));
        if (residual) value = hn::Add(rounded(value), load(residual + at, width - at));
        store(out + at, value, width - at);
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
    int64_t ldo;  // values from row to row of out and residual
    // x for tiles of bf16, `input_stride` values apart, if the weight is not quantized. With AMX: only the rows of this call,
    // in blocks of 16 as the registers load them, with `input_stride` values per block.
    const Input* inputs;
    int64_t input_stride;
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
        const int64_t at = (start + r) * call.ldo + panel * step;
        finish_row(c + r * PANEL, bias, call.kind, call.residual ? call.residual + at : nullptr, call.out + at,
                   std::min(step, width - panel * step));
    }
}

}  // namespace fovea

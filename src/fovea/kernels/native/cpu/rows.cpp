// Operations on rows between products: normalisation, rotary embedding and the write to the KV cache.

#include <cmath>

#include "kernels.h"
#include "pages.h"
#include "team.h"

using namespace fovea;

namespace {

// x / rms(x), rounded to bf16, then scaled by the weight: the order in which Llama checkpoints were trained.
// centered: scaled by 1 + weight without rounding before, as Gemma and Qwen3.5 were.
inline void rms_row(const bf16* x, const bf16* weight, int64_t width, float eps, bool centered, bf16* out) {
    Floats sum = hn::Zero(f32);
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats v = load(x + i, width - i);
        sum = hn::MulAdd(v, v, sum);
    }
    const float mean = hn::ReduceSum(f32, sum) / static_cast<float>(width);
    const Floats scale = hn::Set(f32, 1.0f / std::sqrt(mean + eps));
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats v = hn::Mul(load(x + i, width - i), scale), w = load(weight + i, width - i);
        const Floats y = centered ? hn::Mul(v, hn::Add(w, hn::Set(f32, 1.0f))) : hn::Mul(rounded(v), w);
        store(out + i, y, width - i);
    }
}

// Rotary embedding of `dim` values in place; value i forms a pair with value i + dim / 2. cos and sin hold `dim` values.
inline void rotate_head(bf16* head, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = half - i;
        const Floats low = load(head + i, count), high = load(head + half + i, count);
        const Floats c = load(cos + i, count), s = load(sin + i, count);
        const Floats c2 = load(cos + half + i, count), s2 = load(sin + half + i, count);
        store(head + i, hn::NegMulAdd(high, s, hn::Mul(low, c)), count);
        store(head + half + i, hn::MulAdd(low, s2, hn::Mul(high, c2)), count);
    }
}

// Rounds `dim` numbers to int8. Returns their scale. `round_heads` in pages.py is the twin. A number that is not finite
// makes the scale NaN, and so the result of every row that reads it.
inline bf16 quantize_head(const bf16* head, int64_t dim, int8_t* levels) {
    Floats most = hn::Zero(f32), broken = hn::Zero(f32);
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats v = load(head + i, dim - i);
        most = hn::Max(most, hn::Abs(v));
        broken = hn::MulAdd(v, hn::Zero(f32), broken);
    }
    const bf16 scale = narrow((hn::ReduceMax(f32, most) + hn::ReduceSum(f32, broken)) / 127.0f);
    const float wide = widen(scale);
    const Floats inverse = hn::Set(f32, wide > 1e-30f ? 1.0f / wide : 0.0f);  // TINY in pages.py
    const hn::Rebind<int8_t, F> i8;
    for (int64_t i = 0; i < dim; i += LANES) {
        const Ints level = hn::NearestInt(hn::Mul(load(head + i, dim - i), inverse));
        const auto clamped = hn::DemoteTo(i8, hn::Max(hn::Min(level, hn::Set(i32, 127)), hn::Set(i32, -127)));
        hn::StoreN(clamped, i8, levels + i, std::min<int64_t>(LANES, dim - i));
    }
    return scale;
}

// Writes the keys and values of a row, (2 * kv_heads, dim), to their slot.
inline void store_row(const bf16* row, int64_t kv_heads, int64_t dim, const Pages& pages, int64_t slot) {
    const int64_t heads = 2 * kv_heads, count = heads * dim, offset = slot % pages.block;
    uint8_t* page = pages.data + slot / pages.block * pages.page;
    if (!pages.quantized) {
        std::memcpy(page + offset * count * sizeof(bf16), row, count * sizeof(bf16));
        return;
    }
    int8_t* levels = reinterpret_cast<int8_t*>(page) + offset * count;
    bf16* scales = reinterpret_cast<bf16*>(page + pages.block * count) + offset * heads;
    for (int64_t head = 0; head < heads; ++head)
        scales[head] = quantize_head(row + head * dim, dim, levels + head * dim);
}

}  // namespace

extern "C" {

// out = RMS norm of x; x, out (rows, width), weight (width). centered: see rms_row.
void fovea_rms_norm(const bf16* x, int64_t rows, int64_t width, const bf16* weight, float eps, int centered, bf16* out,
                    int threads) {
    each_row(threads, rows, width,
             [&](int64_t row) { rms_row(x + row * width, weight, width, eps, centered, out + row * width); });
}

// Rotates the first `turned` heads of x (rows, heads, dim) in place; cos, sin (rows, dim).
void fovea_rotate(bf16* x, int64_t rows, int64_t heads, int64_t turned, int64_t dim, const float* cos, const float* sin,
                  int threads) {
    each_row(threads, rows, turned * dim, [&](int64_t row) {
        for (int64_t head = 0; head < turned; ++head)
            rotate_head(x + (row * heads + head) * dim, cos + row * dim, sin + row * dim, dim);
    });
}

// Each row of x holds queries, keys and values: (rows, heads + 2 * kv_heads, dim). Normalises (if weights are
// given; centered: see rms_row) and rotates queries and keys in place, and writes keys and values to their slots of kv.
// Only the first `rotary` values of a head are rotated; cos, sin (rows, rotary).
void fovea_rotate_store(bf16* x, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary,
                        const float* cos, const float* sin, const bf16* q_weight, const bf16* k_weight, float eps,
                        int centered, const Pages* kv, const int64_t* slots, int threads) {
    each_row(threads, rows, heads * dim, [&](int64_t row) {
        bf16* at = x + row * (heads + 2 * kv_heads) * dim;
        for (int64_t head = 0; head < heads + kv_heads; ++head) {
            const bf16* weight = head < heads ? q_weight : k_weight;
            if (weight) rms_row(at + head * dim, weight, dim, eps, centered, at + head * dim);
            rotate_head(at + head * dim, cos + row * rotary, sin + row * rotary, rotary);
        }
        store_row(at + heads * dim, kv_heads, dim, *kv, slots[row]);
    });
}

}  // extern "C"

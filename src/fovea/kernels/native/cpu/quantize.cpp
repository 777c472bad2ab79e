// Quantizes weights and rows to 8 or 4 bits, packs the codes of weights that are quantized already, and dequantizes rows
// of weights. The layouts are in levels.h.

#include <cmath>

#include "formats.h"
#include "pages.h"
#include "team.h"

namespace fovea {
namespace {

// The largest magnitude of `count` values. If one of them is NaN, the result is NaN, because its bits are
// larger than those of infinity.
inline float magnitude(const bf16* values, int64_t count) {
    constexpr int64_t each = 2 * LANES;
    auto most = hn::Zero(u16);
    for (int64_t i = 0; i < count; i += each) {
        const auto bits = count - i >= each ? hn::LoadU(u16, values + i) : hn::LoadN(u16, values + i, count - i);
        most = hn::Max(most, hn::And(bits, hn::Set(u16, 0x7FFF)));
    }
    return widen(hn::ReduceMax(u16, most));
}

// 1 / scale, or 0 for a scale of almost zero.
inline float inverse(float scale) { return std::fabs(scale) > 1e-30f ? 1.0f / scale : 0.0f; }

// Values times `factor`, rounded to whole numbers and clamped to [-127, 127].
FOVEA_INLINE Ints leveled(Floats values, float factor) {
    const Floats whole = hn::Round(hn::Mul(values, hn::Set(f32, factor)));
    const Floats limit = hn::Set(f32, 127.0f);
    return hn::NearestInt(hn::Min(hn::Max(whole, hn::Neg(limit)), limit));
}

// Quantizes one output's group of a weight to levels plus 128. count: at most 128 values, the rest is zero.
// Returns the scale.
bf16 quantize8(const bf16* values, int64_t count, uint8_t* levels) {
    const hn::Rebind<uint8_t, I> bytes;
    const bf16 scale = narrow(magnitude(values, count) / 127.0f);
    const float factor = inverse(widen(scale));
    for (int64_t i = 0; i < Int8::SUB; i += LANES) {
        const Ints level = leveled(load(values + i, count - i), factor);
        hn::StoreU(hn::DemoteTo(bytes, hn::Add(level, hn::Set(i32, 128))), bytes, levels + i);
    }
    return scale;
}

// Bits of float16, to the nearest, ties to even, and back.
inline uint16_t to_half(float value) { return hwy::F16FromF32(value).bits; }
inline float from_half(uint16_t bits) { return hwy::F32FromF16(hwy::float16_t::FromBits(bits)); }

// The best code for every value of a group: code = (value - minimum) / scale. Values beyond the ends get the first or
// the last code. The sums of codes, of their squares, and of their products with the values follow.
struct Fit {
    float codes = 0, squares = 0, products = 0;
};

FOVEA_INLINE Fit choose_codes(const float* values, float scale, float minimum, uint8_t* codes) {
    const hn::Rebind<uint8_t, I> bytes;
    const Floats factor = hn::Set(f32, inverse(scale)), low = hn::Set(f32, minimum);
    Floats sum = hn::Zero(f32), squares = hn::Zero(f32), products = hn::Zero(f32);
    for (int i = 0; i < Int4::SUB; i += LANES) {
        const Floats value = hn::Load(f32, values + i);
        const Floats whole = hn::Round(hn::Mul(hn::Sub(value, low), factor));
        const Floats code = hn::Min(hn::Max(whole, hn::Zero(f32)), hn::Set(f32, 15.0f));
        sum = hn::Add(sum, code), squares = hn::MulAdd(code, code, squares), products = hn::MulAdd(code, value, products);
        hn::StoreU(hn::DemoteTo(bytes, hn::NearestInt(code)), bytes, codes + i);
    }
    return {hn::ReduceSum(f32, sum), hn::ReduceSum(f32, squares), hn::ReduceSum(f32, products)};
}

FOVEA_INLINE float squared_error(const float* values, const uint8_t* codes, float scale, float minimum) {
    const hn::Rebind<uint8_t, I> bytes;
    Floats error = hn::Zero(f32);
    for (int i = 0; i < Int4::SUB; i += LANES) {
        const Floats code = hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(bytes, codes + i)));
        const Floats value = hn::MulAdd(code, hn::Set(f32, scale), hn::Set(f32, minimum));
        const Floats off = hn::Sub(hn::Load(f32, values + i), value);
        error = hn::MulAdd(off, off, error);
    }
    return hn::ReduceSum(f32, error);
}

// Quantizes one output's group of 32 values to codes, one per byte. Several ranges inside that of the values are tried.
// For each, scale and minimum are fitted to the codes by least squares; the pair with the least squared error is taken.
void quantize4(const bf16* values, int64_t count, uint8_t* codes, uint16_t* scale_bits, uint16_t* minimum_bits) {
    constexpr int SUB = Int4::SUB, STEPS = 4;
    alignas(64) float wide[SUB];
    Floats low = hn::Set(f32, INFINITY), high = hn::Set(f32, -INFINITY), all = hn::Zero(f32);
    for (int i = 0; i < SUB; i += LANES) {
        const Floats value = load(values + i, count - i);
        hn::Store(value, f32, wide + i);
        low = hn::Min(low, value), high = hn::Max(high, value), all = hn::Add(all, value);
    }
    const float least = hn::ReduceMin(f32, low), most = hn::ReduceMax(f32, high), sum = hn::ReduceSum(f32, all);
    std::memset(codes, 0, SUB);
    *scale_bits = 0, *minimum_bits = to_half(least);
    if (!(std::fabs(sum) < INFINITY) || !(most > least)) {  // one value, or NaN or infinity, which has to stay visible
        if (sum - sum != 0) *minimum_bits = to_half(sum - sum);
        return;
    }
    float best = INFINITY;
    const float range = most - least;
    for (int below = 0; below < STEPS; ++below)
        for (int above = 0; above < STEPS; ++above) {
            alignas(64) uint8_t found[SUB];
            float minimum = least + range * 0.04f * below;
            float scale = (most - range * 0.04f * above - minimum) / 15.0f;
            const Fit fit = choose_codes(wide, scale, minimum, found);
            const float spread = SUB * fit.squares - fit.codes * fit.codes;
            if (spread > 0) {
                scale = (SUB * fit.products - fit.codes * sum) / spread;
                minimum = (sum - scale * fit.codes) / SUB;
            }
            const uint16_t half = to_half(scale), low_half = to_half(minimum);
            scale = from_half(half), minimum = from_half(low_half);
            choose_codes(wide, scale, minimum, found);
            const float error = squared_error(wide, found, scale, minimum);
            if (error < best) {
                best = error, *scale_bits = half, *minimum_bits = low_half;
                std::memcpy(codes, found, SUB);
            }
        }
}

// Writes the codes of one output's group, one per byte, to its place in a panel. group: address of the group's codes.
template <class Format>
void place_codes(const uint8_t* codes, int lane, uint8_t* group) {
    for (int quad = 0; quad < Format::QUADS; ++quad) {
        uint32_t four, other;
        std::memcpy(&four, codes + 4 * quad, 4);
        uint8_t* to = group + (Format::PAIRED ? quad / 2 : quad) * 256 + lane * 4;
        if (Format::PAIRED) {
            std::memcpy(&other, codes + 4 * ++quad, 4);
            four |= other << 4;
        }
        std::memcpy(to, &four, 4);
    }
}

// Quantizes the 64 rows order[0..63] of a weight (n, k) into one panel; -1: padding.
template <class Format>
void quantize_panel(const bf16* weight, int64_t k, const int64_t* order, uint8_t* data) {
    for (int64_t from = 0; from < k; from += Format::GROUP, data += Format::BYTES) {
        uint16_t* scales = reinterpret_cast<uint16_t*>(data + Format::CODES);
        for (int lane = 0; lane < PANEL; ++lane) {
            alignas(64) uint8_t codes[Format::GROUP];
            const bf16* values = order[lane] < 0 ? nullptr : weight + order[lane] * k + from;
            const int64_t count = values ? std::min<int64_t>(Format::GROUP, k - from) : 0;
            if constexpr (Format::SCALING == CENTRED)
                scales[lane] = quantize8(values, count, codes);
            else
                quantize4(values, count, codes, scales + lane, scales + PANEL + lane);
            place_codes<Format>(codes, lane, data);
        }
    }
}

// The scales of a weight that is quantized already, by row and group. The fields have the order of `ScalesStruct` in
// products.py. groups: groups of a row that exist; those of a block that do not exist have zeros.
struct Scales {
    const void *scale, *offset;              // float16 (zeros: bytes), or signed bytes if nested; offset: minima or zeros, or null
    const uint16_t *outer, *outer_offset;    // float16 of each block, if nested
    int64_t groups;
};

// Packs the rows order[0..63] of codes (n, k), one per byte, into one panel; -1: padding.
template <class Format>
void pack_panel(const uint8_t* codes, int64_t k, const int64_t* order, const Scales& scales, uint8_t* data) {
    constexpr bool NEST = Format::SCALING == NESTED;
    constexpr int WIDE = NEST ? 1 : 2, OFFSET = Format::SCALING == ZERO || NEST ? 1 : 2;  // bytes of a scale and of an offset
    const int64_t blocks = (k + Format::GROUP - 1) / Format::GROUP;
    for (int64_t block = 0; block < blocks; ++block, data += Format::BYTES) {
        uint8_t* scale = data + Format::SUBS * Format::CODES;
        uint8_t* offset = scale + Format::SUBS * PANEL * WIDE;
        std::memset(scale, 0, Format::SCALES);
        for (int lane = 0; lane < PANEL; ++lane) {
            const int64_t row = order[lane];
            for (int sub = 0; sub < Format::SUBS; ++sub) {
                const int64_t g = block * Format::SUBS + sub, from = g * Format::SUB;
                const int64_t count = row < 0 ? 0 : std::max<int64_t>(0, std::min<int64_t>(Format::SUB, k - from));
                uint8_t group[Format::SUB] = {};
                if (count) std::memcpy(group, codes + row * k + from, count);
                place_codes<Format>(group, lane, data + sub * Format::CODES);
                if (row < 0 || g >= scales.groups) continue;
                const int64_t at = row * scales.groups + g, to = sub * PANEL + lane;
                std::memcpy(scale + to * WIDE, static_cast<const uint8_t*>(scales.scale) + at * WIDE, WIDE);
                if (scales.offset)
                    std::memcpy(offset + to * OFFSET, static_cast<const uint8_t*>(scales.offset) + at * OFFSET, OFFSET);
            }
            if (NEST && row >= 0) {
                uint8_t* factors = offset + Format::SUBS * PANEL;
                std::memcpy(factors + 2 * lane, scales.outer + row * blocks + block, 2);
                std::memcpy(factors + 2 * PANEL + 2 * lane, scales.outer_offset + row * blocks + block, 2);
            }
        }
    }
}

// Writes one row of the weight to out (k), dequantized.
template <class Format>
void copy_row(const Weight& w, int64_t row, bf16* out) {
    constexpr int SUBS = Format::SUBS;
    const int64_t blocks = (w.k + Format::GROUP - 1) / Format::GROUP, lane = row % PANEL;
    const uint8_t* block = w.data + row / PANEL * blocks * Format::BYTES;
    for (int64_t from = 0; from < w.k; from += Format::SUB) {
        const int sub = from / Format::SUB % SUBS;
        if (from > 0 && sub == 0) block += Format::BYTES;
        const uint8_t* codes = block + sub * Format::CODES;
        const uint8_t* scales = block + SUBS * Format::CODES;
        const auto half = [&](const uint8_t* at, int64_t i) { return reinterpret_cast<const uint16_t*>(at)[i]; };
        float scale, zero = 0, minimum = 0;
        if constexpr (Format::SCALING == NESTED) {
            const int8_t* inner = reinterpret_cast<const int8_t*>(scales) + sub * PANEL + lane;
            const uint8_t* outer = scales + 2 * SUBS * PANEL;
            scale = from_half(half(outer, lane)) * static_cast<float>(inner[0]);
            minimum = from_half(half(outer, PANEL + lane)) * static_cast<float>(inner[SUBS * PANEL]);
        } else {
            const uint16_t bits = half(scales, sub * PANEL + lane);
            scale = Format::SCALING == CENTRED ? widen(bits) : from_half(bits);
            const uint8_t* offsets = scales + SUBS * PANEL * 2;
            if (Format::SCALING == CENTRED || Format::SCALING == EVEN) zero = 128;
            if (Format::SCALING == ZERO) zero = offsets[sub * PANEL + lane];
            if (Format::SCALING == MINIMUM) minimum = from_half(half(offsets, sub * PANEL + lane));
        }
        const int64_t count = std::min<int64_t>(Format::SUB, w.k - from);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t quad = i / 4;
            uint8_t code = codes[(Format::PAIRED ? quad / 2 : quad) * 256 + lane * 4 + i % 4];
            if (Format::PAIRED) code = quad % 2 ? code >> 4 : code & 15;
            const float product = (static_cast<float>(code) - zero) * scale;
            out[from + i] = narrow(product + minimum);
        }
    }
}

// Quantizes one row of x (k values) into row `row` of `rows`, whose groups have SUB values.
template <class Format>
void quantize_row(const bf16* x, int64_t k, int64_t row, const LevelRows& rows) {
    constexpr int SUB = Format::SUB;
    const hn::Rebind<Level<Format>, I> narrowed;
    auto* levels = static_cast<Level<Format>*>(rows.levels);
    for (int64_t g = 0; g < rows.groups; ++g) {
        const int64_t at = row * rows.groups + g, count = std::max<int64_t>(0, std::min<int64_t>(SUB, k - g * SUB));
        const float most = count ? magnitude(x + g * SUB, count) : 0.0f;
        const float factor = most > 1e-30f ? 127.0f / most : 0.0f;
        Ints sum = hn::Zero(i32);
        for (int64_t i = 0; i < SUB; i += LANES) {
            Ints level = leveled(load(x + g * SUB + i, count - i), factor);
            sum = hn::Add(sum, level);
            if constexpr (PARTS<Format> == 2) level = hn::Per4LaneBlockShuffle<3, 1, 2, 0>(level);  // the order of operands
            hn::StoreU(hn::DemoteTo(narrowed, level), narrowed, levels + at * SUB + i);
        }
        rows.scale[at] = most / 127.0f;
        rows.sum[at] = hn::ReduceSum(i32, sum);
    }
}

}  // namespace

LevelRows quantize_rows(const bf16* x, int64_t ldx, int64_t count, int64_t k, int64_t format, LevelRoom& room, int threads) {
    return with_format(format, [&](auto kind) {
        using Kind = decltype(kind);
        const int64_t groups = (k + Kind::GROUP - 1) / Kind::GROUP * Kind::SUBS;
        // Matrix registers load 16 rows, also where fewer are left.
        const int64_t loaded = count + (FOVEA_AMX ? MATRIX_ROWS - 1 : 0);
        const int64_t bytes = loaded * groups * Kind::SUB * static_cast<int64_t>(sizeof(Level<Kind>));
        const LevelRows rows{grown_aligned(room.levels, bytes), grown(room.scale, count * groups), grown(room.sum, count * groups), groups};
        each_row(threads, count, k, [&](int64_t row) { quantize_row<Kind>(x + row * ldx, k, row, rows); });
        return rows;
    });
}

void quantized_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out) {
    with_format(w.format, [&](auto kind) {
        for (int64_t i = 0; i < count; ++i) copy_row<decltype(kind)>(w, ids[i], out + i * w.k);
    });
}

}  // namespace fovea

using namespace fovea;

extern "C" {

// Bytes that the panels of a weight (n, k) take.
int64_t fovea_quantized_bytes(int64_t panels, int64_t k, int64_t format) {
    return with_format(format, [&](auto kind) {
        return panels * ((k + kind.GROUP - 1) / kind.GROUP) * kind.BYTES;
    });
}

// Quantizes the rows of a weight (n, k) into data, to INT8 or INT4. order (panels * 64): the row that each output has,
// -1 for padding.
void fovea_quantize(const bf16* weight, int64_t k, const int64_t* order, int64_t panels, int64_t format, uint8_t* data,
                    int threads) {
    const int64_t bytes = fovea_quantized_bytes(1, k, format);
    parallel(threads, panels, 1, [&](int64_t panel) {
        if (format == INT8)
            quantize_panel<Int8>(weight, k, order + panel * PANEL, data + panel * bytes);
        else
            quantize_panel<Int4>(weight, k, order + panel * PANEL, data + panel * bytes);
    });
}

// Packs codes (n, k), one per byte, and their scales into data. order: as above.
void fovea_pack_codes(const uint8_t* codes, int64_t k, const int64_t* order, int64_t panels, int64_t format,
                      const void* scales, uint8_t* data, int threads) {
    const int64_t bytes = fovea_quantized_bytes(1, k, format);
    with_format(format, [&](auto kind) {
        parallel(threads, panels, 1, [&](int64_t panel) {
            pack_panel<decltype(kind)>(codes, k, order + panel * PANEL, *static_cast<const Scales*>(scales), data + panel * bytes);
        });
    });
}

}  // extern "C"

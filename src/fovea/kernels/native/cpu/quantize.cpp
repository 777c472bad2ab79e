// Quantizes weights and rows to 8 or 4 bits, and dequantizes rows of weights. The layout is in levels.h.

#include <cmath>

#include "formats.h"
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
    for (int64_t i = 0; i < Int8::GROUP; i += LANES) {
        const Ints level = leveled(load(values + i, count - i), factor);
        hn::StoreU(hn::DemoteTo(bytes, hn::Add(level, hn::Set(i32, 128))), bytes, levels + i);
    }
    return scale;
}

// The nearest int4 code of each whole number: entry i belongs to i - 128. 16 neighbouring numbers have at most three
// codes, so a code is that of the first of the 16, plus one for each of two limits that the number has reached.
struct Codes {
    uint8_t of[256];
    alignas(16) uint8_t first[16], limit[2][16];  // by the high 4 bits of a number plus 128; limits of the low 4 bits

    Codes() {
        for (int value = 0; value < 256; ++value) {
            int best = 0;
            for (int code = 1; code < 16; ++code)
                if (std::abs(value - INT4_LEVELS[code]) < std::abs(value - INT4_LEVELS[best])) best = code;
            of[value] = static_cast<uint8_t>(best);
        }
        for (int high = 0; high < 16; ++high) {
            first[high] = of[16 * high];
            limit[0][high] = limit[1][high] = 16;
            for (int low = 1, found = 0; low < 16; ++low)
                if (of[16 * high + low] != of[16 * high + low - 1] && found < 2) limit[found++][high] = static_cast<uint8_t>(low);
        }
    }

    // The codes of numbers that are given as bytes plus 128.
    FOVEA_INLINE hn::Vec<Bytes> operator()(hn::Vec<Bytes> numbers) const {
        const auto mask = hn::Set(u8, 15), low = hn::And(numbers, mask);
        const auto high = hn::And(hn::BitCast(u8, hn::ShiftRight<4>(hn::BitCast(u16, numbers))), mask);
        auto code = hn::TableLookupBytes(hn::LoadDup128(u8, first), high);
        for (const auto& table : limit) {
            const auto reached = hn::Ge(low, hn::TableLookupBytes(hn::LoadDup128(u8, table), high));
            code = hn::Sub(code, hn::VecFromMask(u8, reached));  // a mask that is set is -1
        }
        return code;
    }
};

// Quantizes one output's group to codes, one per byte. It tries several scales around the one that fits the
// largest magnitude, and takes the scale with the least sum of squared errors. Returns the scale.
bf16 quantize4(const bf16* values, int64_t count, uint8_t* codes) {
    static const Codes nearest;
    constexpr int GROUP = Int4::GROUP;
    const hn::Rebind<uint8_t, I> bytes;
    alignas(64) float wide[GROUP];
    for (int i = 0; i < GROUP; i += LANES) hn::Store(load(values + i, count - i), f32, wide + i);
    float top = magnitude(values, count);
    for (int i = 0; i < GROUP; ++i)  // the first value of that magnitude gives the sign
        if (std::fabs(wide[i]) == top) {
            if (std::signbit(wide[i])) top = -top;
            break;
        }
    bf16 best = narrow(top / -127.0f);
    float least = INFINITY;
    std::memset(codes, 8, GROUP);
    for (int step = 0; step < 12; ++step) {
        const bf16 scale = narrow(top / -127.0f * (0.8125f + 0.03125f * step));
        const float wide_scale = widen(scale), factor = inverse(wide_scale);
        alignas(64) uint8_t found[GROUP], levels[GROUP];
        for (int i = 0; i < GROUP; i += LANES)
            hn::StoreU(hn::DemoteTo(bytes, hn::Add(leveled(hn::Load(f32, wide + i), factor), hn::Set(i32, 128))), bytes,
                       found + i);
        for (int i = 0; i < GROUP; i += WIDTH) {
            const auto code = nearest(hn::Load(u8, found + i));
            hn::Store(code, u8, found + i);
            hn::Store(hn::TableLookupBytes(hn::LoadDup128(u8, INT4_LEVELS), code), u8, levels + i);
        }
        Floats error = hn::Zero(f32);
        for (int i = 0; i < GROUP; i += LANES) {
            const Ints level = hn::Sub(hn::PromoteTo(i32, hn::LoadU(bytes, levels + i)), hn::Set(i32, 128));
            const Floats off = hn::NegMulAdd(hn::ConvertTo(f32, level), hn::Set(f32, wide_scale), hn::Load(f32, wide + i));
            error = hn::MulAdd(off, off, error);
        }
        const float sum = hn::ReduceSum(f32, error);
        if (sum < least) {
            least = sum, best = scale;
            std::memcpy(codes, found, GROUP);
        }
    }
    return best;
}

// Quantizes the 64 rows order[0..63] of a weight (n, k) into one panel; -1: padding.
template <class Format>
void quantize_panel(const bf16* weight, int64_t k, const int64_t* order, uint8_t* data) {
    for (int64_t from = 0; from < k; from += Format::GROUP, data += Format::BYTES) {
        bf16* scales = reinterpret_cast<bf16*>(data + Format::LEVELS);
        for (int lane = 0; lane < PANEL; ++lane) {
            uint8_t levels[Format::GROUP];
            const bf16* values = order[lane] < 0 ? nullptr : weight + order[lane] * k + from;
            const int64_t count = values ? std::min<int64_t>(Format::GROUP, k - from) : 0;
            scales[lane] = Format::CODED ? quantize4(values, count, levels) : quantize8(values, count, levels);
            for (int quad = 0; quad < Format::QUADS; ++quad) {
                uint32_t four, other;
                std::memcpy(&four, levels + 4 * quad, 4);
                uint8_t* to = data + (Format::CODED ? quad / 2 : quad) * 256 + lane * 4;
                if (Format::CODED) {
                    std::memcpy(&other, levels + 4 * ++quad, 4);
                    four |= other << 4;
                }
                std::memcpy(to, &four, 4);
            }
        }
    }
}

// Writes one row of the weight to out (k), dequantized.
template <class Format>
void copy_row(const Weight& w, int64_t row, bf16* out) {
    const int64_t groups = (w.k + Format::GROUP - 1) / Format::GROUP, lane = row % PANEL;
    const uint8_t* group = w.data + row / PANEL * groups * Format::BYTES;
    for (int64_t k = 0; k < w.k; ++k) {
        if (k > 0 && k % Format::GROUP == 0) group += Format::BYTES;
        const int64_t quad = k % Format::GROUP / 4;
        uint8_t level = group[(Format::CODED ? quad / 2 : quad) * 256 + lane * 4 + k % 4];
        if (Format::CODED) level = INT4_LEVELS[quad % 2 ? level >> 4 : level & 15];
        const float scale = widen(reinterpret_cast<const bf16*>(group + Format::LEVELS)[lane]);
        out[k] = narrow(static_cast<float>(level - 128) * scale);
    }
}

}  // namespace

int64_t group_size(int64_t format) { return format == INT8 ? Int8::GROUP : Int4::GROUP; }

void quantize_row(const bf16* x, int64_t k, int64_t group, int64_t row, const LevelRows& rows) {
    const hn::Rebind<Level, I> narrowed;
    for (int64_t g = 0; g < rows.groups; ++g) {
        const int64_t at = row * rows.groups + g, count = std::min(group, k - g * group);
        const float most = magnitude(x + g * group, count);
        const float factor = most > 1e-30f ? 127.0f / most : 0.0f;
        Ints sum = hn::Zero(i32);
        for (int64_t i = 0; i < group; i += LANES) {
            Ints level = leveled(load(x + g * group + i, count - i), factor);
            sum = hn::Add(sum, level);
            if constexpr (PARTS == 2) level = hn::Per4LaneBlockShuffle<3, 1, 2, 0>(level);  // the order of operands
            hn::StoreU(hn::DemoteTo(narrowed, level), narrowed, rows.levels + at * group + i);
        }
        rows.scale[at] = most / 127.0f;
        rows.start[at] = -LEVEL_ZERO * hn::ReduceSum(i32, sum);
    }
}

void quantized_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out) {
    for (int64_t i = 0; i < count; ++i)
        w.format == INT8 ? copy_row<Int8>(w, ids[i], out + i * w.k) : copy_row<Int4>(w, ids[i], out + i * w.k);
}

}  // namespace fovea

using namespace fovea;

extern "C" {

// Bytes that the panels of a weight (n, k) take.
int64_t fovea_quantized_bytes(int64_t panels, int64_t k, int64_t format) {
    const int64_t group = group_size(format);
    return panels * ((k + group - 1) / group) * (format == INT8 ? Int8::BYTES : Int4::BYTES);
}

// Quantizes the rows of a weight (n, k) into data. order (panels * 64): the row that each output has, -1 for
// padding.
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

}  // extern "C"

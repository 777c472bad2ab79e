// Quantizes weights and rows to 8 or 4 bits, and dequantizes rows of weights. The layout is in levels.h.

#include <cmath>
#include <cstring>

#include "formats.h"

namespace fovea {
namespace {

// The largest magnitude of `count` values. If one of them is NaN, the result is NaN, because its bits are
// larger than those of infinity.
inline float magnitude(const bf16* values, int64_t count) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 32) {
        const __mmask32 mask = count - i >= 32 ? ~0u : (1u << (count - i)) - 1;
        const __m512i bits = _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, values + i), _mm512_set1_epi16(0x7FFF));
        most = _mm512_max_epu16(most, bits);
    }
    const __m512i even = _mm512_and_si512(most, _mm512_set1_epi32(0xFFFF)), odd = _mm512_srli_epi32(most, 16);
    return widen(static_cast<bf16>(_mm512_reduce_max_epu32(_mm512_max_epu32(even, odd))));
}

// Rounds to bf16.
inline bf16 nearest(float value) { return _mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0); }

// 1 / scale, or 0 for a scale of almost zero.
inline float inverse(float scale) { return std::fabs(scale) > 1e-30f ? 1.0f / scale : 0.0f; }

// 16 values times `factor`, rounded to whole numbers and clamped to [-limit, limit].
inline __m512i leveled(__m512 values, float factor, int limit) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(factor)));
    return _mm512_max_epi32(_mm512_min_epi32(whole, _mm512_set1_epi32(limit)), _mm512_set1_epi32(-limit));
}

// Quantizes one output's group of a weight to levels plus 128. count: at most 128 values, the rest is zero.
// Returns the scale.
bf16 quantize8(const bf16* values, int64_t count, uint8_t* levels) {
    const bf16 scale = nearest(magnitude(values, count) / 127.0f);
    const float factor = inverse(widen(scale));
    for (int64_t i = 0; i < Int8::GROUP; i += 16) {
        const __m512i level = leveled(load16(values + i, first(count - i)), factor, 127);
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(level, _mm512_set1_epi32(128)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(levels + i), bytes);
    }
    return scale;
}

// Table of the nearest int4 code for each whole number. Entry i belongs to i - 128.
struct Codes {
    alignas(64) uint8_t of[256];
    Codes() {
        for (int value = 0; value < 256; ++value) {
            int best = 0;
            for (int code = 1; code < 16; ++code)
                if (std::abs(value - INT4_LEVELS[code]) < std::abs(value - INT4_LEVELS[best])) best = code;
            of[value] = static_cast<uint8_t>(best);
        }
    }
    __m512i operator()(__m512i bytes) const {
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(of), bytes, _mm512_load_si512(of + 64));
        const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(of + 128), bytes, _mm512_load_si512(of + 192));
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), low, high);
    }
};

// Quantizes one output's group to codes, one per byte. It tries several scales around the one that fits the
// largest magnitude, and takes the scale with the least sum of squared errors. Returns the scale.
bf16 quantize4(const bf16* values, int64_t count, uint8_t* codes) {
    static const Codes nearest_code;
    static_assert(Int4::GROUP == 64, "a group is one register of codes");
    __m512 wide[4];
    for (int i = 0; i < 4; ++i) wide[i] = load16(values + 16 * i, first(count - 16 * i));
    float top = magnitude(values, count);
    for (int i = 0; i < 4; ++i)  // the first value of that magnitude gives the sign
        if (const __mmask16 at = _mm512_cmp_ps_mask(_mm512_abs_ps(wide[i]), _mm512_set1_ps(top), _CMP_EQ_OQ)) {
            if (_mm512_movepi32_mask(_mm512_castps_si512(wide[i])) >> __builtin_ctz(at) & 1) top = -top;
            break;
        }
    bf16 best = nearest(top / -127.0f);
    float least = INFINITY;
    std::memset(codes, 8, Int4::GROUP);
    for (int step = 0; step < 12; ++step) {
        const bf16 scale = nearest(top / -127.0f * (0.8125f + 0.03125f * step));
        const float factor = inverse(widen(scale));
        __m128i parts[4];
        for (int i = 0; i < 4; ++i)
            parts[i] = _mm512_cvtepi32_epi8(_mm512_add_epi32(leveled(wide[i], factor, 127), _mm512_set1_epi32(128)));
        alignas(64) uint8_t bytes[64];
        for (int i = 0; i < 4; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(bytes) + i, parts[i]);
        const __m512i found = nearest_code(_mm512_load_si512(bytes));
        _mm512_store_si512(bytes, _mm512_shuffle_epi8(lookup4(), found));
        __m512 error = _mm512_setzero_ps();
        for (int i = 0; i < 4; ++i) {
            const __m512i level = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes) + i));
            const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(level, _mm512_set1_epi32(128)));
            const __m512 off = _mm512_fnmadd_ps(value, _mm512_set1_ps(widen(scale)), wide[i]);
            error = _mm512_fmadd_ps(off, off, error);
        }
        const float sum = _mm512_reduce_add_ps(error);
        if (sum < least) {
            least = sum, best = scale;
            _mm512_storeu_si512(codes, found);
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
        out[k] = nearest(static_cast<float>(level - 128) * scale);
    }
}

}  // namespace

int64_t group_size(int64_t format) { return format == INT8 ? Int8::GROUP : Int4::GROUP; }

void quantize_row(const bf16* x, int64_t k, int64_t group, int64_t row, const LevelRows& rows) {
    for (int64_t g = 0; g < rows.groups; ++g) {
        const int64_t at = row * rows.groups + g, count = std::min(group, k - g * group);
        const float most = magnitude(x + g * group, count);
        const float factor = most > 1e-30f ? 127.0f / most : 0.0f;
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < group; i += 16) {
            const __m512i level = leveled(load16(x + g * group + i, first(count - i)), factor, 127);
            sum = _mm512_add_epi32(sum, level);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(rows.levels + at * group + i), _mm512_cvtepi32_epi8(level));
        }
        rows.scale[at] = most / 127.0f;
        rows.start[at] = -128 * _mm512_reduce_add_epi32(sum);
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
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel) {
        if (format == INT8)
            quantize_panel<Int8>(weight, k, order + panel * PANEL, data + panel * bytes);
        else
            quantize_panel<Int4>(weight, k, order + panel * PANEL, data + panel * bytes);
    }
}

}  // extern "C"

// Layouts of quantized weights and of quantized rows, and the dot product of both. The twins in torch are
// fovea/kernels/codes.py and fovea/kernels/quantize.py.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace fovea {

// The value of a code:
//   CENTRED  scale * (code - 128), scale in bf16
//   EVEN     scale * (code - 128), scale in float16
//   ZERO     scale * (code - zero), scale in float16, zero in 8 bits
//   MINIMUM  scale * code + minimum, both in float16
//   NESTED   the same, but scale and minimum are whole numbers of 8 bits, times a float16 for all groups of a block
enum Scaling { CENTRED, EVEN, ZERO, MINIMUM, NESTED };

// The layout of a format. A panel is a stream of blocks. A block has SUBS groups, each of SUB values of k for each of 64
// outputs. First come the codes of all groups, then their scales, for 64 outputs each: scales of all groups, then zeros
// or minima of all groups; NESTED ends with the factors of scales and of minima. A quad is 4 values of k of one output:
// 4 bytes, one lane of an operand, because codes are the unsigned first operand of VPDPBUSD. Codes of 4 bits share
// bytes: the low halves hold even quads, the high halves odd ones.
template <int BITS, int SUB_, int SUBS_, Scaling SCALING_>
struct Layout {
    static constexpr Scaling SCALING = SCALING_;
    static constexpr int SUB = SUB_, SUBS = SUBS_, GROUP = SUB * SUBS, QUADS = SUB / 4;
    static constexpr bool PAIRED = BITS == 4;                // two codes in a byte
    static constexpr bool SMALL = BITS < 8;                  // codes are below 64
    static constexpr int MOST = PAIRED ? 15 : 63;            // the largest code of a small format
    static constexpr int CODES = SUB * 64 / (PAIRED ? 2 : 1), UNPAIRED = SUB * 64;  // bytes of a group
    static constexpr int SCALES =                            // bytes of all scales of a block
        SCALING == NESTED ? SUBS * 128 + 256 : SUBS * (SCALING == MINIMUM ? 256 : SCALING == ZERO ? 192 : 128);
    static constexpr int BYTES = SUBS * CODES + SCALES;
};

using Int8 = Layout<8, 128, 1, CENTRED>;
using Int4 = Layout<4, 32, 1, MINIMUM>;
using Zero32 = Layout<4, 32, 1, ZERO>;
using Zero128 = Layout<4, 128, 1, ZERO>;
using Even8 = Layout<8, 32, 1, EVEN>;
using Nested4 = Layout<4, 32, 8, NESTED>;
using Nested6 = Layout<6, 16, 16, NESTED>;

// Calls `function` with an object of the format of that number.
template <class Function>
auto with_format(int64_t format, const Function& function) {
    switch (format) {
        case INT4: return function(Int4());
        case ZERO32: return function(Zero32());
        case ZERO128: return function(Zero128());
        case EVEN8: return function(Even8());
        case NESTED4: return function(Nested4());
        case NESTED6: return function(Nested6());
        default: return function(Int8());
    }
}

// How levels of rows are multiplied with codes of a weight. The sums in int32 are exact with each of them.
//   VNNI       x86: four unsigned bytes times four signed ones in a lane
//   I8MM       ARM: the same for a single row, and matrix instructions for several rows: see squares.h
//   DOTPROD    ARM: four signed bytes times four signed ones, so 128 is taken off codes of 8 bits
//   neither    levels of rows have 16 bits, in the order 0, 2, 1, 3 of a quad: the even bytes of a weight's quad are
//              one operand, the odd ones another. Small codes are multiplied as bytes: the sums of a few products
//              fit in 16 bits (for codes of 8 bits they would not).
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define FOVEA_VNNI 1
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define FOVEA_I8MM 1
#elif defined(__ARM_FEATURE_DOTPROD)
#define FOVEA_DOTPROD 1
#endif

#if FOVEA_VNNI || FOVEA_I8MM || FOVEA_DOTPROD
constexpr bool BYTE_DOTS = true;
#else
constexpr bool BYTE_DOTS = false;
#endif

// The levels of rows that are multiplied with a format, and the operands that a quad is multiplied as.
template <class Format>
constexpr bool AS_BYTES = BYTE_DOTS || Format::SMALL;
template <class Format>
using Level = std::conditional_t<AS_BYTES<Format>, int8_t, int16_t>;
template <class Format>
constexpr int PARTS = AS_BYTES<Format> ? 1 : 2;

// Codes of 8 bits are levels plus 128, whatever the instruction subtracts: this is what remains of it.
template <class Format>
#if FOVEA_DOTPROD
constexpr int32_t LEVEL_ZERO = 0;
#else
constexpr int32_t LEVEL_ZERO = Format::SCALING == CENTRED || Format::SCALING == EVEN ? 128 : 0;
#endif

// One part of the codes of a vector of quads, as an operand of `add_dot`.
template <class Format>
FOVEA_INLINE Unsigned operand(hn::Vec<Bytes> codes, int part) {
#if FOVEA_DOTPROD
    if (!Format::SMALL) codes = hn::Xor(codes, hn::Set(u8, 128));
#endif
    if constexpr (AS_BYTES<Format>) {
        (void)part;
        return hn::BitCast(u32, codes);
    } else {
        const auto words = hn::BitCast(u16, codes);
        return hn::BitCast(u32, part ? hn::ShiftRight<8>(words) : hn::And(words, hn::Set(u16, 0xFF)));
    }
}

// The levels of one part of a quad of a row, in every lane.
template <class T>
FOVEA_INLINE Unsigned quad_of(const T* levels, int part) {
    uint32_t four;
    std::memcpy(&four, levels + 2 * part, 4);
    return hn::Set(u32, four);
}

// Adds dot products, lane by lane. PAIRED: for codes of 4 bits, which decides only about the speed.
//
// On x86 this is mostly inline assembly: with intrinsics GCC 12 keeps the sums of six rows in memory. Clang does so in
// fewer places, and its loops for AVX-512 and for groups of codes are faster with intrinsics.
template <bool PAIRED>
FOVEA_INLINE Ints add_dot(Ints sum, Unsigned levels, Unsigned row) {
#if FOVEA_VNNI && defined(__AVX512VNNI__) && defined(__clang__)
    return Ints{_mm512_dpbusd_epi32(sum.raw, levels.raw, row.raw)};
#elif FOVEA_VNNI && defined(__AVX512VNNI__)
    auto raw = sum.raw;
    asm("vpdpbusd %2, %1, %0" : "+v"(raw) : "v"(levels.raw), "v"(row.raw));
    return Ints{raw};
#elif FOVEA_VNNI
    auto raw = sum.raw;
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(raw) : "x"(levels.raw), "x"(row.raw));
    return Ints{raw};
#elif HWY_ARCH_X86
#if defined(__clang__)
    if constexpr (PAIRED) return Ints{_mm256_add_epi32(sum.raw, _mm256_madd_epi16(levels.raw, row.raw))};
#endif
    auto raw = sum.raw, products = sum.raw;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(raw), "=&x"(products) : "x"(levels.raw), "x"(row.raw));
    return Ints{raw};
#elif FOVEA_I8MM
    return Ints{vusdotq_s32(sum.raw, vreinterpretq_u8_u32(levels.raw), vreinterpretq_s8_u32(row.raw))};
#elif FOVEA_DOTPROD
    // Highway's SumOfMulQuadAccumulate takes this instruction only together with those for bf16.
    return Ints{vdotq_s32(sum.raw, vreinterpretq_s8_u32(levels.raw), vreinterpretq_s8_u32(row.raw))};
#else
    const hn::Repartition<int16_t, I> words;
    return hn::Add(sum, hn::WidenMulPairwiseAdd(i32, hn::BitCast(words, levels), hn::BitCast(words, row)));
#endif
}

#if !(FOVEA_VNNI || FOVEA_I8MM || FOVEA_DOTPROD)

// Adds products of bytes in pairs of 16 bits: for instruction sets without dot products of bytes.
using Shorts = hn::Vec<hn::ScalableTag<int16_t>>;
constexpr hn::ScalableTag<int16_t> i16;

FOVEA_INLINE Shorts add_pairs_of_bytes(Shorts sum, Unsigned codes, Unsigned row) {
#if HWY_ARCH_X86
    auto raw = sum.raw, products = sum.raw;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(raw), "=&x"(products) : "x"(codes.raw), "x"(row.raw));
    return Shorts{raw};
#else
    const hn::ScalableTag<int8_t> i8;
    return hn::Add(sum, hn::SatWidenMulPairwiseAdd(i16, hn::BitCast(u8, codes), hn::BitCast(i8, row)));
#endif
}

// How many quads fit in the sums of 16 bits: each adds twice at most two products of a code and 127.
template <class Format>
constexpr int FOLD = Format::PAIRED ? 8 : 2;
static_assert(8 * 2 * 15 * 127 < 32768 && 2 * 2 * 63 * 127 < 32768);

#endif

// Rows of x in 8 bits with a scale per group of k: x is about scale * level. sum: sum of a group's levels.
struct LevelRows {
    void* levels;  // rows * groups * SUB values of the type `Level` of the weight's format
    float* scale;  // rows * groups
    int32_t* sum;  // rows * groups
    int64_t groups;
};

}  // namespace fovea

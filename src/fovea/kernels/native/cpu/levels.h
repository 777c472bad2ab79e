// Layouts of a quantized weight and of quantized rows, and the dot product of both. The twin in torch is
// fovea/kernels/quantize.py.
#pragma once

#include "tiles.h"

namespace fovea {

// The layout of a format. A panel is a stream of groups. A group holds the levels of `GROUP` values of k for
// each of 64 outputs, then 64 scales in bf16. Levels are unsigned bytes with zero at 128, because VPDPBUSD
// takes an unsigned first operand. A quad is 4 values of k of one output: 4 bytes, one lane of an operand.
struct Int8 {
    static constexpr bool CODED = false;
    static constexpr int GROUP = 128, QUADS = GROUP / 4, LEVELS = QUADS * 256, BYTES = LEVELS + 2 * PANEL;
};

// Codes of 4 bits, each for one of 16 levels. The low halves of the bytes hold even quads,
// the high halves odd ones.
struct Int4 {
    static constexpr bool CODED = true;
    static constexpr int GROUP = 64, QUADS = GROUP / 4, LEVELS = QUADS * 128, BYTES = LEVELS + 2 * PANEL;
};

// The 16 levels of int4, plus 128, in the order of their codes. They minimise the squared error of normally
// distributed weights (Lloyd's iteration) whose group is scaled so that its largest magnitude becomes -127.
// Zero is one of them.
alignas(16) constexpr uint8_t INT4_LEVELS[16] = {1,   29,  51,  67,  82,  95,  107, 118,
                                                 128, 141, 152, 165, 178, 193, 211, 235};

// How levels of rows are multiplied with levels of a weight. The sums in int32 are exact with each of them.
//   VNNI       x86: four unsigned bytes times four signed ones in a lane
//   I8MM       ARM: the same for a single row, and matrix instructions for several rows: see squares.h
//   DOTPROD    ARM: four signed bytes times four signed ones, so 128 is taken off the weight's levels
//   neither    levels of rows have 16 bits, in the order 0, 2, 1, 3 of a quad: the even bytes of a weight's quad are
//              one operand, the odd ones another. (VPMADDUBSW would multiply bytes, but its sums of two products
//              have 16 bits and overflow.)
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define FOVEA_VNNI 1
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define FOVEA_I8MM 1
#elif defined(__ARM_FEATURE_DOTPROD)
#define FOVEA_DOTPROD 1
#endif

#if FOVEA_VNNI || FOVEA_I8MM || FOVEA_DOTPROD
using Level = int8_t;
constexpr int PARTS = 1;  // operands that a quad is multiplied as
#else
using Level = int16_t;
constexpr int PARTS = 2;
#endif

// A row's levels are multiplied with levels plus 128, except with DOTPROD.
#if FOVEA_DOTPROD
constexpr int32_t LEVEL_ZERO = 0;
#else
constexpr int32_t LEVEL_ZERO = 128;
#endif

// One part of the levels of a vector of quads, as an operand of `add_dot`.
FOVEA_INLINE Unsigned operand(hn::Vec<Bytes> levels, int part) {
#if FOVEA_VNNI || FOVEA_I8MM
    (void)part;
    return hn::BitCast(u32, levels);
#elif FOVEA_DOTPROD
    (void)part;
    return hn::BitCast(u32, hn::Xor(levels, hn::Set(u8, 128)));
#else
    const auto words = hn::BitCast(u16, levels);
    return hn::BitCast(u32, part ? hn::ShiftRight<8>(words) : hn::And(words, hn::Set(u16, 0xFF)));
#endif
}

// The levels of one part of a quad of a row, in every lane.
FOVEA_INLINE Unsigned quad_of(const Level* levels, int part) {
    uint32_t four;
    std::memcpy(&four, levels + 2 * part, 4);
    return hn::Set(u32, four);
}

// Adds dot products, lane by lane. CODED: for levels that come from codes, which decides only about the speed.
//
// On x86 this is mostly inline assembly: with intrinsics GCC 12 keeps the sums of six rows in memory. Clang does so in
// fewer places, and its loops for AVX-512 and for groups of codes are faster with intrinsics.
template <bool CODED>
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
    if constexpr (CODED) return Ints{_mm256_add_epi32(sum.raw, _mm256_madd_epi16(levels.raw, row.raw))};
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

// Rows of x in 8 bits with a scale per group of k: x is about scale * level. start: -LEVEL_ZERO times the sum of a
// group's levels. The sums of a product begin with it, because it corrects for LEVEL_ZERO in each level of the
// weight.
struct LevelRows {
    Level* levels;   // rows * groups * GROUP
    float* scale;    // rows * groups
    int32_t* start;  // rows * groups
    int64_t groups;
};

}  // namespace fovea

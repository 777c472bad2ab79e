// Matrix instructions of ARM: BFMMLA for bf16, USMMLA for bytes. Each multiplies two outputs by two rows.
//
// An operand is a vector of two halves of 8 bytes: outputs o0 and o1, or rows r0 and r1, each with two pairs of bf16 or two
// quads of bytes. The result, a square, is a vector of four sums: o0 r0, o0 r1, o1 r0, o1 r1.
//
// Order of additions, for bf16: BFMMLA adds the first pair, then the second, and rounds each as BFDOT does. So a row has
// the same bits with both instructions, and a single row can do without squares.
#pragma once

#include <algorithm>

#include "simd.h"

#if HWY_ARCH_ARM_A64
#include <arm_neon.h>
#endif

namespace fovea {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool BF16_SQUARES = true;
FOVEA_INLINE Floats add_square(Floats sum, Unsigned outputs, Unsigned rows) {
    return Floats(vbfmmlaq_f32(sum.raw, vreinterpretq_bf16_u32(outputs.raw), vreinterpretq_bf16_u32(rows.raw)));
}
#else
constexpr bool BF16_SQUARES = false;
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool BYTE_SQUARES = true;
FOVEA_INLINE Ints add_square(Ints sum, Unsigned outputs, Unsigned rows) {
    return Ints(vusmmlaq_s32(sum.raw, vreinterpretq_u8_u32(outputs.raw), vreinterpretq_s8_u32(rows.raw)));
}
#else
constexpr bool BYTE_SQUARES = false;
#endif

// The sums of R rows and N vectors of outputs: two squares for every two rows and every vector. If R is odd, the last row
// is paired with itself, so its sums appear twice.
template <class Sum, int R, int N>
using Squares = Sum[(R + 1) / 2][N][2];

template <class Sum, int R, int N>
FOVEA_INLINE void to_squares(const Sum (&sums)[R][N], Squares<Sum, R, N>& squares) {
    const hn::DFromV<Sum> lanes;
    for (int r = 0; r < R; r += 2)
        for (int v = 0; v < N; ++v) {
            const Sum first = sums[r][v], second = sums[std::min(r + 1, R - 1)][v];
            squares[r / 2][v][0] = hn::InterleaveLower(lanes, first, second);
            squares[r / 2][v][1] = hn::InterleaveUpper(lanes, first, second);
        }
}

template <class Sum, int R, int N>
FOVEA_INLINE void from_squares(const Squares<Sum, R, N>& squares, Sum (&sums)[R][N]) {
    const hn::DFromV<Sum> lanes;
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) {
            const Sum lower = squares[r / 2][v][0], upper = squares[r / 2][v][1];
            sums[r][v] = r % 2 ? hn::ConcatOdd(lanes, upper, lower) : hn::ConcatEven(lanes, upper, lower);
        }
}

// squares += R rows (8 bytes each, `stride` bytes apart) x two tiles. tile(i, v): vector v of the tile for the first (i = 0)
// or the last 4 bytes.
template <int R, int N, class Sum, class Tile>
FOVEA_INLINE void add_squares(Sum (&squares)[(R + 1) / 2][N][2], const void* x, int64_t stride, const Tile& tile) {
    const hn::Half<Bytes> half;
    Unsigned rows[(R + 1) / 2];
    for (int r = 0; r < R; r += 2) {
        const auto* at = static_cast<const uint8_t*>(x) + r * stride;
        const auto next = hn::LoadU(half, r + 1 < R ? at + stride : at);
        rows[r / 2] = hn::BitCast(u32, hn::Combine(u8, next, hn::LoadU(half, at)));
    }
    for (int v = 0; v < N; ++v) {
        asm volatile("" : :);  // otherwise GCC loads all tiles first, and has no registers left for some of the sums
        const Unsigned first = tile(0, v), second = tile(1, v);
        const Unsigned lower = hn::InterleaveLower(u32, first, second);
        const Unsigned upper = hn::InterleaveUpper(u32, first, second);
        for (int two = 0; two < (R + 1) / 2; ++two) {
            squares[two][v][0] = add_square(squares[two][v][0], lower, rows[two]);
            squares[two][v][1] = add_square(squares[two][v][1], upper, rows[two]);
        }
    }
}

}  // namespace fovea

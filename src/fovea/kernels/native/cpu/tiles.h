// Rows times tiles of bf16: the inner loop of products and of attention.
//
// A tile holds, for each of 16 outputs, the weights of a pair of inputs. Inputs are counted by k. A panel is 4 tiles wide,
// that is 64 outputs. The sums of a few rows and a whole panel do not fit in the registers of every machine, so a
// panel is multiplied in strips.
//
// With AMX the processor multiplies 16 pairs of 16 rows at once: see amx.h. A panel is one strip then.
//
// With instructions for dot products of bf16, an operand is a pair of a row in every lane. ARM has them for single rows,
// and matrix instructions for several: see squares.h. Without instructions for bf16 rows are in float32, and a tile is
// expanded in registers: its even values of k are the low halves of the lanes, its odd ones the high halves.
#pragma once

#include "amx.h"
#include "simd.h"
#include "squares.h"
#include "team.h"

#if FOVEA_AMX
#define FOVEA_BF16_DOT 0  // dot products of vectors add in another order than AMX, so they are not used
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FOVEA_BF16_DOT 1
#else
#define FOVEA_BF16_DOT HWY_NATIVE_DOT_BF16
#endif

namespace fovea {

constexpr int PANEL = 64, TILES = 4, TILE_LANES = 16, TILE_PLAIN = 64;
constexpr int VECTORS = FOVEA_AMX ? PANEL / LANES : REGISTERS == 32 ? 4 : 2;  // vectors of a strip
constexpr int STRIP = VECTORS * LANES, STRIPS = PANEL / STRIP;  // outputs of a strip; strips of a panel
constexpr int VECTOR_BLOCK = 6;                             // rows whose sums stay in vector registers together
constexpr int ROWS = FOVEA_AMX ? 32 : VECTOR_BLOCK;         // rows of a block of bf16 products
// Pairs of k that are added up together. Memory for rows and tiles has a multiple of them, padded with zeros.
constexpr int64_t PAIRS_TOGETHER = FOVEA_AMX ? MATRIX_PAIRS : 1;

constexpr int64_t padded_pairs(int64_t pairs) { return (pairs + PAIRS_TOGETHER - 1) / PAIRS_TOGETHER * PAIRS_TOGETHER; }

// A value of the rows that are multiplied with tiles.
#if FOVEA_BF16_DOT || FOVEA_AMX
using Input = bf16;
#else
using Input = float;
#endif

// Without instructions for bf16, products with keys in int8 are whole numbers: queries are rounded to 16 bits, each head with
// a scale of its own, and pairs of products are added up in 32 bits, exactly and in any order.
constexpr bool WHOLE = !FOVEA_BF16_DOT && !FOVEA_AMX;
constexpr int64_t MAX_DIM = 512;  // MAX_HEAD_DIM in kernels.py: larger sums would not fit into 32 bits

// Rounds `dim` numbers of a query to 16 bits. Returns their scale, which is not finite if one of them is not.
inline float whole_query(const bf16* query, int64_t dim, int16_t* out) {
    Floats most = hn::Zero(f32), broken = hn::Zero(f32);
    for (int64_t d = 0; d < dim; d += LANES) {
        const Floats v = load(query + d, dim - d);
        most = hn::Max(most, hn::Abs(v));
        broken = hn::MulAdd(v, hn::Zero(f32), broken);
    }
    const float top = hn::ReduceMax(f32, most), scale = (top + hn::ReduceSum(f32, broken)) / 32767.0f;
    const Floats inverse = hn::Set(f32, top > 1e-30f ? 32767.0f / top : 0.0f);
    const hn::Rebind<int16_t, F> narrow16;
    for (int64_t d = 0; d < dim; d += LANES)
        hn::StoreN(hn::DemoteTo(narrow16, hn::NearestInt(hn::Mul(load(query + d, dim - d), inverse))), narrow16, out + d,
                   std::min<int64_t>(LANES, dim - d));
    return scale;
}

// sum + the products of pairs of 16 bits, lane by lane.
FOVEA_INLINE Ints add_whole(Ints sum, Unsigned a, Unsigned b) {
    const hn::ScalableTag<int16_t> values;
    return hn::Add(sum, hn::WidenMulPairwiseAdd(i32, hn::BitCast(values, a), hn::BitCast(values, b)));
}

// sum + the products of pairs of bf16, lane by lane.
#if FOVEA_BF16_DOT
FOVEA_INLINE Floats add_pairs(Floats sum, Unsigned a, Unsigned b) {
#if HWY_ARCH_X86
    return Floats{_mm512_dpbf16_ps(sum.raw, (__m512bh)a.raw, (__m512bh)b.raw)};
#else
    return Floats(vbfdotq_f32(sum.raw, vreinterpretq_bf16_u32(a.raw), vreinterpretq_bf16_u32(b.raw)));
#endif
}
#endif

// Values 2 * pair and 2 * pair + 1 of a row of 16-bit values, in every lane.
template <class T>
FOVEA_INLINE Unsigned pair_of(const T* row, int64_t pair) {
    uint32_t both;
    std::memcpy(&both, row + 2 * pair, 4);
    return hn::Set(u32, both);
}

// The even and the odd values of pairs, in float32.
FOVEA_INLINE Floats even_of(Unsigned pairs) { return hn::BitCast(f32, hn::ShiftLeft<16>(pairs)); }
FOVEA_INLINE Floats odd_of(Unsigned pairs) { return hn::BitCast(f32, hn::And(pairs, hn::Set(u32, ~0xFFFFu))); }

#if FOVEA_AMX

// Each thread of a call that multiplies tiles, or adds in their order, creates a TileScope first: it sets up AMX.
using TileScope = MatrixScope;

// c (rows, 64) = x times a panel, all of whose strips have `pairs` pairs. rows: at most ROWS; ldx, ldc: values between rows.
inline void block_panel(int64_t rows, const uint32_t* strips, int64_t, int64_t pairs, const Input* x, int64_t ldx, float* c,
                        int64_t ldc) {
    Ahead nothing{nullptr, nullptr};
    matrix_rows<false>(rows, {x, 2 * ldx, MATRIX_BYTES, 2 * ldx * MATRIX_ROWS}, strips, pairs / PAIRS_TOGETHER, c, ldc, true,
                       nothing);
}

#else

using TileScope = NoScope;

// Adds a pair of k of R rows, `ldx` values apart, times N vectors of a tile in memory to sums.
template <int R, int N>
FOVEA_INLINE void add_tile(Floats (&sums)[R][N], const uint32_t* tile, const Input* x, int64_t ldx) {
#if FOVEA_BF16_DOT
    Unsigned pairs[N];
    for (int v = 0; v < N; ++v) pairs[v] = hn::Load(u32, tile + v * LANES);
    for (int r = 0; r < R; ++r) {
        const Unsigned both = pair_of(x + r * ldx, 0);
        for (int v = 0; v < N; ++v) sums[r][v] = add_pairs(sums[r][v], both, pairs[v]);
    }
#else
    // The tile is loaded once for each half: with 16 registers there is none left to keep it.
    for (int side = 0; side < 2; ++side) {
        Floats half[N];
        for (int v = 0; v < N; ++v) {
            const Unsigned pairs = hn::Load(u32, tile + v * LANES);
            half[v] = even_of(side ? hn::ShiftRight<16>(pairs) : pairs);
        }
        for (int r = 0; r < R; ++r) {
            const Floats value = hn::Set(f32, x[r * ldx + side]);
            for (int v = 0; v < N; ++v) sums[r][v] = hn::MulAdd(value, half[v], sums[r][v]);
        }
    }
#endif
}

// Adds rows of x times `pairs` pairs of a strip to c (rows, STRIP). rows: at most R; ldx, ldc: values between rows
// of x and c. fresh: overwrite c instead. ahead: memory to prefetch meanwhile, one cache line per pair, or null.
template <int R>
inline void block_rows(int64_t rows, const uint32_t* strip, int64_t pairs, const Input* x, int64_t ldx, float* c,
                       int64_t ldc, bool fresh, const uint8_t* ahead = nullptr) {
    if constexpr (R > 1) {
        if (rows < R) return block_rows<R - 1>(rows, strip, pairs, x, ldx, c, ldc, fresh, ahead);
    }
    Floats sums[R][VECTORS];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = fresh ? hn::Zero(f32) : hn::LoadU(f32, c + r * ldc + v * LANES);
    int64_t pair = 0;
    if constexpr (BF16_SQUARES && R > 1) {
        Squares<Floats, R, VECTORS> squares;
        to_squares(sums, squares);
        for (; pair + 1 < pairs; pair += 2) {
            if (pair % (32 / sizeof(Input)) == 0)
                for (int r = 0; r < R; ++r) prefetch(x + (R + r) * ldx + 2 * pair);
            if (ahead) prefetch_l2(ahead + pair * 64), prefetch_l2(ahead + pair * 64 + 64);
            add_squares<R>(squares, x + 2 * pair, sizeof(Input) * ldx,
                           [&](int i, int v) { return hn::Load(u32, strip + (pair + i) * STRIP + v * LANES); });
        }
        from_squares(squares, sums);
    }
    for (; pair < pairs; ++pair) {
        if (pair % (32 / sizeof(Input)) == 0)  // prefetch one cache line of each row of the next block
            for (int r = 0; r < R; ++r) prefetch(x + (R + r) * ldx + 2 * pair);
        if (ahead) prefetch_l2(ahead + pair * 64);
        add_tile<R, VECTORS>(sums, strip + pair * STRIP, x + 2 * pair, ldx);
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECTORS; ++v) hn::StoreU(sums[r][v], f32, c + r * ldc + v * LANES);
}

// c (rows, 64) = x times `pairs` pairs of a panel whose strips lie `all_pairs` pairs apart. rows: at most ROWS; ldx, ldc:
// values between rows.
inline void block_panel(int64_t rows, const uint32_t* strips, int64_t all_pairs, int64_t pairs, const Input* x, int64_t ldx,
                        float* c, int64_t ldc) {
    for (int s = 0; s < STRIPS; ++s)
        block_rows<ROWS>(rows, strips + s * all_pairs * STRIP, pairs, x, ldx, c + s * STRIP, ldc, true);
}

#endif

// Converts `count` values to inputs.
inline void to_inputs(const bf16* from, int64_t count, Input* to) {
#if FOVEA_BF16_DOT || FOVEA_AMX
    std::memcpy(to, from, count * sizeof(bf16));
#else
    for (int64_t i = 0; i < count; i += LANES)
        if (count - i >= LANES)
            hn::StoreU(load(from + i), f32, to + i);
        else
            hn::StoreN(load(from + i, count - i), f32, to + i, count - i);
#endif
}

}  // namespace fovea

// Intel AMX: products of bf16 and of bytes in matrix registers.
//
// A matrix register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 16 pairs of bf16 (or of 16 quads of
// bytes) by a tile that has 16 outputs for each pair, and adds the 16 x 16 results to float32 (or int32).
//
// Order of additions, for bf16: within the 16 pairs, one chain of fused multiply-adds over the even values and one over
// the odd ones, both from zero; then sum += even + odd. Subnormal numbers count as zero, and those that an operation gives
// become zero. Every row of a register is added up so, whatever the other rows. So rows are padded to 16 here: a row has
// the same bits alone as among hundreds. decode.cpp, which multiplies single rows, repeats this order with vectors.
#pragma once

#include "simd.h"

// Tests define FOVEA_AMX_TWIN as a header with the same operations as plain functions, for machines without AMX.
#if defined(FOVEA_AMX_TWIN)
#define FOVEA_AMX 1
#include FOVEA_AMX_TWIN
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define FOVEA_AMX 1
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile : :)
#define TILE_LOAD(tile, at, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(at), "r"(static_cast<int64_t>(stride)) : "memory")
#define TILE_STORE(tile, at, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(at), "r"(static_cast<int64_t>(stride)) : "memory")
#define TILE_BF16(sums, rows, tile) asm volatile("tdpbf16ps %%tmm" #tile ", %%tmm" #rows ", %%tmm" #sums : :)
#define TILE_BYTES(sums, rows, tile) asm volatile("tdpbsud %%tmm" #tile ", %%tmm" #rows ", %%tmm" #sums : :)
#define TILE_CONFIGURE(config) asm volatile("ldtilecfg %0" : : "m"(config))
#define TILE_RELEASE() asm volatile("tilerelease" : :)
#else
#define FOVEA_AMX 0
#endif

namespace fovea {

constexpr int MATRIX_ROWS = 16;       // rows of a register
constexpr int MATRIX_PAIRS = 16;      // pairs of k that one instruction adds up
constexpr int64_t MATRIX_BYTES = 64;  // bytes of a row of a register

#if FOVEA_AMX

// The operand of ldtilecfg: all eight registers have 16 rows of 64 bytes.
struct alignas(64) MatrixConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The state of a thread while it computes with matrix registers, or in their order of additions: the registers are in
// use, and subnormal numbers are zero for vectors, too. Context switches are slower while registers are in use, so
// they are released afterwards.
class MatrixScope {
  public:
    MatrixScope() : before_(_mm_getcsr()) {
        static const MatrixConfig config;
        _mm_setcsr(before_ | 0x8040);  // flush to zero, and denormals are zero
        TILE_CONFIGURE(config);
    }
    ~MatrixScope() {
        TILE_RELEASE();
        _mm_setcsr(before_);
    }
    MatrixScope(const MatrixScope&) = delete;
    MatrixScope& operator=(const MatrixScope&) = delete;

  private:
    const unsigned before_;
};

// Rows as the registers load them. stride: bytes from row to row; step: bytes to the next 16 pairs of bf16, or the next 16
// quads (four bytes) of 8-bit values; next: bytes to the next 16 rows.
struct MatrixRows {
    const void* at;
    int64_t stride, step, next;
};

// Memory that is fetched during a product, from `at` to `end`.
struct Ahead {
    const uint8_t *at, *end;

    FOVEA_INLINE void fetch() {
        if (at >= end) return;
        for (int line = 0; line < 256; line += 64) prefetch_l2(at + line);
        at += 256;
    }
};

#define TILE_MULTIPLY(sums, rows, tile)                                                     \
    if constexpr (BYTES) {                                                                  \
        TILE_BYTES(sums, rows, tile);                                                       \
    } else {                                                                                \
        TILE_BF16(sums, rows, tile);                                                        \
    }

// Four tiles of sums, in registers 4 to 7: at c, and `second`, `third` and `fourth` values behind it. line: bytes from row
// to row.
template <class Sum>
FOVEA_INLINE void load_sums(const Sum* c, int64_t second, int64_t third, int64_t fourth, int64_t line, bool fresh) {
    static_assert(sizeof(Sum) == 4);
    if (fresh) {
        TILE_ZERO(4); TILE_ZERO(5); TILE_ZERO(6); TILE_ZERO(7);
    } else {
        TILE_LOAD(4, c, line); TILE_LOAD(5, c + second, line); TILE_LOAD(6, c + third, line); TILE_LOAD(7, c + fourth, line);
    }
}

template <class Sum>
FOVEA_INLINE void store_sums(Sum* c, int64_t second, int64_t third, int64_t fourth, int64_t line) {
    TILE_STORE(4, c, line); TILE_STORE(5, c + second, line); TILE_STORE(6, c + third, line); TILE_STORE(7, c + fourth, line);
}

// Adds 16 rows times the four tiles of 16 pairs (or quads) of a panel to the sums.
template <bool BYTES>
FOVEA_INLINE void add_tiles(const uint8_t* x, int64_t stride, const uint8_t* tile) {
    TILE_LOAD(0, x, stride);
    TILE_LOAD(1, tile, 256); TILE_MULTIPLY(4, 0, 1);
    TILE_LOAD(2, tile + 64, 256); TILE_MULTIPLY(5, 0, 2);
    TILE_LOAD(3, tile + 128, 256); TILE_MULTIPLY(6, 0, 3);
    TILE_LOAD(1, tile + 192, 256); TILE_MULTIPLY(7, 0, 1);
}

// Multiplies 32 (TWO) or 16 rows with the 64 outputs of a panel, whose pairs (or quads) of k are 256 bytes apart. depth:
// number of blocks of 16 pairs. Sums to c, `ldc` values from row to row, added to it unless `fresh`. Rows that do
// not exist give sums that nobody reads.
template <bool TWO, bool BYTES, class Sum>
FOVEA_INLINE void matrix_block(const MatrixRows& rows, const void* panel, int64_t depth, Sum* c, int64_t ldc, bool fresh,
                               Ahead& ahead) {
    const int64_t below = MATRIX_ROWS * ldc, line = 4 * ldc;
    const uint8_t *x = static_cast<const uint8_t*>(rows.at), *tile = static_cast<const uint8_t*>(panel);
    if constexpr (!TWO) {  // four tiles of sums, 16 rows by 64 outputs
        load_sums(c, 16, 32, 48, line, fresh);
        for (int64_t k = 0; k < depth; ++k, x += rows.step, tile += 4096) {
            ahead.fetch();
            add_tiles<BYTES>(x, rows.stride, tile);
        }
        store_sums(c, 16, 32, 48, line);
        return;
    }
    for (int half = 0; half < 2; ++half, c += 32) {  // 32 rows by 32 outputs
        x = static_cast<const uint8_t*>(rows.at), tile = static_cast<const uint8_t*>(panel) + 128 * half;
        load_sums(c, 16, below, below + 16, line, fresh);
        for (int64_t k = 0; k < depth; ++k, x += rows.step, tile += 4096) {
            ahead.fetch();
            TILE_LOAD(2, tile, 256); TILE_LOAD(0, x, rows.stride); TILE_MULTIPLY(4, 0, 2);
            TILE_LOAD(3, tile + 64, 256); TILE_MULTIPLY(5, 0, 3);
            TILE_LOAD(1, x + rows.next, rows.stride); TILE_MULTIPLY(6, 1, 2); TILE_MULTIPLY(7, 1, 3);
        }
        store_sums(c, 16, below, below + 16, line);
    }
}

// Multiplies 16 rows of bf16 with the 64 outputs of a panel that is unpacked meanwhile. make(k) writes the tiles of 16 pairs of
// k, and returns their address. They are multiplied LATER iterations afterwards, when the stores have reached the
// cache. The other arguments are those of `matrix_block`.
template <class Make>
inline void matrix_stream(const MatrixRows& rows, const Make& make, int64_t depth, float* c, int64_t ldc) {
    constexpr int64_t LATER = 2;
    const uint8_t *x = static_cast<const uint8_t*>(rows.at), *made[LATER];
    load_sums(c, 16, 32, 48, 4 * ldc, true);
    for (int64_t k = 0; k < depth + LATER; ++k) {
        const uint8_t* tile = made[k % LATER];
        if (k < depth) made[k % LATER] = static_cast<const uint8_t*>(make(k));
        if (k < LATER) continue;
        add_tiles<false>(x, rows.stride, tile);
        x += rows.step;
    }
    store_sums(c, 16, 32, 48, 4 * ldc);
}

// Multiplies `count` rows with a panel: 32 at a time while more than 16 are left. The arguments are those of `matrix_block`.
template <bool BYTES, class Sum>
inline void matrix_rows(int64_t count, MatrixRows rows, const void* panel, int64_t depth, Sum* c, int64_t ldc, bool fresh,
                        Ahead& ahead) {
    for (; count > MATRIX_ROWS; count -= 2 * MATRIX_ROWS, c += 2 * MATRIX_ROWS * ldc) {
        matrix_block<true, BYTES>(rows, panel, depth, c, ldc, fresh, ahead);
        rows.at = static_cast<const uint8_t*>(rows.at) + 2 * rows.next;
    }
    if (count > 0) matrix_block<false, BYTES>(rows, panel, depth, c, ldc, fresh, ahead);
}

#endif

}  // namespace fovea

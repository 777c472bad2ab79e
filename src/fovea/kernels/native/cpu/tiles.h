// Rows of bf16 times tiles: the inner loop of products and of attention.
//
// A tile is one operand of VDPBF16PS: a pair of values of k for each of 16 outputs. A panel is 4 tiles wide,
// that is 64 outputs.
#pragma once

#include <cstring>

#include "common.h"

namespace fovea {

constexpr int PANEL = 64, TILES = 4, LANES = 16, TILE_PLAIN = 64;
constexpr int ROWS = 6;  // rows of the register block: 6 x 4 accumulators

// Values 2 * pair and 2 * pair + 1 of a row, in every lane.
inline __m512i pair_of(const bf16* row, int64_t pair) {
    int32_t both;
    std::memcpy(&both, row + 2 * pair, 4);
    return _mm512_set1_epi32(both);
}

// Adds rows of x times `pairs` * 4 tiles to c (rows, 64). rows: at most R; ldx, ldc: values between rows of x
// and c. fresh: overwrite c instead. ahead: memory to prefetch meanwhile, one cache line per pair, or null.
template <int R>
inline void block_rows(int64_t rows, const uint8_t* tiles, int64_t pairs, const bf16* x, int64_t ldx, float* c,
                       int64_t ldc, bool fresh, const uint8_t* ahead = nullptr) {
    if constexpr (R > 1) {
        if (rows < R) return block_rows<R - 1>(rows, tiles, pairs, x, ldx, c, ldc, fresh, ahead);
    }
    __m512 sums[R][TILES];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < TILES; ++t)
            sums[r][t] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * ldc + t * LANES);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        if (pair % 16 == 0)  // prefetch one cache line of each row of the next block
            for (int r = 0; r < R; ++r)
                _mm_prefetch(reinterpret_cast<const char*>(x + (R + r) * ldx + 2 * pair), _MM_HINT_T0);
        if (ahead) _mm_prefetch(reinterpret_cast<const char*>(ahead + pair * 64), _MM_HINT_T1);
        __m512i tile[TILES];
        for (int t = 0; t < TILES; ++t) tile[t] = _mm512_load_si512(tiles + (pair * TILES + t) * TILE_PLAIN);
        for (int r = 0; r < R; ++r) {
            const __m512i both = pair_of(x + r * ldx, pair);
            for (int t = 0; t < TILES; ++t)
                sums[r][t] = _mm512_dpbf16_ps(sums[r][t], (__m512bh)both, (__m512bh)tile[t]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < TILES; ++t) _mm512_storeu_ps(c + r * ldc + t * LANES, sums[r][t]);
}

}  // namespace fovea

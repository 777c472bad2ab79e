// Products with weights of 8 or 4 bits that have a scale per group of k and output. The layout is in
// levels.h.
//
// Rows of x are quantized too, with a scale per row and group, so that VPDPBUSD can multiply: four products
// of bytes per lane and instruction, summed in int32, which is exact. Then a group's sum is multiplied by
// both scales and added in float32, group by group from the first. The operations are the same whatever the
// number of rows, so a row's result does not depend on the other rows of its step. Scales of x are per group,
// not per row: a single large value then costs precision only in its own group.

#include <cstring>
#include <vector>

#include "formats.h"

namespace fovea {
namespace {

constexpr int CHUNK = 1024;              // values of k: their levels (64 KiB) stay in L2 for all rows
constexpr int NEAR = 256;                // the same for few rows: 16 KiB stay in L1 beside prefetches
constexpr int FEW = 16, FEW_CODED = 36;  // at most so many rows are few; unpacked levels gain more from L1
constexpr int CODE_ROWS = 12;            // up to this many rows, each block of rows unpacks codes itself:
                                         // unpacking overlaps with the products
constexpr int AHEAD = 4096;              // how many bytes ahead a single block of rows prefetches

inline __m512i tile_at(const uint8_t* at) { return _mm512_loadu_si512(at); }

// The levels of one quad of a row, in every lane.
inline __m512i quad_of(const int8_t* levels, int quad) {
    int32_t four;
    std::memcpy(&four, levels + 4 * quad, 4);
    return _mm512_set1_epi32(four);
}

// Adds the dot products of four bytes per lane to sum. This is inline assembly because with the intrinsic GCC
// 12 keeps the sums of six rows in memory.
inline void add_dot(__m512i& sum, __m512i levels, __m512i four) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(levels), "v"(four));
}

struct Pair {
    __m512i even, odd;
};

// Turns a cache line of codes into the levels of a tile, of an even and an odd quad.
inline Pair unpacked(__m512i line, __m512i table) {
    const __m512i mask = _mm512_set1_epi8(15);
    return {_mm512_shuffle_epi8(table, _mm512_and_si512(line, mask)),
            _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(line, 4), mask))};
}

// Prefetches LINES cache lines and moves `ahead` behind them.
template <int LINES>
inline void fetch(const uint8_t*& ahead) {
    for (int line = 0; line < LINES; ++line, ahead += 64)
        _mm_prefetch(reinterpret_cast<const char*>(ahead), LINES == TILES ? _MM_HINT_T0 : _MM_HINT_T1);
}

// Adds R rows of x, `stride` apart, times a group of levels to sums (R, 4 tiles).
template <class Format, int LINES, int R>
inline void add_levels(__m512i (&sums)[R][TILES], const uint8_t* group, const int8_t* x, int64_t stride,
                       const uint8_t*& ahead) {
    for (int quad = 0; quad < Format::QUADS; ++quad, group += TILES * 64) {
        fetch<LINES>(ahead);
        __m512i tile[TILES];
        for (int t = 0; t < TILES; ++t) tile[t] = tile_at(group + t * 64);
        for (int r = 0; r < R; ++r) {
            const __m512i four = quad_of(x + r * stride, quad);
            for (int t = 0; t < TILES; ++t) add_dot(sums[r][t], tile[t], four);
        }
    }
}

// Does the work of `add_levels` for a group of codes.
template <class Format, int LINES, int R>
inline void add_codes(__m512i (&sums)[R][TILES], const uint8_t* group, const int8_t* x, int64_t stride,
                      const uint8_t*& ahead) {
    const __m512i table = lookup4();
    for (int quad = 0; quad < Format::QUADS; quad += 2, group += TILES * 64) {
        fetch<LINES>(ahead);
        for (int t = 0; t < TILES; ++t) {
            const Pair pair = unpacked(tile_at(group + t * 64), table);
            for (int r = 0; r < R; ++r) {
                add_dot(sums[r][t], pair.even, quad_of(x + r * stride, quad));
                add_dot(sums[r][t], pair.odd, quad_of(x + r * stride, quad + 1));
            }
        }
    }
}

// Adds R rows of x, from `row` on, times groups [first, first + count) of a panel to c (R, 64). The bytes of
// these groups begin at `groups`. STORED: they are in the stored format, otherwise unpacked levels. Meanwhile
// LINES cache lines from `ahead` on are prefetched for every 4 cache lines that are loaded.
template <class Format, bool STORED, int LINES, int R>
void multiply(const uint8_t* groups, int64_t first, int64_t count, const LevelRows& x, int64_t row, float* c,
              const uint8_t* ahead) {
    constexpr bool CODES = STORED && Format::CODED;
    constexpr int LEVELS = CODES || !Format::CODED ? Format::LEVELS : 2 * Format::LEVELS;
    const int64_t stride = x.groups * Format::GROUP, every = x.groups;
    const int8_t* levels = x.levels + row * stride + first * Format::GROUP;
    const float* x_scale = x.scale + row * every + first;
    const int32_t* start = x.start + row * every + first;
    // Totals are not added up in c: the compiler could not exclude that the loop reads from c, and would
    // store twice.
    __m512 totals[TILES][R];
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) totals[t][r] = _mm512_loadu_ps(c + r * PANEL + t * LANES);
    for (int64_t g = 0; g < count; ++g, groups += LEVELS + 2 * PANEL, levels += Format::GROUP) {
        __m512i sums[R][TILES];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < TILES; ++t) sums[r][t] = _mm512_set1_epi32(start[g + r * every]);
        if constexpr (CODES)
            add_codes<Format, LINES, R>(sums, groups, levels, stride, ahead);
        else
            add_levels<Format, LINES, R>(sums, groups, levels, stride, ahead);
        const bf16* scales = reinterpret_cast<const bf16*>(groups + LEVELS);
#pragma GCC unroll 4  // otherwise the sums are kept in memory, because the index of a loop selects them
        for (int t = 0; t < TILES; ++t) {
            const __m512 scale = load16(scales + t * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale[g + r * every]));
                totals[t][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][t]), both, totals[t][r]);
            }
        }
    }
    for (int t = 0; t < TILES; ++t)
        for (int r = 0; r < R; ++r) _mm512_storeu_ps(c + r * PANEL + t * LANES, totals[t][r]);
}

// Calls `multiply` for `rows` rows, at most R.
template <class Format, bool STORED, int LINES, int R = ROWS>
void multiply_some(int64_t rows, const uint8_t* groups, int64_t first, int64_t count, const LevelRows& x, int64_t row,
                   float* c, const uint8_t* ahead) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_some<Format, STORED, LINES, R - 1>(rows, groups, first, count, x, row, c, ahead);
    }
    multiply<Format, STORED, LINES, R>(groups, first, count, x, row, c, ahead);
}

// Unpacks groups of codes into groups of levels, each followed by its scales.
template <class Format>
void unpack(const uint8_t* groups, int64_t count, uint8_t* to) {
    const __m512i table = lookup4();
    for (int64_t g = 0; g < count; ++g, groups += Format::BYTES) {
        for (int line = 0; line < Format::LEVELS / 64; ++line) {
            const Pair pair = unpacked(tile_at(groups + line * 64), table);
            uint8_t* even = to + (line / TILES * 2 * TILES + line % TILES) * 64;
            _mm512_storeu_si512(even, pair.even);
            _mm512_storeu_si512(even + TILES * 64, pair.odd);
        }
        to += 2 * Format::LEVELS;
        std::memcpy(to, groups + Format::LEVELS, 2 * PANEL);
        to += 2 * PANEL;
    }
}

struct Scratch {
    std::vector<float> sums;
    std::vector<uint8_t> bytes;

    uint8_t* aligned(size_t count) {
        bytes.resize(std::max(bytes.size(), count + 64));
        return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
    }
};

// Multiplies rows [start, start + rows) with one panel: a chunk of k at a time, and rows in blocks of about
// equal size. Each of the first two blocks prefetches half of the next chunk.
template <class Format>
void panel_rows(const Call& call, int64_t panel, int64_t start, int64_t rows) {
    thread_local Scratch scratch;
    const int64_t groups = call.rows.groups, few = Format::CODED ? FEW_CODED : FEW;
    const int64_t step = (rows <= few ? NEAR : CHUNK) / Format::GROUP;
    const uint8_t* data = call.weight.data + panel * groups * Format::BYTES;
    scratch.sums.assign(rows * PANEL, 0.0f);
    float* c = scratch.sums.data();
    if (rows <= ROWS) {
        multiply_some<Format, true, TILES>(rows, data, 0, groups, call.rows, start, c, data + AHEAD);
        return finish_rows(call, panel, start, rows, c);
    }
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t first = 0; first < groups; first += step) {
        const int64_t count = std::min(step, groups - first), bytes = count * Format::BYTES;
        const uint8_t* stored = data + first * Format::BYTES;
        const uint8_t* levels = stored;
        const bool coded = Format::CODED && rows <= CODE_ROWS;
        if constexpr (Format::CODED) {
            if (!coded) {
                uint8_t* room = scratch.aligned(step * (2 * Format::LEVELS + 2 * PANEL));
                unpack<Format>(stored, count, room);
                levels = room;
            }
        }
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
            const uint8_t* ahead = stored + bytes + block * bytes / 2;
            float* sums = c + row * PANEL;
            if (coded)
                multiply_some<Format, true, 2>(some, stored, first, count, call.rows, start + row, sums, ahead);
            else if (block < 2)
                multiply_some<Format, false, Format::CODED ? 1 : 2>(some, levels, first, count, call.rows, start + row, sums, ahead);
            else
                multiply_some<Format, false, 0>(some, levels, first, count, call.rows, start + row, sums, ahead);
        }
    }
    finish_rows(call, panel, start, rows, c);
}

}  // namespace

void quantized_panel(const Call& call, int64_t panel, int64_t start, int64_t rows) {
    if (call.weight.format == INT8)
        panel_rows<Int8>(call, panel, start, rows);
    else
        panel_rows<Int4>(call, panel, start, rows);
}

}  // namespace fovea

// Products with weights of 8 or 4 bits that have a scale per group of k and output. The layout is in
// levels.h.
//
// Rows of x are quantized too, with a scale per row and group, so that bytes can be multiplied and summed in int32,
// which is exact. Then a group's sum is multiplied by both scales and added in float32, group by group from the
// first. The operations are the same whatever the number of rows, so a row's result does not depend on the other
// rows of its step. Scales of x are per group, not per row: a single large value then costs precision only in its
// own group.

#include <vector>

#include "formats.h"
#include "pages.h"

namespace fovea {
namespace {

constexpr int CHUNK = 1024;              // values of k: their levels (64 KiB) stay in L2 for all rows
constexpr int NEAR = 256;                // the same for few rows: 16 KiB stay in L1 beside prefetches
constexpr int FEW = 16, FEW_CODED = 36;  // at most so many rows are few; unpacked levels gain more from L1
constexpr int CODE_ROWS = 12;            // up to this many rows, each block of rows unpacks codes itself:
                                         // unpacking overlaps with the products
[[maybe_unused]] constexpr int64_t VECTOR_ROWS = 12;  // up to this many rows are multiplied by vectors, also with AMX
constexpr int AHEAD = 4096;              // how many bytes ahead a single block of rows prefetches
constexpr int QUAD = 4 * PANEL;          // bytes of a quad of a panel, or of a pair of quads of codes

FOVEA_INLINE hn::Vec<Bytes> levels_of_codes() { return hn::LoadDup128(u8, INT4_LEVELS); }

// Which levels a vector of bytes in memory stands for: the levels themselves, or the levels of the codes in the low
// or the high halves of the bytes.
enum Source { LEVELS, LOW_CODES, HIGH_CODES };

template <Source SOURCE>
FOVEA_INLINE hn::Vec<Bytes> levels_at(const uint8_t* at, hn::Vec<Bytes> table) {
    const auto bytes = hn::LoadU(u8, at);
    if constexpr (SOURCE == LEVELS) return bytes;
    const auto codes = SOURCE == HIGH_CODES ? hn::BitCast(u8, hn::ShiftRight<4>(hn::BitCast(u16, bytes))) : bytes;
    return hn::TableLookupBytes(table, hn::And(codes, hn::Set(u8, 15)));
}

// Adds a quad of R rows of x, `stride` apart, times the levels of a strip to sums.
template <Source SOURCE, bool CODED, int R>
FOVEA_INLINE void add_quad(Ints (&sums)[R][VECTORS], const uint8_t* strip, hn::Vec<Bytes> table, const Level* x,
                           int64_t stride) {
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; ++part) {
        Unsigned levels[VECTORS];
        for (int v = 0; v < VECTORS; ++v) levels[v] = operand(levels_at<SOURCE>(strip + v * WIDTH, table), part);
        for (int r = 0; r < R; ++r) {
            const Unsigned four = quad_of(x + r * stride, part);
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_dot<CODED>(sums[r][v], levels[v], four);
        }
    }
}

// Adds R rows of x times a group of levels, or of codes, of one strip to sums. Meanwhile LINES cache lines from
// `ahead` on are prefetched per quad (or pair of quads).
template <class Format, bool CODES, int LINES, int R>
FOVEA_INLINE void add_group(Ints (&sums)[R][VECTORS], const uint8_t* strip, const Level* x, int64_t stride,
                            const uint8_t*& ahead) {
    const auto table = levels_of_codes();
    if constexpr (BYTE_SQUARES && R > 1) {
        Squares<Ints, R, VECTORS> squares;
        to_squares(sums, squares);
        for (int quad = 0; quad < Format::QUADS; quad += 2, strip += CODES ? QUAD : 2 * QUAD) {
            for (int line = 0; line < (CODES ? LINES : 2 * LINES); ++line, ahead += 64) prefetch(ahead);
            add_squares<R>(squares, x + 4 * quad, stride, [&](int i, int v) {
                const uint8_t* at = strip + v * WIDTH;
                if constexpr (!CODES) return operand(levels_at<LEVELS>(at + i * QUAD, table), 0);
                return operand(i ? levels_at<HIGH_CODES>(at, table) : levels_at<LOW_CODES>(at, table), 0);
            });
        }
        return from_squares(squares, sums);
    }
    for (int quad = 0; quad < Format::QUADS; quad += CODES ? 2 : 1, strip += QUAD) {
        for (int line = 0; line < LINES; ++line, ahead += 64) prefetch(ahead);
        add_quad<CODES ? LOW_CODES : LEVELS, Format::CODED, R>(sums, strip, table, x + 4 * quad, stride);
        if constexpr (CODES) add_quad<HIGH_CODES, Format::CODED, R>(sums, strip, table, x + 4 * quad + 4, stride);
    }
}

// Adds R rows of x, from `row` on, times groups [first, first + count) of a panel to c (R, 64). The bytes of
// these groups begin at `groups`. STORED: they are in the stored format, otherwise unpacked levels. Meanwhile
// LINES cache lines from `ahead` on are prefetched for every 4 cache lines that are loaded.
template <class Format, bool STORED, int LINES, int R>
void multiply(const uint8_t* groups, int64_t first, int64_t count, const LevelRows& x, int64_t row, float* c,
              const uint8_t* ahead) {
    static_assert(STRIPS == 1 || STRIPS == TILES, "each strip of several prefetches one line per quad");
    constexpr bool CODES = STORED && Format::CODED;
    constexpr int BYTES = CODES || !Format::CODED ? Format::LEVELS : 2 * Format::LEVELS;
    const int64_t stride = x.groups * Format::GROUP, every = x.groups;
    const Level* levels = x.levels + row * stride + first * Format::GROUP;
    const float* x_scale = x.scale + row * every + first;
    const int32_t* start = x.start + row * every + first;
    for (int64_t g = 0; g < count; ++g, groups += BYTES + 2 * PANEL, levels += Format::GROUP)
        for (int strip = 0; strip < STRIPS; ++strip) {
            Ints sums[R][VECTORS];
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = hn::Set(i32, start[g + r * every]);
            const uint8_t* at = groups + strip * 4 * STRIP;
            if constexpr (STRIPS == 1)
                add_group<Format, CODES, LINES, R>(sums, at, levels, stride, ahead);
            else if (strip < LINES)
                add_group<Format, CODES, 1, R>(sums, at, levels, stride, ahead);
            else
                add_group<Format, CODES, 0, R>(sums, at, levels, stride, ahead);
            const bf16* scales = reinterpret_cast<const bf16*>(groups + BYTES) + strip * STRIP;
#pragma GCC unroll 4  // otherwise the sums are kept in memory, because the index of a loop selects them
            for (int v = 0; v < VECTORS; ++v) {
                const Floats scale = load(scales + v * LANES);
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    float* total = c + r * PANEL + strip * STRIP + v * LANES;
                    const Floats both = hn::Mul(scale, hn::Set(f32, x_scale[g + r * every]));
                    hn::StoreU(hn::MulAdd(hn::ConvertTo(f32, sums[r][v]), both, hn::LoadU(f32, total)), f32, total);
                }
            }
        }
}

// Calls `multiply` for `rows` rows, at most R.
template <class Format, bool STORED, int LINES, int R = VECTOR_BLOCK>
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
    const auto table = levels_of_codes();
    for (int64_t g = 0; g < count; ++g, groups += Format::BYTES) {
        for (int at = 0; at < Format::LEVELS; at += WIDTH) {
            uint8_t* quads = to + at / QUAD * 2 * QUAD + at % QUAD;
            hn::StoreU(levels_at<LOW_CODES>(groups + at, table), u8, quads);
            hn::StoreU(levels_at<HIGH_CODES>(groups + at, table), u8, quads + QUAD);
        }
        to += 2 * Format::LEVELS;
        std::memcpy(to, groups + Format::LEVELS, 2 * PANEL);
        to += 2 * PANEL;
    }
}

struct Scratch {
    std::vector<float> sums;
    std::vector<uint8_t> bytes;
};

#if FOVEA_AMX && FOVEA_VNNI

// Adds the sums of group `group` of `rows` rows from `start` on to c (rows, 64): (sum + start) * both scales.
template <class Format>
void add_sums(const int32_t* sums, const LevelRows& x, int64_t start, int64_t rows, int64_t group, const bf16* scales, float* c) {
    const float* x_scale = x.scale + start * x.groups + group;
    const int32_t* first = x.start + start * x.groups + group;
    Floats scale[PANEL / LANES];
    for (int v = 0; v < PANEL / LANES; ++v) scale[v] = load(scales + v * LANES);
    for (int64_t r = 0; r < rows; ++r, sums += PANEL, c += PANEL, x_scale += x.groups, first += x.groups)
        for (int v = 0; v < PANEL / LANES; ++v) {
            const Ints sum = hn::Add(hn::LoadU(i32, sums + v * LANES), hn::Set(i32, *first));
            const Floats both = hn::Mul(scale[v], hn::Set(f32, *x_scale));
            hn::StoreU(hn::MulAdd(hn::ConvertTo(f32, sum), both, hn::LoadU(f32, c + v * LANES)), f32, c + v * LANES);
        }
}

// Does the work of `panel_rows` with matrix registers, which multiply levels of 8 bits. Sums in int32 are exact, so both give
// the same bits.
// The sums of a group are added to c while the registers multiply the next one.
template <class Format>
void matrix_panel(const Call& call, int64_t panel, int64_t start, int64_t rows, Scratch& scratch) {
    constexpr int64_t GROUP_BYTES = QUAD * Format::QUADS + 2 * PANEL, BLOCK = 2 * MATRIX_ROWS;
    const int64_t groups = call.rows.groups, stride = groups * Format::GROUP, step = CHUNK / Format::GROUP;
    const uint8_t* data = call.weight.data + panel * groups * Format::BYTES;
    alignas(64) static thread_local int32_t sums[2][BLOCK * PANEL];
    scratch.sums.assign(rows * PANEL, 0.0f);
    for (int64_t first = 0; first < groups; first += step) {
        const int64_t count = std::min(step, groups - first);
        const uint8_t* levels = data + first * Format::BYTES;
        Ahead ahead{levels + count * Format::BYTES, levels + 2 * count * Format::BYTES};
        if constexpr (Format::CODED) {
            uint8_t* room = fit_aligned(scratch.bytes, step * GROUP_BYTES);
            unpack<Format>(levels, count, room);
            levels = room;
        }
        for (int64_t row = 0; row < rows; row += BLOCK) {
            const int64_t some = std::min(BLOCK, rows - row);
            float* c = scratch.sums.data() + row * PANEL;
            const auto add = [&](int64_t g) {
                const bf16* scales = reinterpret_cast<const bf16*>(levels + g * GROUP_BYTES + QUAD * Format::QUADS);
                add_sums<Format>(sums[g % 2], call.rows, start + row, some, first + g, scales, c);
            };
            for (int64_t g = 0; g < count; ++g) {
                const Level* x = call.rows.levels + (start + row) * stride + (first + g) * Format::GROUP;
                matrix_rows<true>(some, {x, stride, MATRIX_BYTES, MATRIX_ROWS * stride}, levels + g * GROUP_BYTES,
                                  Format::QUADS / 16, sums[g % 2], PANEL, true, ahead);
                if (g) add(g - 1);
            }
            add(count - 1);
        }
    }
    finish_rows(call, panel, start, rows, scratch.sums.data());
}

#endif

// Multiplies rows [start, start + rows) with one panel: a chunk of k at a time, and rows in blocks of about
// equal size. Each of the first two blocks prefetches half of the next chunk.
template <class Format>
void panel_rows(const Call& call, int64_t panel, int64_t start, int64_t rows) {
    thread_local Scratch scratch;
#if FOVEA_AMX && FOVEA_VNNI
    if (rows > VECTOR_ROWS) return matrix_panel<Format>(call, panel, start, rows, scratch);
#endif
    const int64_t groups = call.rows.groups, few = Format::CODED ? FEW_CODED : FEW;
    const int64_t step = (rows <= few ? NEAR : CHUNK) / Format::GROUP;
    const uint8_t* data = call.weight.data + panel * groups * Format::BYTES;
    scratch.sums.assign(rows * PANEL, 0.0f);
    float* c = scratch.sums.data();
    if (rows <= VECTOR_BLOCK) {
        multiply_some<Format, true, TILES>(rows, data, 0, groups, call.rows, start, c, data + AHEAD);
        return finish_rows(call, panel, start, rows, c);
    }
    const int64_t blocks = (rows + VECTOR_BLOCK - 1) / VECTOR_BLOCK;
    for (int64_t first = 0; first < groups; first += step) {
        const int64_t count = std::min(step, groups - first), bytes = count * Format::BYTES;
        const uint8_t* stored = data + first * Format::BYTES;
        const uint8_t* levels = stored;
        const bool coded = Format::CODED && rows <= CODE_ROWS;
        if constexpr (Format::CODED) {
            if (!coded) {
                uint8_t* room = fit_aligned(scratch.bytes, step * (2 * Format::LEVELS + 2 * PANEL));
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

void quantized_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows) {
    for (int64_t panel = first; panel < last; ++panel)
        if (call.weight.format == INT8)
            panel_rows<Int8>(call, panel, start, rows);
        else
            panel_rows<Int4>(call, panel, start, rows);
}

}  // namespace fovea

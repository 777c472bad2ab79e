// Products with weights of 8 or 4 bits that have a scale per group of k and output. The layouts are in levels.h.
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
constexpr int FEW = 16, FEW_PAIRED = 36;  // at most so many rows are few; unpaired codes gain more from L1
constexpr int PAIRED_ROWS = 12;           // up to this many rows, each block of rows unpairs codes itself:
                                          // that overlaps with the products
[[maybe_unused]] constexpr int64_t VECTOR_ROWS = 12;  // up to this many rows are multiplied by vectors, also with AMX
constexpr int AHEAD = 4096;              // how many bytes ahead a single block of rows prefetches
constexpr int QUAD = 4 * PANEL;          // bytes of a quad of a panel, or of a pair of quads of codes

// Which codes a vector of bytes in memory holds: bytes, or the low or the high halves of bytes.
enum Source { WHOLE, LOW_HALVES, HIGH_HALVES };

template <Source SOURCE>
FOVEA_INLINE hn::Vec<Bytes> codes_at(const uint8_t* at) {
    const auto bytes = hn::LoadU(u8, at);
    if constexpr (SOURCE == WHOLE) return bytes;
    const auto codes = SOURCE == HIGH_HALVES ? hn::BitCast(u8, hn::ShiftRight<4>(hn::BitCast(u16, bytes))) : bytes;
    return hn::And(codes, hn::Set(u8, 15));
}

// Adds a quad of R rows of x, `stride` values apart, times the codes of a strip to sums.
template <class Format, Source SOURCE, int R>
FOVEA_INLINE void add_quad(Ints (&sums)[R][VECTORS], const uint8_t* strip, const Level<Format>* x, int64_t stride) {
#pragma GCC unroll 2
    for (int part = 0; part < PARTS<Format>; ++part) {
        Unsigned codes[VECTORS];
        for (int v = 0; v < VECTORS; ++v) codes[v] = operand<Format>(codes_at<SOURCE>(strip + v * WIDTH), part);
        for (int r = 0; r < R; ++r) {
            const Unsigned four = quad_of(x + r * stride, part);
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_dot<Format::PAIRED>(sums[r][v], codes[v], four);
        }
    }
}

#if !(FOVEA_VNNI || FOVEA_I8MM || FOVEA_DOTPROD)
// The same for small codes, as bytes, with sums in 16 bits.
template <class Format, Source SOURCE, int R>
FOVEA_INLINE void add_quad(Shorts (&sums)[R][VECTORS], const uint8_t* strip, const int8_t* x, int64_t stride) {
    Unsigned codes[VECTORS];
    for (int v = 0; v < VECTORS; ++v) codes[v] = hn::BitCast(u32, codes_at<SOURCE>(strip + v * WIDTH));
    for (int r = 0; r < R; ++r) {
        const Unsigned four = quad_of(x + r * stride, 0);
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = add_pairs_of_bytes(sums[r][v], codes[v], four);
    }
}
#endif

// Adds quads [0, QUADS) of R rows of x times the codes of one strip to sums. Meanwhile `lines` cache lines from `ahead` on are
// prefetched per quad, or pair of quads if codes share bytes in memory (PAIRED).
template <class Format, bool PAIRED, int QUADS, int R, class Sums>
FOVEA_INLINE void add_quads(Sums& sums, const uint8_t*& strip, const Level<Format>* x, int64_t stride, int lines,
                            const uint8_t*& ahead) {
    for (int quad = 0; quad < QUADS; quad += PAIRED ? 2 : 1, strip += QUAD) {
        for (int line = 0; line < lines; ++line, ahead += 64) prefetch(ahead);
        add_quad<Format, PAIRED ? LOW_HALVES : WHOLE, R>(sums, strip, x + 4 * quad, stride);
        if constexpr (PAIRED) add_quad<Format, HIGH_HALVES, R>(sums, strip, x + 4 * quad + 4, stride);
    }
}

// Adds R rows of x times a group of codes of one strip to sums.
template <class Format, bool PAIRED, int R>
FOVEA_INLINE void add_group(Ints (&sums)[R][VECTORS], const uint8_t* strip, const Level<Format>* x, int64_t stride, int lines,
                            const uint8_t*& ahead) {
    if constexpr (BYTE_SQUARES && R > 1) {
        Squares<Ints, R, VECTORS> squares;
        to_squares(sums, squares);
        for (int quad = 0; quad < Format::QUADS; quad += 2, strip += PAIRED ? QUAD : 2 * QUAD) {
            for (int line = 0; line < (PAIRED ? lines : 2 * lines); ++line, ahead += 64) prefetch(ahead);
            add_squares<R>(squares, x + 4 * quad, stride, [&](int i, int v) {
                const uint8_t* at = strip + v * WIDTH;
                if constexpr (!PAIRED) return operand<Format>(codes_at<WHOLE>(at + i * QUAD), 0);
                return operand<Format>(i ? codes_at<HIGH_HALVES>(at) : codes_at<LOW_HALVES>(at), 0);
            });
        }
        return from_squares(squares, sums);
    }
#if !(FOVEA_VNNI || FOVEA_I8MM || FOVEA_DOTPROD)
    if constexpr (Format::SMALL) {
        for (int quad = 0; quad < Format::QUADS; quad += FOLD<Format>, x += 4 * FOLD<Format>) {
            Shorts few[R][VECTORS];
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECTORS; ++v) few[r][v] = hn::Zero(i16);
            add_quads<Format, PAIRED, FOLD<Format>, R>(few, strip, x, stride, lines, ahead);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][v] = hn::Add(sums[r][v], hn::WidenMulPairwiseAdd(i32, few[r][v], hn::Set(i16, 1)));
        }
        return;
    }
#endif
    add_quads<Format, PAIRED, Format::QUADS, R>(sums, strip, x, stride, lines, ahead);
}

// The scales of one group and 64 outputs: see `Scaling`. block: the scales of the block that the group belongs to.
template <class Format>
class GroupScales {
  public:
    GroupScales(const uint8_t* block, int sub) : block_(block), sub_(sub) {}

    FOVEA_INLINE Floats scale(int output) const {
        if constexpr (Format::SCALING == NESTED) return hn::Mul(half(2 * Format::SUBS * PANEL, output), whole(0, output));
        if constexpr (Format::SCALING == CENTRED) return load(reinterpret_cast<const bf16*>(block_) + sub_ * PANEL + output);
        return half(0, sub_ * PANEL + output);
    }

    FOVEA_INLINE Floats minimum(int output) const {
        if constexpr (Format::SCALING == NESTED)
            return hn::Mul(half(2 * Format::SUBS * PANEL + 2 * PANEL, output), whole(Format::SUBS * PANEL, output));
        return half(2 * Format::SUBS * PANEL, sub_ * PANEL + output);
    }

    FOVEA_INLINE Floats zero(int output) const {
        const hn::Rebind<uint8_t, I> bytes;
        const uint8_t* at = block_ + 2 * Format::SUBS * PANEL + sub_ * PANEL + output;
        return hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(bytes, at)));
    }

  private:
    FOVEA_INLINE Floats half(int from, int output) const {
        const hn::Rebind<hwy::float16_t, F> type;
        return hn::PromoteTo(f32, hn::LoadU(type, reinterpret_cast<const hwy::float16_t*>(block_ + from) + output));
    }
    FOVEA_INLINE Floats whole(int from, int output) const {
        const hn::Rebind<int8_t, I> bytes;
        const int8_t* at = reinterpret_cast<const int8_t*>(block_ + from) + sub_ * PANEL + output;
        return hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(bytes, at)));
    }

    const uint8_t* block_;
    int sub_;
};

// Adds the exact sums of a group, times both scales, to the total of a row and a vector of outputs. x_scale, x_sum: of the row's
// group. A zero and a minimum count as often as the row's levels add up to.
template <class Format>
FOVEA_INLINE Floats add_scaled(Floats total, Ints sum, Floats scale, Floats offset, float x_scale, int32_t x_sum) {
    Floats exact = hn::ConvertTo(f32, sum);
    if constexpr (Format::SCALING == ZERO) exact = hn::NegMulAdd(offset, hn::Set(f32, static_cast<float>(x_sum)), exact);
    total = hn::MulAdd(exact, hn::Mul(scale, hn::Set(f32, x_scale)), total);
    if constexpr (Format::SCALING == MINIMUM || Format::SCALING == NESTED)
        total = hn::MulAdd(offset, hn::Set(f32, x_scale * static_cast<float>(x_sum)), total);
    return total;
}

template <class Format>
FOVEA_INLINE Floats offset_of(const GroupScales<Format>& scales, int output) {
    if constexpr (Format::SCALING == ZERO) return scales.zero(output);
    if constexpr (Format::SCALING == MINIMUM || Format::SCALING == NESTED) return scales.minimum(output);
    return hn::Zero(f32);
}

// Adds R rows of x, from `row` on, times blocks [first, first + count) of a panel to c (R, 64). The bytes of
// these blocks begin at `blocks`. STORED: they are in the stored format, otherwise codes have bytes of their own. Meanwhile
// `lines` cache lines from `ahead` on are prefetched for every 4 cache lines that are loaded.
template <class Format, bool STORED, int R>
void multiply(const uint8_t* blocks, int64_t first, int64_t count, const LevelRows& x, int64_t row, float* c, int lines,
              const uint8_t* ahead) {
    static_assert(STRIPS == 1 || STRIPS == TILES, "each strip of several prefetches one line per quad");
    constexpr bool PAIRED = STORED && Format::PAIRED;
    constexpr int SUBS = Format::SUBS, CODES = PAIRED ? Format::CODES : Format::UNPAIRED;
    const int64_t stride = x.groups * Format::SUB, every = x.groups;
    const int64_t from = first * SUBS;
    const Level<Format>* levels = static_cast<const Level<Format>*>(x.levels) + row * stride + from * Format::SUB;
    const float* x_scale = x.scale + row * every + from;
    const int32_t* x_sum = x.sum + row * every + from;
    for (int64_t block = 0; block < count; ++block, blocks += SUBS * CODES + Format::SCALES)
        for (int sub = 0; sub < SUBS; ++sub, levels += Format::SUB, ++x_scale, ++x_sum) {
            const GroupScales<Format> scales(blocks + SUBS * CODES, sub);
            for (int strip = 0; strip < STRIPS; ++strip) {
                Ints sums[R][VECTORS];
                for (int r = 0; r < R; ++r)
                    for (int v = 0; v < VECTORS; ++v) sums[r][v] = hn::Set(i32, -LEVEL_ZERO<Format> * x_sum[r * every]);
                const uint8_t* at = blocks + sub * CODES + strip * 4 * STRIP;
                add_group<Format, PAIRED, R>(sums, at, levels, stride, STRIPS == 1 ? lines : strip < lines, ahead);
#pragma GCC unroll 4  // otherwise the sums are kept in memory, because the index of a loop selects them
                for (int v = 0; v < VECTORS; ++v) {
                    const int output = strip * STRIP + v * LANES;
                    const Floats scale = scales.scale(output), offset = offset_of(scales, output);
#pragma GCC unroll 6
                    for (int r = 0; r < R; ++r) {
                        float* total = c + r * PANEL + output;
                        const Floats sum = add_scaled<Format>(hn::LoadU(f32, total), sums[r][v], scale, offset,
                                                              x_scale[r * every], x_sum[r * every]);
                        hn::StoreU(sum, f32, total);
                    }
                }
            }
        }
}

// Calls `multiply` for `rows` rows, at most R.
template <class Format, bool STORED, int R = VECTOR_BLOCK>
void multiply_some(int64_t rows, const uint8_t* blocks, int64_t first, int64_t count, const LevelRows& x, int64_t row,
                   float* c, int lines, const uint8_t* ahead) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_some<Format, STORED, R - 1>(rows, blocks, first, count, x, row, c, lines, ahead);
    }
    multiply<Format, STORED, R>(blocks, first, count, x, row, c, lines, ahead);
}

// Gives every code of some blocks a byte of its own; the scales follow each block.
template <class Format>
void unpair(const uint8_t* blocks, int64_t count, uint8_t* to) {
    for (int64_t block = 0; block < count; ++block) {
        for (int at = 0; at < Format::SUBS * Format::CODES; at += WIDTH, blocks += WIDTH) {
            uint8_t* quads = to + at / QUAD * 2 * QUAD + at % QUAD;
            hn::StoreU(codes_at<LOW_HALVES>(blocks), u8, quads);
            hn::StoreU(codes_at<HIGH_HALVES>(blocks), u8, quads + QUAD);
        }
        to += Format::SUBS * Format::UNPAIRED;
        std::memcpy(to, blocks, Format::SCALES);
        to += Format::SCALES, blocks += Format::SCALES;
    }
}

struct Scratch {
    std::vector<float> sums;
    std::vector<uint8_t> bytes;
};

#if FOVEA_AMX && FOVEA_VNNI

// Adds the sums of group `group` of `rows` rows from `start` on to c (rows, 64), see `add_scaled`.
template <class Format>
void add_sums(const int32_t* sums, const LevelRows& x, int64_t start, int64_t rows, int64_t group, const uint8_t* block, float* c) {
    const float* x_scale = x.scale + start * x.groups + group;
    const int32_t* x_sum = x.sum + start * x.groups + group;
    const GroupScales<Format> scales(block, 0);
    Floats scale[PANEL / LANES], offset[PANEL / LANES];
    for (int v = 0; v < PANEL / LANES; ++v) scale[v] = scales.scale(v * LANES), offset[v] = offset_of(scales, v * LANES);
    for (int64_t r = 0; r < rows; ++r, sums += PANEL, c += PANEL, x_scale += x.groups, x_sum += x.groups)
        for (int v = 0; v < PANEL / LANES; ++v) {
            const Ints centred = hn::Set(i32, -LEVEL_ZERO<Format> * *x_sum);
            const Ints sum = hn::Add(hn::LoadU(i32, sums + v * LANES), centred);
            const Floats total = hn::LoadU(f32, c + v * LANES);
            hn::StoreU(add_scaled<Format>(total, sum, scale[v], offset[v], *x_scale, *x_sum), f32, c + v * LANES);
        }
}

// Does the work of `panel_rows` with matrix registers, which multiply bytes. Sums in int32 are exact, so both give
// the same bits.
// The sums of a group are added to c while the registers multiply the next one. A block is one group here.
template <class Format>
void matrix_panel(const Call& call, int64_t panel, int64_t start, int64_t rows, Scratch& scratch) {
    constexpr int64_t GROUP_BYTES = Format::UNPAIRED + Format::SCALES, BLOCK = 2 * MATRIX_ROWS;
    const int64_t groups = call.rows.groups, stride = groups * Format::GROUP, step = CHUNK / Format::GROUP;
    const uint8_t* data = call.weight.data + panel * groups * Format::BYTES;
    const int8_t* x_levels = static_cast<const int8_t*>(call.rows.levels);
    alignas(64) static thread_local int32_t sums[2][BLOCK * PANEL];
    scratch.sums.assign(rows * PANEL, 0.0f);
    for (int64_t first = 0; first < groups; first += step) {
        const int64_t count = std::min(step, groups - first);
        const uint8_t* codes = data + first * Format::BYTES;
        Ahead ahead{codes + count * Format::BYTES, codes + 2 * count * Format::BYTES};
        if constexpr (Format::PAIRED) {
            uint8_t* room = fit_aligned(scratch.bytes, step * GROUP_BYTES);
            unpair<Format>(codes, count, room);
            codes = room;
        }
        for (int64_t row = 0; row < rows; row += BLOCK) {
            const int64_t some = std::min(BLOCK, rows - row);
            float* c = scratch.sums.data() + row * PANEL;
            const auto add = [&](int64_t g) {
                add_sums<Format>(sums[g % 2], call.rows, start + row, some, first + g, codes + g * GROUP_BYTES + Format::UNPAIRED, c);
            };
            for (int64_t g = 0; g < count; ++g) {
                const int8_t* x = x_levels + (start + row) * stride + (first + g) * Format::GROUP;
                matrix_rows<true>(some, {x, stride, MATRIX_BYTES, MATRIX_ROWS * stride}, codes + g * GROUP_BYTES,
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
    // The registers multiply 64 values of k at a time. Smaller groups are multiplied by vectors.
    if constexpr (Format::SUBS == 1 && Format::QUADS % 16 == 0)
        if (rows > VECTOR_ROWS) return matrix_panel<Format>(call, panel, start, rows, scratch);
#endif
    const int64_t blocks = call.rows.groups / Format::SUBS, few = Format::PAIRED ? FEW_PAIRED : FEW;
    const int64_t step = std::max(1, (rows <= few ? NEAR : CHUNK) / Format::GROUP);
    const uint8_t* data = call.weight.data + panel * blocks * Format::BYTES;
    scratch.sums.assign(rows * PANEL, 0.0f);
    float* c = scratch.sums.data();
    if (rows <= VECTOR_BLOCK) {
        multiply_some<Format, true>(rows, data, 0, blocks, call.rows, start, c, TILES, data + AHEAD);
        return finish_rows(call, panel, start, rows, c);
    }
    const int64_t parts = (rows + VECTOR_BLOCK - 1) / VECTOR_BLOCK;
    for (int64_t first = 0; first < blocks; first += step) {
        const int64_t count = std::min(step, blocks - first), bytes = count * Format::BYTES;
        const uint8_t* stored = data + first * Format::BYTES;
        const uint8_t* codes = stored;
        const bool paired = Format::PAIRED && rows <= PAIRED_ROWS;
        if constexpr (Format::PAIRED) {
            if (!paired) {
                uint8_t* room = fit_aligned(scratch.bytes, step * (Format::SUBS * Format::UNPAIRED + Format::SCALES));
                unpair<Format>(stored, count, room);
                codes = room;
            }
        }
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t row = rows * part / parts, some = rows * (part + 1) / parts - row;
            const uint8_t* ahead = stored + bytes + part * bytes / 2;
            float* sums = c + row * PANEL;
            if (paired)
                multiply_some<Format, true>(some, stored, first, count, call.rows, start + row, sums, 2, ahead);
            else {
                const int lines = part >= 2 ? 0 : Format::PAIRED ? 1 : 2;
                multiply_some<Format, !Format::PAIRED>(some, codes, first, count, call.rows, start + row, sums, lines, ahead);
            }
        }
    }
    finish_rows(call, panel, start, rows, c);
}

}  // namespace

void quantized_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows) {
    with_format(call.weight.format, [&](auto kind) {
        for (int64_t panel = first; panel < last; ++panel) panel_rows<decltype(kind)>(call, panel, start, rows);
    });
}

}  // namespace fovea

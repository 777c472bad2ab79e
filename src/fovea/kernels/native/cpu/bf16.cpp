// Products with a bf16 weight: y = x W^T, W (n, k) packed once, without loss. pack.cpp writes the layout.
//
// Layout. 64 outputs form a panel. A panel is a stream over pairs of k. Each pair holds 4 tiles of 16
// outputs, and a panel is read from front to back. Two tiles take 128 bytes plain, or 96 bytes packed: 64 bytes
// with mantissa and sign of every value, 32 bytes with a 4-bit code of every exponent. A weight uses few
// exponents. The 15 most frequent have the codes 1 to 15; code 0 is plus or minus zero. All other values are zero
// in the tiles and stand in a list of exceptions, whose products are added in float32. So packing loses nothing.
// It saves a quarter of the bytes, and the time of a single token is the time to read those bytes. (Lossless
// exponent coding of bf16 weights: DFloat11, arXiv 2504.11651. Here the codes have a fixed length, so that one
// instruction looks them up in a register.)
//
// Unpacking. From the highest bit on, a bf16 is sign, exponent, mantissa. Rotated left by one bit, it is a
// byte of exponent above a byte of mantissa and sign. So two tiles are 64 exponents from the table,
// interleaved with 64 loaded bytes and rotated right by one bit. The interleaving works within blocks of 16 bytes,
// so the layout is the same for vectors of 16, 32 and 64 bytes.
//
// Every output adds its products in the order of k, whatever the number of rows. So a row's result does not
// depend on the other rows of its step.

#include <vector>

#include "formats.h"
#include "packed.h"
#include "pages.h"

namespace fovea {

constexpr int SHALLOW = 64;  // pairs of k at a time, few rows: 16 KiB of tiles stay in L1 beside prefetches
constexpr int DEEP = 512;    // the same for many rows: 128 KiB in L2, so sums are seldom stored
constexpr int FEW = 36;      // at most this many rows count as few
constexpr int FAR = 6144;    // how many bytes ahead a single block of rows prefetches
// Rows that are multiplied with a whole panel while it is unpacked: their sums fit in registers beside the tiles.
constexpr int STREAMED = REGISTERS == 32 ? 24 / (PANEL / LANES) : 1;
constexpr int PANEL_VECTORS = PANEL / LANES;

// Values from one unpacked strip of `pairs` pairs to the next. A cache line lies between them: otherwise the strips of
// a panel would often begin 4 KiB apart, in the same set of the L1 cache.
constexpr int64_t strip_stride(int64_t pairs) { return STRIPS == 1 ? pairs * STRIP : pairs * STRIP + 16; }

namespace {

// The 16 exponents of the codes, repeated in each block of 16 bytes.
FOVEA_INLINE hn::Vec<Bytes> lookup(const uint8_t* table) { return table ? hn::LoadDup128(u8, table) : hn::Zero(u8); }

// The codes of vector v of the 64 values in two tiles.
FOVEA_INLINE hn::Vec<Bytes> codes_of(const uint8_t* codes, int v) {
    const auto low = hn::Set(u8, 15);
#if HWY_MAX_BYTES == 64
    (void)v;  // one vector has all of them: codes in the low halves of 32 bytes, then those in the high halves
    const hn::Half<Bytes> half;
    const auto both = hn::LoadU(half, codes);
    const hn::Repartition<uint16_t, hn::Half<Bytes>> words;
    const auto high = hn::BitCast(half, hn::ShiftRight<4>(hn::BitCast(words, both)));
    return hn::And(hn::Combine(u8, high, both), low);
#else
    const auto part = hn::LoadU(u8, codes + v * WIDTH % 32);
    if (v * WIDTH < 32) return hn::And(part, low);
    return hn::And(hn::BitCast(u8, hn::ShiftRight<4>(hn::BitCast(u16, part))), low);
#endif
}

// Unpacks one pair of k of a panel, and calls use(v, tile) for each vector v of it.
template <bool PACKED, class Use>
FOVEA_INLINE void unpack_pair(const uint8_t* at, hn::Vec<Bytes> table, const Use& use) {
    constexpr int EACH = TILE_LANES / LANES;  // vectors of a tile
    if constexpr (!PACKED) {
        for (int v = 0; v < PANEL_VECTORS; ++v) use(v, hn::LoadU(u32, reinterpret_cast<const uint32_t*>(at + v * WIDTH)));
        return;
    }
    for (int two = 0; two < TILES / 2; ++two, at += TWO_PACKED)
        for (int v = 0; v < EACH; ++v) {
            const auto rest = hn::LoadU(u8, at + v * WIDTH);
            const auto exponents = hn::TableLookupBytes(table, codes_of(at + 64, v));
            const auto left = hn::BitCast(u16, hn::InterleaveLower(u8, rest, exponents));
            use(2 * two * EACH + v, hn::BitCast(u32, hn::RotateRight<1>(left)));
            const auto right = hn::BitCast(u16, hn::InterleaveUpper(u8, rest, exponents));
            use((2 * two + 1) * EACH + v, hn::BitCast(u32, hn::RotateRight<1>(right)));
        }
}

#if !FOVEA_AMX

// Multiplies `rows` rows of x (at most R) with `pairs` pairs of a panel while they are unpacked: sums to c (rows,
// 64), added to it unless `fresh`. far: how many bytes ahead to prefetch. KEEP: the tiles are stored to `tiles` for
// other rows.
template <int R, bool PACKED, bool KEEP>
void stream_rows(int64_t rows, const uint8_t* panel, hn::Vec<Bytes> table, int64_t pairs, const Input* x, int64_t ldx,
                 float* c, bool fresh, uint32_t* tiles, int64_t far) {
    if constexpr (R > 1) {
        if (rows < R) return stream_rows<R - 1, PACKED, KEEP>(rows, panel, table, pairs, x, ldx, c, fresh, tiles, far);
    }
    constexpr int BYTES = 2 * (PACKED ? TWO_PACKED : TWO_PLAIN);
    const uint8_t* ahead = panel + far;
    Floats sums[R][PANEL_VECTORS];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < PANEL_VECTORS; ++v)
            sums[r][v] = fresh ? hn::Zero(f32) : hn::LoadU(f32, c + r * PANEL + v * LANES);
    for (int64_t pair = 0; pair < pairs; ++pair, panel += BYTES) {
        for (int line = 0; line < (KEEP ? 128 : BYTES); line += 64)
            KEEP ? prefetch_l2(ahead + pair * 128 + line) : prefetch(ahead + pair * BYTES + line);
#if FOVEA_BF16_DOT
        Unsigned tile[PANEL_VECTORS];
        unpack_pair<PACKED>(panel, table, [&](int v, Unsigned part) {
            tile[v] = part;
            if constexpr (KEEP) hn::Store(part, u32, tiles + pair * PANEL + v * LANES);
        });
        for (int r = 0; r < R; ++r) {
            const Unsigned both = pair_of(x + r * ldx, pair);
            for (int v = 0; v < PANEL_VECTORS; ++v) sums[r][v] = add_pairs(sums[r][v], both, tile[v]);
        }
#else
        static_assert(R == 1 && !KEEP);
        const Floats even = hn::Set(f32, x[2 * pair]), odd = hn::Set(f32, x[2 * pair + 1]);
        unpack_pair<PACKED>(panel, table, [&](int v, Unsigned part) {
            sums[0][v] = hn::MulAdd(odd, odd_of(part), hn::MulAdd(even, even_of(part), sums[0][v]));
        });
#endif
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < PANEL_VECTORS; ++v) hn::StoreU(sums[r][v], f32, c + r * PANEL + v * LANES);
}

#endif

// Unpacks `pairs` pairs of a panel into strips. Meanwhile the bytes `far` ahead are prefetched.
template <bool PACKED>
void unpack(const uint8_t* panel, hn::Vec<Bytes> table, int64_t pairs, uint32_t* strips, int64_t far) {
    constexpr int BYTES = 2 * (PACKED ? TWO_PACKED : TWO_PLAIN);
    for (int64_t pair = 0; pair < pairs; ++pair, panel += BYTES) {
        for (int line = 0; line < BYTES; line += 64) prefetch(panel + far + line);
        unpack_pair<PACKED>(panel, table, [&](int v, Unsigned part) {
            hn::Store(part, u32, strips + v / VECTORS * strip_stride(pairs) + pair * STRIP + v % VECTORS * LANES);
        });
    }
}

struct Scratch {
    std::vector<float> sums;
    std::vector<uint32_t> tiles;
};

// Adds the products of the exceptions to c (rows, 64), in float32.
void add_exceptions(const Call& call, int64_t panel, int64_t start, int64_t rows, float* c) {
    const Weight& w = call.weight;
    if (!w.table) return;
    for (int64_t at = w.starts[panel]; at < w.starts[panel + 1]; ++at) {
        const Exception& e = w.exceptions[at];
        for (int64_t r = 0; r < rows; ++r)
            c[r * PANEL + e.lane] += widen(call.x[(start + r) * call.ldx + e.k]) * widen(e.value);
    }
}

#if FOVEA_AMX

// Returns the tiles of `count` pairs of a panel as the registers load them: in place, or unpacked to `room`, with zeros up to
// a multiple of 16 pairs.
template <bool PACKED>
FOVEA_INLINE const void* matrix_tiles(const uint8_t* at, hn::Vec<Bytes> table, int64_t count, uint32_t* room) {
    const int64_t missing = padded_pairs(count) - count;
    if (!PACKED && !missing) return at;
    unpack<PACKED>(at, table, count, room, FAR);
    if (missing) std::memset(room + count * PANEL, 0, missing * 4 * PANEL);
    return room;
}

// Does the work of `bf16_panels`. Some pairs of k of a panel are unpacked at a time, and while the registers multiply them
// the next ones are fetched. Several panels are given if the rows do not fit in the L2 cache. Then all panels are multiplied
// with some pairs of the rows, which stay in L2, before the next pairs; partial sums are kept in memory.
template <bool PACKED>
void multiply_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows, Scratch& scratch) {
    const Weight& w = call.weight;
    constexpr int64_t bytes = 2 * (PACKED ? TWO_PACKED : TWO_PLAIN), apart = MATRIX_BYTES * MATRIX_ROWS;
    const int64_t pairs = w.k / 2, all = padded_pairs(pairs);
    const int64_t size = (rows + MATRIX_ROWS - 1) / MATRIX_ROWS * MATRIX_ROWS * PANEL;
    float* c = fit_aligned(scratch.sums, (last - first) * size);
    uint32_t* tiles = fit_aligned(scratch.tiles, DEEP * PANEL);
    const auto table = lookup(w.table);
    const auto finish = [&](int64_t panel, float* sums) {
        add_exceptions(call, panel, start, rows, sums);
        finish_rows(call, panel, start, rows, sums);
    };
    if (rows <= MATRIX_ROWS) {
        constexpr int64_t SLOTS = 4;  // places for tiles that are not multiplied yet
        for (int64_t panel = first; panel < last; ++panel) {
            const uint8_t* data = w.data + panel * pairs * bytes;
            const auto make = [&](int64_t k) {
                const int64_t from = k * MATRIX_PAIRS, count = std::min<int64_t>(MATRIX_PAIRS, pairs - from);
                return matrix_tiles<PACKED>(data + from * bytes, table, count, tiles + k % SLOTS * MATRIX_PAIRS * PANEL);
            };
            matrix_stream({call.inputs, MATRIX_BYTES, apart, 0}, make, all / MATRIX_PAIRS, c, PANEL);
            finish(panel, c);
        }
        return;
    }
    const int64_t whole = !PACKED && last - first == 1 ? pairs / MATRIX_PAIRS * MATRIX_PAIRS : 0;  // read in place
    const int64_t most = whole ? whole : rows <= FEW ? SHALLOW : DEEP;
    for (int64_t from = 0; from < pairs; from += most)
        for (int64_t panel = first; panel < last; ++panel) {
            const int64_t count = std::min(most, pairs - from);
            const uint8_t* at = w.data + (panel * pairs + from) * bytes;
            float* sums = c + (panel - first) * size;
            Ahead ahead{at + count * bytes, at + 2 * count * bytes};
            matrix_rows<false>(rows, {call.inputs + from * 2 * MATRIX_ROWS, MATRIX_BYTES, apart, 2 * call.input_stride},
                               matrix_tiles<PACKED>(at, table, count, tiles), padded_pairs(count) / MATRIX_PAIRS, sums, PANEL,
                               from == 0, ahead);
            if (from + count == pairs) finish(panel, sums);
        }
}

#else

// Multiplies rows [start, start + rows) with one panel, in blocks of about equal size, and some pairs of k at a
// time: they are unpacked once, and meanwhile the first blocks prefetch the next ones.
template <bool PACKED>
void panel_rows(const Call& call, int64_t panel, int64_t start, int64_t rows, Scratch& scratch) {
    const Weight& w = call.weight;
    constexpr int64_t bytes = 2 * (PACKED ? TWO_PACKED : TWO_PLAIN);
    const int64_t pairs = w.k / 2, ldx = call.input_stride;
    const uint8_t* data = w.data + panel * pairs * bytes;
    const auto table = lookup(w.table);
    const Input* x = call.inputs + start * ldx;
    float* c = fit(scratch.sums, rows * PANEL);
    if (rows <= STREAMED) {
        stream_rows<STREAMED, PACKED, false>(rows, data, table, pairs, x, ldx, c, true, nullptr, FAR);
        add_exceptions(call, panel, start, rows, c);
        return finish_rows(call, panel, start, rows, c);
    }
    uint32_t* tiles = fit_aligned(scratch.tiles, STRIPS * strip_stride(DEEP));
    const int64_t most = rows <= FEW ? SHALLOW : DEEP;
    const int64_t steps = (pairs + most - 1) / most, depth = (pairs + steps - 1) / steps;
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t from = 0; from < pairs; from += depth) {
        const int64_t count = std::min(depth, pairs - from);
        const bool last = from + count == pairs;
        const uint8_t *at = data + from * bytes, *next = at + count * bytes;
        if constexpr (STRIPS > 1) unpack<PACKED>(at, table, count, tiles, 0);
        for (int64_t block = 0, line = STRIPS == 1 ? 128 : 0; block < blocks; ++block) {
            const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
            const Input* in = x + row * ldx + 2 * from;
            float* sums = c + row * PANEL;
            if constexpr (STRIPS == 1) {
                if (block == 0)
                    stream_rows<ROWS, PACKED, true>(some, at, table, count, in, ldx, sums, from == 0, tiles, count * bytes);
            }
            for (int s = 0; s < STRIPS && (STRIPS > 1 || block > 0); ++s, line += 64)
                block_rows<ROWS>(some, tiles + s * strip_stride(count), count, in, ldx, sums + s * STRIP, PANEL, from == 0,
                                 line < bytes ? next + line * count : nullptr);
            if (!last) continue;
            add_exceptions(call, panel, start + row, some, sums);
            finish_rows(call, panel, start + row, some, sums);
        }
    }
}

template <bool PACKED>
void multiply_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows, Scratch& scratch) {
    for (int64_t panel = first; panel < last; ++panel) panel_rows<PACKED>(call, panel, start, rows, scratch);
}

#endif

}  // namespace

void bf16_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows) {
    thread_local Scratch scratch;
    if (call.weight.table)
        multiply_panels<true>(call, first, last, start, rows, scratch);
    else
        multiply_panels<false>(call, first, last, start, rows, scratch);
}

}  // namespace fovea

// Products with a bf16 weight: y = x W^T, W (n, k) packed once, without loss.
//
// Layout. 64 outputs form a panel. A panel is a stream over pairs of k. Each pair holds 4 tiles of 16
// outputs, so that one tile is one operand of VDPBF16PS and a panel is read from front to back. Two tiles
// take 128 bytes plain, or 96 bytes packed: 64 bytes with mantissa and sign of every value, 32 bytes with a
// 4-bit code of every exponent. A weight uses few exponents. The 15 most frequent have the codes 1 to 15;
// code 0 is plus or minus zero. All other values are zero in the tiles and stand in a list of exceptions,
// whose products are added in float32. So packing loses nothing. It saves a quarter of the bytes, and the
// time of a single token is the time to read those bytes. (Lossless exponent coding of bf16 weights:
// DFloat11, arXiv 2504.11651. Here the codes have a fixed length, so that one instruction looks them up in a
// register.)
//
// Unpacking. From the highest bit on, a bf16 is sign, exponent, mantissa. Rotated left by one bit, it is a
// byte of exponent above a byte of mantissa and sign. So two tiles are 64 exponents from the table,
// interleaved with 64 loaded bytes and rotated right by one bit: seven instructions. The interleaving works
// within lanes of 128 bits. The function `place` below says where that puts a value.
//
// Every output adds its products in the order of k, whatever the number of rows. So a row's result does not
// depend on the other rows of its step.

#include <cstring>
#include <vector>

#include "finish.h"
#include "formats.h"

namespace fovea {

constexpr int TWO_PACKED = 96, TWO_PLAIN = 128;  // bytes of two tiles
constexpr int SHALLOW = 64;  // pairs of k at a time, few rows: 16 KiB of tiles stay in L1 beside prefetches
constexpr int DEEP = 512;    // the same for many rows: 128 KiB in L2, so sums are seldom stored
constexpr int FEW = 36;      // at most this many rows count as few
constexpr int FAR = 6144;    // how many bytes ahead a single block of rows prefetches

namespace {

struct Two {
    __m512i left, right;
};

// The 16 exponents of the codes, repeated in each lane of 128 bits.
inline __m512i lookup(const uint8_t* table) {
    return table ? _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)))
                 : _mm512_setzero_si512();
}

// Two neighbouring tiles. index: number of the couple of tiles, counted from the start of the panel.
template <bool PACKED>
inline Two two_tiles(const uint8_t* panel, int64_t index, __m512i table) {
    if constexpr (!PACKED) {
        const uint8_t* at = panel + index * TWO_PLAIN;
        return {_mm512_loadu_si512(at), _mm512_loadu_si512(at + 64)};
    }
    const uint8_t* at = panel + index * TWO_PACKED;
    const __m512i rest = _mm512_loadu_si512(at);
    const __m512i both =
        _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 64)));
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi16(both, shift), _mm512_set1_epi8(15));
    const __m512i exponents = _mm512_shuffle_epi8(table, codes);
    const __m512i low = _mm512_unpacklo_epi8(rest, exponents), high = _mm512_unpackhi_epi8(rest, exponents);
    return {_mm512_shrdi_epi16(low, low, 1), _mm512_shrdi_epi16(high, high, 1)};
}

// Which of the 64 bytes of two tiles belongs to output `lane` of tile 0 or 1. side: 0 for even k, 1 for odd.
inline int place(int tile, int lane, int side) {
    const int word = 2 * lane + side;
    return 16 * (word / 8) + 8 * tile + word % 8;
}

// Adds rows of x (at most R) times `pairs` pairs of a panel to c (rows, 64), or overwrites c if fresh. Tiles
// are unpacked as they are read, because unpacking overlaps with the products. tiles: where the unpacked
// tiles are stored for other rows (KEEP), or null. far: how many bytes ahead to prefetch.
template <int R, bool PACKED, bool KEEP>
void stream_rows(int64_t rows, const uint8_t* panel, __m512i table, int64_t pairs, const bf16* x, int64_t ldx, float* c,
                 bool fresh, uint8_t* tiles, int64_t far) {
    if constexpr (R > 1) {
        if (rows < R) return stream_rows<R - 1, PACKED, KEEP>(rows, panel, table, pairs, x, ldx, c, fresh, tiles, far);
    }
    constexpr int bytes = 2 * (PACKED ? TWO_PACKED : TWO_PLAIN), lines = KEEP ? 2 : bytes / 64;
    const uint8_t* ahead = panel + far;
    __m512 sums[R][TILES];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < TILES; ++t)
            sums[r][t] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * PANEL + t * LANES);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        for (int line = 0; line < lines; ++line)
            _mm_prefetch(reinterpret_cast<const char*>(ahead + (pair * lines + line) * 64), KEEP ? _MM_HINT_T1 : _MM_HINT_T0);
        __m512i tile[TILES];
        for (int t = 0; t < TILES; t += 2) {
            const Two two = two_tiles<PACKED>(panel, pair * TILES / 2 + t / 2, table);
            tile[t] = two.left;
            tile[t + 1] = two.right;
        }
        if constexpr (KEEP)
            for (int t = 0; t < TILES; ++t) _mm512_store_si512(tiles + (pair * TILES + t) * TILE_PLAIN, tile[t]);
        for (int r = 0; r < R; ++r) {
            const __m512i both = pair_of(x + r * ldx, pair);
            for (int t = 0; t < TILES; ++t)
                sums[r][t] = _mm512_dpbf16_ps(sums[r][t], (__m512bh)both, (__m512bh)tile[t]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < TILES; ++t) _mm512_storeu_ps(c + r * PANEL + t * LANES, sums[r][t]);
}

struct Scratch {
    std::vector<float> sums;
    std::vector<uint8_t> tiles;

    uint8_t* aligned() {
        if (tiles.empty()) tiles.resize(DEEP * TILES * TILE_PLAIN + 64);
        return tiles.data() + (64 - reinterpret_cast<uintptr_t>(tiles.data()) % 64) % 64;
    }
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

// Multiplies rows [start, start + rows) with one panel, in blocks of about equal size. The first block
// unpacks the stream while it multiplies, and stores the tiles for the other blocks. The first two blocks
// prefetch the next part of the stream.
template <bool PACKED>
void panel_rows(const Call& call, int64_t panel, int64_t start, int64_t rows, Scratch& scratch) {
    const Weight& w = call.weight;
    constexpr int64_t bytes = 2 * (PACKED ? TWO_PACKED : TWO_PLAIN);
    const int64_t pairs = w.k / 2, ldx = call.ldx;
    const uint8_t* data = w.data + panel * pairs * bytes;
    const __m512i table = lookup(w.table);
    const bf16* x = call.x + start * ldx;
    if (static_cast<int64_t>(scratch.sums.size()) < rows * PANEL) scratch.sums.resize(rows * PANEL);
    float* c = scratch.sums.data();
    if (rows <= ROWS) {
        stream_rows<ROWS, PACKED, false>(rows, data, table, pairs, x, ldx, c, true, nullptr, FAR);
        add_exceptions(call, panel, start, rows, c);
        return finish_rows(call, panel, start, rows, c);
    }
    uint8_t* tiles = scratch.aligned();
    const int64_t most = rows <= FEW ? SHALLOW : DEEP;
    const int64_t steps = (pairs + most - 1) / most, depth = (pairs + steps - 1) / steps;
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t from = 0; from < pairs; from += depth) {
        const int64_t count = std::min(depth, pairs - from);
        const bool last = from + count == pairs;
        const uint8_t* at = data + from * bytes;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
            const bf16* in = x + row * ldx + 2 * from;
            float* sums = c + row * PANEL;
            if (block == 0)
                stream_rows<ROWS, PACKED, true>(some, at, table, count, in, ldx, sums, from == 0, tiles, count * bytes);
            else
                block_rows<ROWS>(some, tiles, count, in, ldx, sums, PANEL, from == 0,
                                 block == 1 ? at + count * (bytes + 128) : nullptr);
            if (!last) continue;
            add_exceptions(call, panel, start + row, some, sums);
            finish_rows(call, panel, start + row, some, sums);
        }
    }
}

}  // namespace

void bf16_panel(const Call& call, int64_t panel, int64_t start, int64_t rows) {
    thread_local Scratch scratch;
    if (call.weight.table)
        panel_rows<true>(call, panel, start, rows, scratch);
    else
        panel_rows<false>(call, panel, start, rows, scratch);
}

void bf16_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out) {
    const int64_t pairs = w.k / 2;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t panel = ids[i] / PANEL;
        const int tile = static_cast<int>(ids[i] % PANEL / LANES), lane = static_cast<int>(ids[i] % LANES);
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t two = ((panel * pairs + pair) * TILES + tile) / 2;
            bf16* to = out + i * w.k + 2 * pair;
            if (!w.table) {
                std::memcpy(to, w.data + two * TWO_PLAIN + tile % 2 * 64 + 4 * lane, 4);
                continue;
            }
            for (int side = 0; side < 2; ++side) {
                const uint8_t* from = w.data + two * TWO_PACKED;
                const int at = place(tile % 2, lane, side);
                const uint8_t rest = from[at], code = from[64 + at % 32] >> (at / 32 * 4) & 15;
                to[side] = static_cast<bf16>(rest << 15 | w.table[code] << 7 | rest >> 1);
            }
        }
        if (!w.table) continue;
        for (int64_t at = w.starts[panel]; at < w.starts[panel + 1]; ++at)
            if (w.exceptions[at].lane == ids[i] % PANEL) out[i * w.k + w.exceptions[at].k] = w.exceptions[at].value;
    }
}

}  // namespace fovea

using namespace fovea;

extern "C" {

// Counts how often each exponent (0..255) occurs among n values. counts (256) is set to zero first.
void fovea_exponents(const bf16* values, int64_t n, int64_t* counts) {
    std::memset(counts, 0, 256 * sizeof(int64_t));
    for (int64_t i = 0; i < n; ++i) ++counts[(values[i] >> 7) & 0xFF];
}

// Packs the rows of a weight (n, k) into data. order (panels * 64): the row that each output has, -1 for
// padding. code_of (256): code of each exponent, 0 for none; null: plain tiles. found (panels): receives the
// number of exceptions of each panel. starts: see `Weight`. exceptions: room for them, or null in a first
// pass that only counts.
void fovea_pack(const bf16* weight, int64_t k, const int64_t* order, int64_t panels, const uint8_t* code_of,
                uint8_t* data, int64_t* found, const int64_t* starts, Exception* exceptions, int threads) {
    const int64_t pairs = k / 2;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel) {
        int64_t count = 0;
        for (int64_t pair = 0; pair < pairs; ++pair)
            for (int t = 0; t < TILES; ++t) {
                const int64_t two = ((panel * pairs + pair) * TILES + t) / 2;
                if (code_of && t % 2 == 0) std::memset(data + two * TWO_PACKED, 0, TWO_PACKED);
                for (int lane = 0; lane < LANES; ++lane) {
                    const int64_t row = order[panel * PANEL + t * LANES + lane];
                    bf16 both[2] = {0, 0};
                    if (row >= 0) std::memcpy(both, weight + row * k + 2 * pair, 4);
                    if (!code_of) {
                        std::memcpy(data + two * TWO_PLAIN + t % 2 * 64 + 4 * lane, both, 4);
                        continue;
                    }
                    for (int side = 0; side < 2; ++side) {
                        const bf16 value = both[side];
                        const uint8_t code = code_of[(value >> 7) & 0xFF];
                        const int at = place(t % 2, lane, side);
                        if (code == 0 && (value & 0x7FFF) != 0) {
                            if (exceptions)
                                exceptions[starts[panel] + count] = {static_cast<uint32_t>(2 * pair + side),
                                                                     static_cast<uint16_t>(t * LANES + lane), value};
                            ++count;
                            continue;
                        }
                        data[two * TWO_PACKED + at] = static_cast<uint8_t>(value << 1 | value >> 15);
                        data[two * TWO_PACKED + 64 + at % 32] |= static_cast<uint8_t>(code << (at / 32 * 4));
                    }
                }
            }
        found[panel] = count;
    }
}

}  // extern "C"

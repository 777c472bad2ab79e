// Packs bf16 weights, and reads rows of packed ones. The layout is described in bf16.cpp.

#include "formats.h"
#include "packed.h"
#include "team.h"

namespace fovea {

void bf16_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out) {
    const int64_t pairs = w.k / 2;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t panel = ids[i] / PANEL;
        const int tile = static_cast<int>(ids[i] % PANEL / TILE_LANES), lane = static_cast<int>(ids[i] % TILE_LANES);
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t two = ((panel * pairs + pair) * TILES + tile) / 2;
            bf16* to = out + i * w.k + 2 * pair;
            if (!w.table) {
                std::memcpy(to, w.data + two * TWO_PLAIN + tile % 2 * 64 + 4 * lane, 4);
                continue;
            }
            for (int side = 0; side < 2; ++side) {
                const uint8_t* from = w.data + two * TWO_PACKED;
                const int at = byte_of(tile % 2, lane, side);
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
    parallel(threads, panels, 1, [&](int64_t panel) {
        int64_t count = 0;
        for (int64_t pair = 0; pair < pairs; ++pair)
            for (int t = 0; t < TILES; ++t) {
                const int64_t two = ((panel * pairs + pair) * TILES + t) / 2;
                if (code_of && t % 2 == 0) std::memset(data + two * TWO_PACKED, 0, TWO_PACKED);
                for (int lane = 0; lane < TILE_LANES; ++lane) {
                    const int64_t row = order[panel * PANEL + t * TILE_LANES + lane];
                    bf16 both[2] = {0, 0};
                    if (row >= 0) std::memcpy(both, weight + row * k + 2 * pair, 4);
                    if (!code_of) {
                        std::memcpy(data + two * TWO_PLAIN + t % 2 * 64 + 4 * lane, both, 4);
                        continue;
                    }
                    for (int side = 0; side < 2; ++side) {
                        const bf16 value = both[side];
                        const uint8_t code = code_of[(value >> 7) & 0xFF];
                        const int at = byte_of(t % 2, lane, side);
                        if (code == 0 && (value & 0x7FFF) != 0) {
                            if (exceptions)
                                exceptions[starts[panel] + count] = {static_cast<uint32_t>(2 * pair + side),
                                                                     static_cast<uint16_t>(t * TILE_LANES + lane), value};
                            ++count;
                            continue;
                        }
                        data[two * TWO_PACKED + at] = static_cast<uint8_t>(value << 1 | value >> 15);
                        data[two * TWO_PACKED + 64 + at % 32] |= static_cast<uint8_t>(code << (at / 32 * 4));
                    }
                }
            }
        found[panel] = count;
    });
}

}  // extern "C"

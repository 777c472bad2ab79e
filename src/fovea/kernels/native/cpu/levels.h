// What a quantized weight and a quantized row are made of. The torch twin is in quantize.py.
#pragma once

#include "tiles.h"

namespace fovea {

// Layout of a format. A panel is a stream of groups: `GROUP` of k by 64 outputs, then 64 bf16 scales. Levels are
// unsigned with zero at 128, as VPDPBUSD wants its first operand; a quad is 4 of k, one operand by 16 outputs.
struct Int8 {
    static constexpr bool CODED = false;
    static constexpr int GROUP = 128, QUADS = GROUP / 4, LEVELS = QUADS * 256, BYTES = LEVELS + 2 * PANEL;
};

// Codes of 4 bits, each the name of one of 16 levels; even quads in the low halves of the bytes, odd ones in the high.
struct Int4 {
    static constexpr bool CODED = true;
    static constexpr int GROUP = 64, QUADS = GROUP / 4, LEVELS = QUADS * 128, BYTES = LEVELS + 2 * PANEL;
};

// int4's levels: least squares for normal weights (Lloyd's iteration) whose group is scaled so that its largest
// magnitude is -127, with an exact zero. Plus 128, in the order of their codes.
alignas(16) constexpr uint8_t INT4_LEVELS[16] = {1,   29,  51,  67,  82,  95,  107, 118,
                                                 128, 141, 152, 165, 178, 193, 211, 235};

inline __m512i lookup4() {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(INT4_LEVELS)));
}

// Rows of x in 8 bits, a scale per group of k: x is about scale * level. start: -128 times the sum of a group's levels,
// which takes back that a weight's levels stand 128 too high.
struct LevelRows {
    int8_t* levels;  // rows * groups * GROUP
    float* scale;    // rows * groups
    int32_t* start;
    int64_t groups;
};

}  // namespace fovea

// Layouts of a quantized weight and of quantized rows. The twin in torch is fovea/kernels/quantize.py.
#pragma once

#include "tiles.h"

namespace fovea {

// The layout of a format. A panel is a stream of groups. A group holds the levels of `GROUP` values of k for
// each of 64 outputs, then 64 scales in bf16. Levels are unsigned bytes with zero at 128, because VPDPBUSD
// takes an unsigned first operand. A quad is 4 values of k: the quads of 16 outputs are one operand.
struct Int8 {
    static constexpr bool CODED = false;
    static constexpr int GROUP = 128, QUADS = GROUP / 4, LEVELS = QUADS * 256, BYTES = LEVELS + 2 * PANEL;
};

// Codes of 4 bits, each of which stands for one of 16 levels. The low halves of the bytes hold even quads,
// the high halves odd ones.
struct Int4 {
    static constexpr bool CODED = true;
    static constexpr int GROUP = 64, QUADS = GROUP / 4, LEVELS = QUADS * 128, BYTES = LEVELS + 2 * PANEL;
};

// The 16 levels of int4, plus 128, in the order of their codes. They minimise the squared error of normally
// distributed weights (Lloyd's iteration) whose group is scaled so that its largest magnitude becomes -127.
// Zero is one of them.
alignas(16) constexpr uint8_t INT4_LEVELS[16] = {1,   29,  51,  67,  82,  95,  107, 118,
                                                 128, 141, 152, 165, 178, 193, 211, 235};

inline __m512i lookup4() {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(INT4_LEVELS)));
}

// Rows of x in 8 bits with a scale per group of k: x is about scale * level. start: -128 times the sum of a
// group's levels. The sums of a product begin with it, because it corrects for the 128 in each level of the
// weight.
struct LevelRows {
    int8_t* levels;  // rows * groups * GROUP
    float* scale;    // rows * groups
    int32_t* start;  // rows * groups
    int64_t groups;
};

}  // namespace fovea

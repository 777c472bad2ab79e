// The layout of a packed bf16 weight. bf16.cpp describes it.
#pragma once

#include "kernels.h"
#include "tiles.h"

namespace fovea {

constexpr int TWO_PACKED = 96, TWO_PLAIN = 128;  // bytes of two tiles

// Which of the 64 bytes of two tiles belongs to output `lane` of tile 0 or 1. side: 0 for even k, 1 for odd.
inline int byte_of(int tile, int lane, int side) {
    const int word = 2 * lane + side;
    return 16 * (word / 8) + 8 * tile + word % 8;
}

}  // namespace fovea

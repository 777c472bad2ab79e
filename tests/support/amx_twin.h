// The operations of AMX as plain functions, so that the kernels for it are tested on every machine. The order of additions
// is that of the processor, see amx.h. Subnormal numbers are zero because MatrixScope sets it for the thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace fovea::twin {

struct alignas(64) Register {
    uint8_t rows[16][64];
};
inline thread_local Register registers[8];

inline void zero(int tile) { std::memset(&registers[tile], 0, sizeof(Register)); }
inline void load(int tile, const void* at, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(registers[tile].rows[row], static_cast<const uint8_t*>(at) + row * stride, 64);
}
inline void store(int tile, void* at, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<uint8_t*>(at) + row * stride, registers[tile].rows[row], 64);
}

inline void multiply_bf16(int sums, int rows, int tile) {
    const auto value = [](const uint8_t* pair, int side) {
        uint32_t both, bits;
        std::memcpy(&both, pair, 4);
        bits = side ? both & 0xFFFF0000u : both << 16;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    };
    for (int row = 0; row < 16; ++row) {
        float even[16] = {}, odd[16] = {}, total[16];
        for (int pair = 0; pair < 16; ++pair) {
            const uint8_t* left = registers[rows].rows[row] + 4 * pair;
            const float first = value(left, 0), second = value(left, 1);
            for (int output = 0; output < 16; ++output) {
                const uint8_t* right = registers[tile].rows[pair] + 4 * output;
                even[output] = std::fma(first, value(right, 0), even[output]);
                odd[output] = std::fma(second, value(right, 1), odd[output]);
            }
        }
        std::memcpy(total, registers[sums].rows[row], 64);
        for (int output = 0; output < 16; ++output) total[output] += even[output] + odd[output];
        std::memcpy(registers[sums].rows[row], total, 64);
    }
}

inline void multiply_bytes(int sums, int rows, int tile) {
    for (int row = 0; row < 16; ++row) {
        int32_t total[16];
        std::memcpy(total, registers[sums].rows[row], 64);
        for (int quad = 0; quad < 16; ++quad)
            for (int output = 0; output < 16; ++output)
                for (int byte = 0; byte < 4; ++byte)
                    total[output] += static_cast<int8_t>(registers[rows].rows[row][4 * quad + byte]) *
                                     static_cast<int32_t>(registers[tile].rows[quad][4 * output + byte]);
        std::memcpy(registers[sums].rows[row], total, 64);
    }
}

}  // namespace fovea::twin

#define TILE_ZERO(tile) fovea::twin::zero(tile)
#define TILE_LOAD(tile, at, stride) fovea::twin::load(tile, at, stride)
#define TILE_STORE(tile, at, stride) fovea::twin::store(tile, at, stride)
#define TILE_BF16(sums, rows, tile) fovea::twin::multiply_bf16(sums, rows, tile)
#define TILE_BYTES(sums, rows, tile) fovea::twin::multiply_bytes(sums, rows, tile)
#define TILE_CONFIGURE(config) (void)(config)
#define TILE_RELEASE()

// The functions that each format of weights provides for a product.
#pragma once

#include <vector>

#include "finish.h"

namespace fovea {

// Multiplies rows [start, start + rows) with panels [first, last) of the weight, finishes and stores them (finish.h).
void bf16_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows);
void quantized_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows);

// out[i] = row ids[i] of a weight whose outputs are in their own order (not gated); out (count, k).
void bf16_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out);
void quantized_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out);

// The rows of x for products with a quantized format: `count` rows of k values in `room`, which grows. Threads share the work.
struct LevelRoom {
    std::vector<uint8_t> levels;
    std::vector<float> scale;
    std::vector<int32_t> sum;
};
LevelRows quantize_rows(const bf16* x, int64_t ldx, int64_t count, int64_t k, int64_t format, LevelRoom& room, int threads);

}  // namespace fovea

// The functions that each format of weights provides for a product.
#pragma once

#include "finish.h"

namespace fovea {

// Multiplies rows [start, start + rows) with panels [first, last) of the weight, finishes and stores them (finish.h).
void bf16_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows);
void quantized_panels(const Call& call, int64_t first, int64_t last, int64_t start, int64_t rows);

// out[i] = row ids[i] of a weight whose outputs are in their own order (not gated); out (count, k).
void bf16_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out);
void quantized_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out);

// Values of k in a group of a quantized format.
int64_t group_size(int64_t format);

// Quantizes one row of x (k values) into row `row` of `rows`, whose groups have `group` values.
void quantize_row(const bf16* x, int64_t k, int64_t group, int64_t row, const LevelRows& rows);

}  // namespace fovea

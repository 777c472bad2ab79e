// What each format of weights brings to a product.
#pragma once

#include "finish.h"

namespace fovea {

// Rows [start, start + rows) times one panel of the weight, finished.
void bf16_panel(const Call& call, int64_t panel, int64_t start, int64_t rows);
void quantized_panel(const Call& call, int64_t panel, int64_t start, int64_t rows);

// out[i] = row ids[i] of a weight that was packed without an order; out (count, k).
void bf16_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out);
void quantized_rows(const Weight& w, const int64_t* ids, int64_t count, bf16* out);

int64_t group_size(int64_t format);

// One row of x (k values) to its place in `rows`, whose groups are of `group` values.
void quantize_row(const bf16* x, int64_t k, int64_t group, int64_t row, const LevelRows& rows);

}  // namespace fovea

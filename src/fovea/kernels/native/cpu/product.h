// Products of rows with weights, for the files that multiply several weights in one call.
#pragma once

#include "formats.h"

namespace fovea {

// Rows [start, start + rows) of x, which are multiplied with one weight.
struct RowRange {
    const Weight* weight;
    int64_t start, rows;
};

// Outputs of a weight after an `Activation`, which may be gated.
inline int64_t width_of(const Weight& w, int kind) { return kind >= SILU_GATED && kind <= GELU_GATED ? w.n / 2 : w.n; }

// out (rows, n) = activation(x W^T + bias) [+ residual] for x (rows, k; `ldx` values from row to row). Each range of
// the rows has a weight of its own. There is at least one range, and all weights have one shape and one format.
// ldo: values from row to row of out and residual.
void multiply(const RowRange* ranges, int64_t count, const bf16* x, int64_t ldx, int64_t rows, int kind,
              const bf16* residual, bf16* out, int64_t ldo, int threads);

}  // namespace fovea

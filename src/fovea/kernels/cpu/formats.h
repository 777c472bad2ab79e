// What each format of weights brings to a product.
#pragma once

#include "finish.h"

namespace fovea {

// Rows [start, start + rows) times one panel of the weight, finished.
void bf16_panel(const Call& call, int64_t panel, int64_t start, int64_t rows);

}  // namespace fovea

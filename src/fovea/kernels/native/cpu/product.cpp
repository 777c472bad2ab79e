// Products with a constant weight: y = x W^T, W (n, k) packed once into panels of 64 outputs. This file
// distributes the panels among threads. bf16.cpp and quantized.cpp multiply one panel of their format.
//
// Every output adds its products in the order of k, whatever the number of rows. So a row's result does not
// depend on the other rows of its step.

#include <vector>

#include "formats.h"

namespace fovea {
namespace {

// Memory for the rows of x in 8 bits. It belongs to the calling thread.
struct Buffer {
    std::vector<int8_t> levels;
    std::vector<float> scale;
    std::vector<int32_t> start;

    LevelRows rows(int64_t count, int64_t k, int64_t group) {
        const int64_t groups = (k + group - 1) / group;
        levels.resize(std::max<size_t>(levels.size(), count * groups * group));
        scale.resize(std::max<size_t>(scale.size(), count * groups));
        start.resize(scale.size());
        return {levels.data(), scale.data(), start.data(), groups};
    }
};

}  // namespace
}  // namespace fovea

using namespace fovea;

extern "C" {

// out (rows, n) = activation(x (rows, k) W^T + bias) [+ residual (rows, n)]. ldx: values between rows of x.
// kind: an `Activation`. A gated activation halves the n of out and residual.
void fovea_product(const Weight* w, const bf16* x, int64_t ldx, int64_t rows, int kind, const bf16* residual,
                   bf16* out, int threads) {
    thread_local Buffer buffer;
    Call call{*w, x, ldx, kind, residual, out, {}};
    const bool quantized = w->format != BF16;
    const auto multiply = quantized ? quantized_panel : bf16_panel;
    const int64_t group = group_size(w->format);
    if (quantized) call.rows = buffer.rows(rows, w->k, group);
    const int64_t panels = (w->n + PANEL - 1) / PANEL;
    // If there are few panels and many rows, cut the rows too, so that every thread has work.
    int64_t cuts = 1;
    if (rows > 192) cuts = std::max<int64_t>(1, std::min<int64_t>(4 * threads / panels, rows / 96));
    const int64_t share = ((rows + cuts - 1) / cuts + ROWS - 1) / ROWS * ROWS;
    // One row is quantized here: it is not worth a barrier between the threads.
    if (quantized && rows == 1) quantize_row(x, w->k, group, 0, call.rows);
#pragma omp parallel num_threads(threads)
    {
        if (quantized && rows > 1) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) quantize_row(x + row * ldx, w->k, group, row, call.rows);
        }
        // Static: each thread reads one contiguous part of the weight from front to back. With few rows, the
        // time of a product is the time to read the weight.
#pragma omp for schedule(static) collapse(2)
        for (int64_t panel = 0; panel < panels; ++panel) {
            for (int64_t cut = 0; cut < cuts; ++cut) {
                const int64_t start = cut * share, count = std::min(share, rows - start);
                if (count > 0) multiply(call, panel, start, count);
            }
        }
    }
}

// out[i] = row ids[i] of a weight that is not gated; out (count, k) bf16. Quantized weights are dequantized.
void fovea_rows(const Weight* w, const int64_t* ids, int64_t count, bf16* out) {
    (w->format == BF16 ? bf16_rows : quantized_rows)(*w, ids, count, out);
}

}  // extern "C"

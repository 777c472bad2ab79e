// Products with a weight that stands still: y = x W^T, W (n, k) packed once into panels of 64 outputs. How a panel is
// stored and multiplied is its format's business; here the panels are handed to threads.
//
// Every output adds its products in the order of k, whatever the number of rows, so that a row's result does not
// depend on who shares its step.

#include <vector>

#include "formats.h"

namespace fovea {
namespace {

// Room for the caller's rows in 8 bits.
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

// out (rows, n) = activation(x (rows, k) W^T + bias) [+ residual (rows, n)]; a gated activation halves n.
void fovea_product(const Weight* w, const bf16* x, int64_t ldx, int64_t rows, int kind, const bf16* residual,
                   bf16* out, int threads) {
    thread_local Buffer buffer;
    Call call{*w, x, ldx, kind, residual, out, {}};
    const bool quantized = w->format != BF16;
    const auto multiply = quantized ? quantized_panel : bf16_panel;
    const int64_t group = group_size(w->format);
    if (quantized) call.rows = buffer.rows(rows, w->k, group);
    const int64_t panels = (w->n + PANEL - 1) / PANEL;
    // Few panels and many rows: cut the rows too, so that every thread has work.
    int64_t cuts = 1;
    if (rows > 192) cuts = std::max<int64_t>(1, std::min<int64_t>(4 * threads / panels, rows / 96));
    const int64_t share = ((rows + cuts - 1) / cuts + ROWS - 1) / ROWS * ROWS;
    // One row is not worth waiting for each other.
    if (quantized && rows == 1) quantize_row(x, w->k, group, 0, call.rows);
#pragma omp parallel num_threads(threads)
    {
        if (quantized && rows > 1) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) quantize_row(x + row * ldx, w->k, group, row, call.rows);
        }
        // Static: each thread reads one stretch of memory from front to back, which is what few rows wait for.
#pragma omp for schedule(static) collapse(2)
        for (int64_t panel = 0; panel < panels; ++panel) {
            for (int64_t cut = 0; cut < cuts; ++cut) {
                const int64_t start = cut * share, count = std::min(share, rows - start);
                if (count > 0) multiply(call, panel, start, count);
            }
        }
    }
}

// out[i] = row ids[i] of a weight that was packed without an order, dequantized where it is quantized; out (count, k).
void fovea_rows(const Weight* w, const int64_t* ids, int64_t count, bf16* out) {
    (w->format == BF16 ? bf16_rows : quantized_rows)(*w, ids, count, out);
}

}  // extern "C"

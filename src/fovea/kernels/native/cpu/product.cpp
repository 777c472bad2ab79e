// Products with a constant weight: y = x W^T, W (n, k) packed once into panels of 64 outputs. This file
// distributes the panels among threads. bf16.cpp and quantized.cpp multiply one panel of their format.
//
// Every output adds its products in the order of k, whatever the number of rows. So a row's result does not
// depend on the other rows of its step.

#include "product.h"

#include <vector>

#include "pages.h"
#include "team.h"

namespace fovea {
namespace {

// Memory for the rows of x as the kernels multiply them. It belongs to the calling thread.
struct Buffer {
    std::vector<Level> levels;
    std::vector<float> scale;
    std::vector<int32_t> start;
    std::vector<Input> inputs;

    LevelRows rows(int64_t count, int64_t k, int64_t group) {
        const int64_t groups = (k + group - 1) / group;
        return {grown(levels, count * groups * group), grown(scale, count * groups), grown(start, count * groups), groups};
    }
};

}  // namespace

void multiply(const Share* shares, int64_t count, const bf16* x, int64_t ldx, int64_t rows, int kind,
              const bf16* residual, bf16* out, int threads) {
    thread_local Buffer buffer;
    const Weight& w = *shares->weight;  // all weights have its shape and format
    const bool quantized = w.format != BF16;
    const Input* inputs = nullptr;
    int64_t input_stride = ldx;
    LevelRows levels{};
    if (quantized) {
        const int64_t group = group_size(w.format);
        levels = buffer.rows(rows, w.k, group);
        each_row(threads, rows, w.k, [&](int64_t row) { quantize_row(x + row * ldx, w.k, group, row, levels); });
    } else if constexpr (FOVEA_BF16_DOT) {
        inputs = reinterpret_cast<const Input*>(x);
    } else {
        Input* wide = grown(buffer.inputs, rows * w.k);
        inputs = wide, input_stride = w.k;
        each_row(threads, rows, w.k, [&](int64_t row) { to_inputs(x + row * ldx, w.k, wide + row * w.k); });
    }
    const int64_t panels = (w.n + PANEL - 1) / PANEL;
    const auto panel_rows = quantized ? quantized_panel : bf16_panel;
    parallel(threads, count * panels, 1, [&](int64_t task) {
        const Share& share = shares[task / panels];
        const Call call{*share.weight, x, ldx, kind, residual, out, inputs, input_stride, levels};
        panel_rows(call, task % panels, share.start, share.rows);
    });
}

}  // namespace fovea

using namespace fovea;

extern "C" {

// out (rows, n) = activation(x (rows, k) W^T + bias) [+ residual (rows, n)]. ldx: values between rows of x.
// kind: an `Activation`. A gated activation halves the n of out and residual.
void fovea_product(const Weight* w, const bf16* x, int64_t ldx, int64_t rows, int kind, const bf16* residual,
                   bf16* out, int threads) {
    // If there are few panels and many rows, cut the rows, so that every thread has work.
    const int64_t panels = (w->n + PANEL - 1) / PANEL;
    int64_t cuts = 1;
    if (rows > 192) cuts = std::max<int64_t>(1, std::min<int64_t>(4 * threads / panels, rows / 96));
    const int64_t size = ((rows + cuts - 1) / cuts + ROWS - 1) / ROWS * ROWS;
    thread_local std::vector<Share> shares;
    shares.clear();
    for (int64_t start = 0; start < rows; start += size) shares.push_back({w, start, std::min(size, rows - start)});
    if (rows > 0) multiply(shares.data(), static_cast<int64_t>(shares.size()), x, ldx, rows, kind, residual, out, threads);
}

// out[i] = row ids[i] of a weight that is not gated; out (count, k) bf16. Quantized weights are dequantized.
void fovea_rows(const Weight* w, const int64_t* ids, int64_t count, bf16* out) {
    (w->format == BF16 ? bf16_rows : quantized_rows)(*w, ids, count, out);
}

}  // extern "C"

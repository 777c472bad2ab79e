// Products with a constant weight: y = x W^T, W (n, k) packed once into panels of 64 outputs. This file
// distributes the panels among threads. bf16.cpp and quantized.cpp multiply one panel of their format.
//
// Every output adds its products in the order of k, whatever the number of rows. So a row's result does not
// depend on the other rows of its step.

#include "product.h"

#include <algorithm>
#include <vector>

#include "pages.h"
#include "team.h"

namespace fovea {
namespace {

// With AMX, a product of more than MOST_ROWS rows is divided, so that each part stays in the L2 cache. A part of more than
// LARGE bytes does not, so one thread multiplies several panels at a time.
constexpr int64_t MOST_ROWS = 320, LARGE = 1 << 20;

// Memory for the rows of x as the kernels multiply them. It belongs to the calling thread.
struct Buffer {
    LevelRoom levels;
    std::vector<Input> inputs;
    std::vector<int64_t> blocks;  // the first block of each range
};

#if FOVEA_AMX
// Writes a row to its place in a block of 16 rows: 16 pairs of k, and the next ones a block of 16 x 64 bytes later.
inline void to_blocks(const bf16* row, int64_t k, bf16* to) {
    for (; k > 0; k -= 32, row += 32, to += 32 * MATRIX_ROWS) {
        if (k < 32) std::memset(to, 0, 64);
        std::memcpy(to, row, 2 * std::min<int64_t>(k, 32));
    }
}
#endif

}  // namespace

void multiply(const RowRange* ranges, int64_t count, const bf16* x, int64_t ldx, int64_t rows, int kind,
              const bf16* residual, bf16* out, int64_t ldo, int threads) {
    thread_local Buffer buffer;
    const Weight& w = *ranges->weight;  // all weights have its shape and format
    const bool quantized = w.format != BF16;
    const Input* inputs = nullptr;
    int64_t input_stride = ldx;
    LevelRows levels{};
    const int64_t* first_blocks = nullptr;
    if (quantized) {
        levels = quantize_rows(x, ldx, rows, w.k, w.format, buffer.levels, threads);
#if FOVEA_AMX
    } else {
        // Blocks of 16 rows, which begin again with each range.
        input_stride = MATRIX_ROWS * 2 * padded_pairs(w.k / 2);
        int64_t* blocks = grown(buffer.blocks, count + 1);
        blocks[0] = 0;
        for (int64_t s = 0; s < count; ++s) blocks[s + 1] = blocks[s] + (ranges[s].rows + MATRIX_ROWS - 1) / MATRIX_ROWS;
        first_blocks = blocks;
        Input* room = grown_aligned(buffer.inputs, blocks[count] * input_stride);
        inputs = room;
        each_row(threads, rows, w.k, [&](int64_t row) {
            const auto begins_behind = [](int64_t at, const RowRange& range) { return at < range.start; };
            const RowRange* range = std::upper_bound(ranges, ranges + count, row, begins_behind) - 1;
            const int64_t at = row - range->start, block = blocks[range - ranges] + at / MATRIX_ROWS;
            to_blocks(x + row * ldx, w.k, room + block * input_stride + at % MATRIX_ROWS * 32);
        });
    }
#else
    } else if constexpr (FOVEA_BF16_DOT) {
        inputs = reinterpret_cast<const Input*>(x);
    } else {
        Input* wide = grown(buffer.inputs, rows * w.k);
        inputs = wide, input_stride = w.k;
        each_row(threads, rows, w.k, [&](int64_t row) { to_inputs(x + row * ldx, w.k, wide + row * w.k); });
    }
#endif
    const int64_t panels = (w.n + PANEL - 1) / PANEL;
    // Panels that one thread multiplies together.
    const bool large = FOVEA_AMX && !quantized && 2 * ranges->rows * w.k > LARGE;
    const int64_t group = large ? std::max<int64_t>(1, std::min<int64_t>(8, count * panels / threads)) : 1;
    const int64_t groups = (panels + group - 1) / group;
    const auto multiply_panels = quantized ? quantized_panels : bf16_panels;
    parallel<TileScope>(threads, count * groups, 1, [&](int64_t task) {
        const RowRange& range = ranges[task / groups];
        const int64_t first = task % groups * group;
        const Input* in = first_blocks ? inputs + first_blocks[task / groups] * input_stride : inputs;
        const Call call{*range.weight, x, ldx, kind, residual, out, ldo, in, input_stride, levels};
        multiply_panels(call, first, std::min(panels, first + group), range.start, range.rows);
    });
}

}  // namespace fovea

using namespace fovea;

extern "C" {

// out (rows, n) = activation(x (rows, k) W^T + bias) [+ residual (rows, n)]. ldx: values between rows of x.
// kind: an `Activation`. A gated activation halves the n of out and residual. The outputs of weights that are joined by
// `next` follow each other; such weights have no gated activation.
void fovea_product(const Weight* w, const bf16* x, int64_t ldx, int64_t rows, int kind, const bf16* residual,
                   bf16* out, int threads) {
    if (rows <= 0) return;
    int64_t ldo = 0;
    for (const Weight* part = w; part; part = part->next) ldo += width_of(*part, kind);
    for (; w; out += w->n, residual = residual ? residual + w->n : nullptr, w = w->next) {
        // If there are few panels and many rows, cut the rows, so that every thread has work.
        const int64_t panels = (w->n + PANEL - 1) / PANEL;
        int64_t cuts = 1;
        if (rows > 192) cuts = std::max<int64_t>(1, std::min<int64_t>(4 * threads / panels, rows / 96));
        if (FOVEA_AMX) cuts = std::max(cuts, (rows + MOST_ROWS - 1) / MOST_ROWS);
        const int64_t size = ((rows + cuts - 1) / cuts + ROWS - 1) / ROWS * ROWS;
        thread_local std::vector<RowRange> ranges;
        ranges.clear();
        for (int64_t start = 0; start < rows; start += size) ranges.push_back({w, start, std::min(size, rows - start)});
        multiply(ranges.data(), static_cast<int64_t>(ranges.size()), x, ldx, rows, kind, residual, out, ldo, threads);
    }
}

// out[i] = row ids[i] of a weight that is not gated; out (count, k) bf16. Quantized weights are dequantized.
void fovea_rows(const Weight* w, const int64_t* ids, int64_t count, bf16* out) {
    for (int64_t i = 0; i < count; ++i, out += w->k) {
        const Weight* part = w;
        int64_t row = ids[i];
        for (; row >= part->n && part->next; part = part->next) row -= part->n;
        (part->format == BF16 ? bf16_rows : quantized_rows)(*part, &row, 1, out);
    }
}

}  // extern "C"

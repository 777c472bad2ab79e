// Products with a weight that stands still: y = x W^T, W (n, k) packed once into panels of 64 outputs. How a panel is
// stored and multiplied is its format's business; here the panels are handed to threads.
//
// Every output adds its products in the order of k, whatever the number of rows, so that a row's result does not
// depend on who shares its step.

#include "formats.h"

using namespace fovea;

extern "C" {

// out (rows, n) = activation(x (rows, k) W^T + bias) [+ residual (rows, n)]; a gated activation halves n.
void fovea_product(const Weight* w, const bf16* x, int64_t ldx, int64_t rows, int kind, const bf16* residual,
                   bf16* out, int threads) {
    const Call call{*w, x, ldx, kind, residual, out};
    const int64_t panels = (w->n + PANEL - 1) / PANEL;
    // Few panels and many rows: cut the rows too, so that every thread has work.
    int64_t cuts = 1;
    if (rows > 192) cuts = std::max<int64_t>(1, std::min<int64_t>(4 * threads / panels, rows / 96));
    const int64_t share = ((rows + cuts - 1) / cuts + ROWS - 1) / ROWS * ROWS;
    // Static: each thread reads one stretch of memory from front to back, which is what few rows wait for.
#pragma omp parallel for schedule(static) num_threads(threads) collapse(2)
    for (int64_t panel = 0; panel < panels; ++panel) {
        for (int64_t cut = 0; cut < cuts; ++cut) {
            const int64_t start = cut * share, count = std::min(share, rows - start);
            if (count <= 0) continue;
            bf16_panel(call, panel, start, count);
        }
    }
}

}  // extern "C"

// A run of decoder layers as one call. With one token per sequence, returning to the Python interpreter
// between the products would take up to a fifth of the step.

#include <vector>

#include "kernels.h"
#include "pages.h"

using namespace fovea;

// These structures have the fields of `_Layer`, `_Shape`, `_Attention` and `_Chunk` in stack.py, in the same
// order.
struct DecoderLayer {
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm, k_norm: may be null
    const Weight *qkv, *out, *gate_up, *down;  // gate_up, down: null in layers with experts
    int64_t activation;
    const Weight* router;    // null in layers without experts
    const Mixture* mixture;
};

struct DecoderShape {
    int64_t hidden, heads, kv_heads, dim, intermediate;
    float eps, scale;
};

struct DecoderChunk {
    int64_t row, count, first;
    const int64_t* table;
};

struct DecoderAttention {
    const float *cos, *sin;  // (rows, dim)
    const int64_t* slots;
    int64_t layer_stride;  // bytes from the pages of one layer to those of the next
    int64_t decodes, table_width;
    const int64_t *tables, *lengths;
    const PrefixGroups* shared;  // null: no rows share blocks
    int64_t chunks;
    const DecoderChunk* chunk;
    const int64_t* read;  // the rows whose results are wanted, in any order
    int64_t reads;        // how many; -1: all rows
};

// Makes rows read[i] of x (rows, width) its first rows. They are copied out first, so any order is allowed.
static void gather(bf16* x, int64_t width, const int64_t* read, int64_t reads, std::vector<bf16>& scratch) {
    bf16* taken = grown(scratch, reads * width);
    for (int64_t i = 0; i < reads; ++i) std::memcpy(taken + i * width, x + read[i] * width, width * sizeof(bf16));
    if (reads) std::memcpy(x, taken, reads * width * sizeof(bf16));
}

extern "C" {

// Computes `count` layers on x (rows, hidden), in place. kv: the pages of the first of these layers. The last of them
// computes only the wanted rows after its attention; they become the first rows of x.
void fovea_decoder(const DecoderLayer* layers, int64_t count, const DecoderShape* shape, const DecoderAttention* plan,
                   bf16* x, int64_t rows, const Pages* kv, int threads) {
    thread_local std::vector<bf16> normed, qkv, mixed, inner, logits, taken;
    const DecoderShape& s = *shape;
    const int64_t heads = s.heads + 2 * s.kv_heads;
    normed.resize(rows * s.hidden);
    qkv.resize(rows * heads * s.dim);
    mixed.resize(rows * s.heads * s.dim);
    inner.resize(rows * s.intermediate);
    Pages pages = *kv;
    for (int64_t i = 0; i < count; ++i, pages.data += plan->layer_stride) {
        const DecoderLayer& layer = layers[i];
        fovea_rms_norm(x, rows, s.hidden, layer.input_norm, s.eps, 0, normed.data(), threads);
        fovea_product(layer.qkv, normed.data(), s.hidden, rows, NONE, nullptr, qkv.data(), threads);
        fovea_rotate_store(qkv.data(), rows, s.heads, s.kv_heads, s.dim, s.dim, plan->cos, plan->sin, layer.q_norm,
                           layer.k_norm, s.eps, 0, &pages, plan->slots, threads);
        if (plan->decodes)
            fovea_decode_attention(qkv.data(), heads * s.dim, plan->decodes, s.heads, s.kv_heads, s.dim, &pages, plan->tables,
                                   plan->table_width, plan->lengths, nullptr, plan->shared, s.scale, mixed.data(), threads);
        for (int64_t c = 0; c < plan->chunks; ++c) {
            const DecoderChunk& chunk = plan->chunk[c];
            fovea_chunk_attention(qkv.data() + chunk.row * heads * s.dim, heads * s.dim, chunk.count, chunk.first,
                                  s.heads, s.kv_heads, s.dim, &pages, chunk.table, nullptr, s.scale,
                                  mixed.data() + chunk.row * s.heads * s.dim, threads);
        }
        if (plan->reads >= 0 && i == count - 1) {
            gather(mixed.data(), s.heads * s.dim, plan->read, plan->reads, taken);
            gather(x, s.hidden, plan->read, plan->reads, taken);
            rows = plan->reads;
            if (rows == 0) return;
        }
        fovea_product(layer.out, mixed.data(), s.heads * s.dim, rows, NONE, x, x, threads);
        fovea_rms_norm(x, rows, s.hidden, layer.post_norm, s.eps, 0, normed.data(), threads);
        if (layer.router) {
            logits.resize(rows * layer.router->n);
            fovea_product(layer.router, normed.data(), s.hidden, rows, NONE, nullptr, logits.data(), threads);
            fovea_experts(layer.mixture, normed.data(), rows, logits.data(), x, x, threads);
            continue;
        }
        fovea_product(layer.gate_up, normed.data(), s.hidden, rows, static_cast<int>(layer.activation), nullptr,
                      inner.data(), threads);
        fovea_product(layer.down, inner.data(), s.intermediate, rows, NONE, x, x, threads);
    }
}

}  // extern "C"

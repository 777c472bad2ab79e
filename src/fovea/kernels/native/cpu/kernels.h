// The functions that Python and decoder.cpp call, and the structures that they share.
#pragma once

#include "simd.h"

namespace fovea {

// A value whose exponent has no code: output `lane` of its panel, column `k`. See bf16.cpp.
struct Exception {
    uint32_t k;
    uint16_t lane;
    bf16 value;
};

// A packed weight (n, k). The fields have the order of `WeightStruct` in weights.py.
struct Weight {
    const uint8_t* data;    // panels, in the layout of bf16.cpp or levels.h
    const uint8_t* table;   // the exponents of the 16 codes; null: plain tiles
    const int64_t* starts;  // panels + 1 offsets into exceptions
    const Exception* exceptions;
    const float* bias;  // panels * 64, or null
    int64_t n, k, format;
    const Weight* next;  // the weight of the outputs that follow; null: there are none
};

// The pages of one layer: (blocks, block, 2, kv_heads, dim) numbers in bf16, or in int8 with their scales, (block, 2,
// kv_heads) bf16, behind the numbers of each page. The fields have the order of `PagesStruct` in border.py.
struct Pages {
    uint8_t* data;
    int64_t page, block;  // bytes from one page to the next; tokens of a page
    int64_t quantized;    // whether the numbers are int8
};

// Groups of rows whose contexts begin with the same blocks. members (count, width): the rows of each group, padded
// with -1. lengths (count): common tokens of each group. The fields have the order of `_PrefixGroups` in stack.py.
struct PrefixGroups {
    int64_t count, width;
    const int64_t *members, *lengths;
};

// The experts of a layer. The fields have the order of `MixtureStruct` in experts.py.
struct Mixture {
    const Weight *const *gate_up, *const *down;  // the weights of each expert
    int64_t experts, active;                     // their number, and how many each row uses
    int64_t activation;                          // the gated `Activation` between both weights
};

// Formats of weights. The quantized ones are described in levels.h; products.py has the same numbers.
enum Format : int64_t { BF16, INT8, INT4, ZERO32, ZERO128, EVEN8, NESTED4, NESTED6 };

enum Activation : int { NONE, SILU_GATED, GELU_TANH_GATED, GELU_GATED, GELU_TANH, GELU, QUICK_GELU, SILU };

}  // namespace fovea

extern "C" {
void fovea_product(const fovea::Weight* w, const fovea::bf16* x, int64_t ldx, int64_t rows, int kind,
                   const fovea::bf16* residual, fovea::bf16* out, int threads);
void fovea_experts(const fovea::Mixture* mixture, const fovea::bf16* x, int64_t rows, const fovea::bf16* logits,
                   const fovea::bf16* residual, fovea::bf16* out, int threads);
void fovea_rms_norm(const fovea::bf16* x, int64_t rows, int64_t width, const fovea::bf16* weight, float eps,
                    int centered, fovea::bf16* out, int threads);
void fovea_rotate_store(fovea::bf16* x, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary,
                        const float* cos, const float* sin, const fovea::bf16* q_weight, const fovea::bf16* k_weight,
                        float eps, int centered, const fovea::Pages* kv, const int64_t* slots, int threads);
void fovea_decode_attention(const fovea::bf16* query, int64_t query_stride, int64_t rows, int64_t heads,
                            int64_t kv_heads, int64_t dim, const fovea::Pages* kv, const int64_t* tables, int64_t width,
                            const int64_t* lengths, const int64_t* firsts,
                            const fovea::PrefixGroups* shared, float scale, fovea::bf16* out, int threads);
void fovea_chunk_attention(const fovea::bf16* query, int64_t query_stride, int64_t queries, int64_t first_key,
                           int64_t heads, int64_t kv_heads, int64_t dim, const fovea::Pages* kv, const int64_t* table,
                            const int64_t* limits, float scale, fovea::bf16* out, int threads);
}

// Attention of many queries at once: a chunk of a prompt, or the patches of an image. Keys and values are
// packed into tiles once per head, and all queries multiply these tiles.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "tiles.h"

using namespace fovea;

namespace {

struct Packed {
    std::vector<uint8_t> keys, values;
    std::vector<float> scores;
    std::vector<bf16> weights;

    static uint8_t* aligned(std::vector<uint8_t>& bytes, int64_t size) {
        uint8_t* data = fit(bytes, size + 64);
        return data + (64 - reinterpret_cast<uintptr_t>(data) % 64) % 64;
    }
};

// Packs `count` keys into panels of 64 keys. A panel is dim / 2 pairs of 4 tiles. Lanes without a key are
// zero.
void pack_keys(const Rows& keys, int64_t count, int64_t dim, uint8_t* out) {
    const int64_t pairs = dim / 2;
    for (int64_t start = 0; start < count; start += PANEL) {
        auto* panel = reinterpret_cast<int32_t*>(out + start / PANEL * pairs * TILES * TILE_PLAIN);
        for (int64_t lane = 0; lane < PANEL; ++lane) {
            if (start + lane >= count) {
                for (int64_t pair = 0; pair < pairs; ++pair) panel[pair * PANEL + lane] = 0;
                continue;
            }
            const bf16* key = keys.at(start + lane);
            for (int64_t pair = 0; pair < pairs; ++pair) std::memcpy(panel + pair * PANEL + lane, key + 2 * pair, 4);
        }
    }
}

// Packs `count` values: for every 64 numbers of dim, `pairs` pairs of tokens by 4 tiles. `pairs` includes the
// padding of the keys, which is zero here.
void pack_values(const Rows& values, int64_t count, int64_t dim, int64_t pairs, uint8_t* out) {
    for (int64_t first_dim = 0; first_dim < dim; first_dim += PANEL) {
        uint8_t* panel = out + first_dim / PANEL * pairs * TILES * TILE_PLAIN;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const bf16* even = 2 * pair < count ? values.at(2 * pair) : nullptr;
            const bf16* odd = 2 * pair + 1 < count ? values.at(2 * pair + 1) : nullptr;
            for (int t = 0; t < TILES; ++t) {
                const int64_t d = first_dim + t * LANES;
                const __mmask16 mask = first(dim - d);
                const __m512i low = even ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even + d)) : _mm512_setzero_si512();
                const __m512i high = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd + d)) : _mm512_setzero_si512();
                _mm512_store_si512(panel + (pair * TILES + t) * TILE_PLAIN, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
    }
}

// Turns `count` scores into weights e^(scale * (score - max)) in bf16, and fills up with zeros to `room`.
// Returns 1 / sum of the weights.
inline float weigh(const float* scores, int64_t count, int64_t room, float scale, bf16* weights) {
    const __m512 low = _mm512_set1_ps(-3.0e38f), factor = _mm512_set1_ps(scale);
    __m512 top = low;
    for (int64_t i = 0; i < count; i += 16)
        top = _mm512_max_ps(top, _mm512_mask_loadu_ps(low, first(count - i), scores + i));
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < room; i += 16) {
        const __m512 e = _mm512_maskz_mov_ps(
            first(count - i), exp16(_mm512_mul_ps(factor, _mm512_sub_ps(_mm512_loadu_ps(scores + i), most))));
        sum = _mm512_add_ps(sum, e);
        store16(weights + i, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

// Attention of one head: `queries` queries over `count` keys and values. causal: query i attends to keys
// 0..first_key + i; otherwise to all keys.
void one_head(Packed& scratch, const bf16* query, int64_t query_stride, int64_t queries, const Rows& keys,
              const Rows& values, int64_t count, int64_t dim, bool causal, int64_t first_key, float scale, bf16* out,
              int64_t out_stride) {
    const int64_t panels = (count + PANEL - 1) / PANEL, room = panels * PANEL, wide = (dim + PANEL - 1) / PANEL;
    uint8_t* key_tiles = Packed::aligned(scratch.keys, panels * dim / 2 * TILES * TILE_PLAIN);
    uint8_t* value_tiles = Packed::aligned(scratch.values, wide * room / 2 * TILES * TILE_PLAIN);
    pack_keys(keys, count, dim, key_tiles);
    pack_values(values, count, dim, room / 2, value_tiles);
    fit(scratch.scores, ROWS * room);
    fit(scratch.weights, ROWS * room);
    float sums[ROWS * PANEL], inverse[ROWS];
    for (int64_t row = 0; row < queries; row += ROWS) {
        const int64_t rows = std::min<int64_t>(ROWS, queries - row);
        const int64_t seen = causal ? std::min(count, first_key + row + rows) : count;
        const int64_t used = (seen + PANEL - 1) / PANEL;
        for (int64_t panel = 0; panel < used; ++panel)
            block_rows<ROWS>(rows, key_tiles + panel * dim / 2 * TILES * TILE_PLAIN, dim / 2, query + row * query_stride,
                             query_stride, scratch.scores.data() + panel * PANEL, room, true);
        for (int64_t r = 0; r < rows; ++r)
            inverse[r] = weigh(scratch.scores.data() + r * room, causal ? std::min(count, first_key + row + r + 1) : count,
                               used * PANEL, scale, scratch.weights.data() + r * room);
        for (int64_t part = 0; part < wide; ++part) {
            block_rows<ROWS>(rows, value_tiles + part * room / 2 * TILES * TILE_PLAIN, used * PANEL / 2,
                             scratch.weights.data(), room, sums, PANEL, true);
            for (int64_t r = 0; r < rows; ++r)
                for (int t = 0; t < TILES; ++t) {
                    const int64_t d = part * PANEL + t * LANES;
                    if (d >= dim) break;
                    store16(out + (row + r) * out_stride + d,
                            _mm512_mul_ps(_mm512_loadu_ps(sums + r * PANEL + t * LANES), _mm512_set1_ps(inverse[r])),
                            first(dim - d));
                }
        }
    }
}

}  // namespace

extern "C" {

// Attention within groups of `queries` rows: each row attends to all rows of its group, as in the windows of
// an image and the frames of a video. qkv (groups * queries, 3, heads, dim), out (groups * queries, heads,
// dim). Computes heads [from, to).
void fovea_group_attention(const bf16* qkv, int64_t groups, int64_t queries, int64_t heads, int64_t from, int64_t to,
                           int64_t dim, float scale, bf16* out, int threads) {
    const int64_t stride = 3 * heads * dim;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) collapse(2)
    for (int64_t group = 0; group < groups; ++group) {
        for (int64_t head = from; head < to; ++head) {
            thread_local Packed scratch;
            const bf16* query = qkv + group * queries * stride + head * dim;
            const Rows keys{query + heads * dim, stride, nullptr, 1}, values{query + 2 * heads * dim, stride, nullptr, 1};
            one_head(scratch, query, stride, queries, keys, values, queries, dim, false, 0, scale,
                     out + (group * queries * heads + head) * dim, heads * dim);
        }
    }
}

// Causal attention of a chunk of a prompt: `queries` queries, from position first_key on, over the pages of
// their sequence. query: rows (heads, dim), `query_stride` values apart; kv (blocks, block, 2, kv_heads,
// dim); table: block numbers of the sequence; out (queries, heads, dim).
void fovea_chunk_attention(const bf16* query, int64_t query_stride, int64_t queries, int64_t first_key, int64_t heads,
                           int64_t kv_heads, int64_t dim, const bf16* kv, int64_t block, const int64_t* table,
                           float scale, bf16* out, int threads) {
    const int64_t stride = 2 * kv_heads * dim, group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t head = 0; head < heads; ++head) {
        thread_local Packed scratch;
        const bf16* base = kv + head / group * dim;
        const Rows keys{base, stride, table, block}, values{base + kv_heads * dim, stride, table, block};
        one_head(scratch, query + head * dim, query_stride, queries, keys, values, first_key + queries, dim, true,
                 first_key, scale, out + head * dim, heads * dim);
    }
}

}  // extern "C"

// Attention of many queries at once: a chunk of a prompt, or the patches of an image. Keys and values are
// packed into tiles once per head, and all queries multiply these tiles. A row of a chunk has the bits that decode.cpp
// would give it; a change of the order of additions must be made in both files.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "team.h"
#include "tiles.h"

using namespace fovea;

namespace {

using Key = std::conditional_t<WHOLE, int16_t, bf16>;  // the type to which levels of keys are converted

struct Packed {
    std::vector<uint32_t> keys, values;
    std::vector<Key> converted_keys;
    std::vector<bf16> converted_values;
    std::vector<float> scores, key_scales, value_scales;
    std::vector<int16_t> whole;  // queries in 16 bits, see WHOLE in tiles.h
    std::vector<Input> queries, weights;
};

// Where lane `lane` of a panel stands among the pairs `pair` of `pairs`: panels consist of strips.
inline int64_t offset_of(int64_t lane, int64_t pair, int64_t pairs) {
    return (lane / STRIP * pairs + pair) * STRIP + lane % STRIP;
}

// Packs `count` keys into panels of 64 keys by `pairs` pairs. Lanes without a key, and pairs behind dim / 2, are zero.
// rows_of(first, last): returns rows in which tokens [first, last) can be read.
template <class RowsFrom>
void pack_keys(const RowsFrom& rows_of, int64_t count, int64_t dim, int64_t pairs, uint32_t* out) {
    for (int64_t start = 0; start < count; start += PANEL, out += pairs * PANEL) {
        const auto keys = rows_of(start, std::min<int64_t>(start + PANEL, count));
        for (int64_t lane = 0; lane < PANEL; lane += LANES)
            for (int64_t pair = 0; pair < pairs; pair += LANES) {
                const int64_t left = std::max<int64_t>(0, dim / 2 - pair), wanted = std::min<int64_t>(LANES, pairs - pair);
                Unsigned block[LANES];
                for (int64_t i = 0; i < LANES; ++i) {
                    block[i] = hn::Zero(u32);
                    if (start + lane + i >= count) continue;
                    const auto* from = reinterpret_cast<const uint32_t*>(keys.at(start + lane + i) + 2 * pair);
                    block[i] = left >= LANES ? hn::LoadU(u32, from) : hn::LoadN(u32, from, left);
                }
                transpose(u32, block);
                for (int64_t i = 0; i < wanted; ++i) hn::Store(block[i], u32, out + offset_of(lane, pair + i, pairs));
            }
    }
}

// Packs `count` values: for every 64 numbers of dim, `pairs` pairs of tokens. `pairs` includes the padding of the
// keys, which is zero here.
template <class RowsFrom>
void pack_values(const RowsFrom& rows_of, int64_t count, int64_t dim, int64_t pairs, uint32_t* out) {
    for (int64_t start = 0; start < pairs; start += PANEL / 2) {
        const Rows values = rows_of(2 * start, std::clamp<int64_t>(count, 2 * start, 2 * start + PANEL));
        for (int64_t pair = start; pair < std::min<int64_t>(start + PANEL / 2, pairs); ++pair) {
            const bf16* even = 2 * pair < count ? values.at(2 * pair) : nullptr;
            const bf16* odd = 2 * pair + 1 < count ? values.at(2 * pair + 1) : nullptr;
            for (int64_t d = 0; d < (dim + PANEL - 1) / PANEL * PANEL; d += LANES) {
                const int64_t left = std::min<int64_t>(LANES, dim - d);
                const auto part = [&](const bf16* of) {
                    if (!of || left <= 0) return hn::Zero(u32);
                    return hn::PromoteTo(u32, left == LANES ? hn::LoadU(halves, of + d) : hn::LoadN(halves, of + d, left));
                };
                hn::Store(hn::Or(part(even), hn::ShiftLeft<16>(part(odd))), u32,
                          out + d / PANEL * pairs * PANEL + offset_of(d % PANEL, pair, pairs));
            }
        }
    }
}

[[maybe_unused]] inline void store_weight(bf16* to, Floats weight) { store(to, weight); }
[[maybe_unused]] inline void store_weight(float* to, Floats weight) { hn::StoreU(weight, f32, to); }

// The keys [first, last) that a query attends to.
struct Reach {
    int64_t first, last;
};

// Turns the scores of a query's keys into weights e^(scale * (score - max)). Other weights from `begin` to `room` are
// zero. Returns 1 / sum of the weights. scales: by which the weights are multiplied after they were added up, or null.
inline float weigh(const float* scores, Reach reach, int64_t begin, int64_t room, float scale, const float* scales,
                   Input* weights) {
    const Floats low = hn::Set(f32, -3.0e38f), factor = hn::Set(f32, scale);
    const auto below = [&](int64_t i, int64_t end) { return hn::FirstN(f32, std::max<int64_t>(0, end - i)); };
    const auto within = [&](int64_t i) { return hn::AndNot(below(i, reach.first), below(i, reach.last)); };
    // Vectors from `full` to `end` have only keys within reach, so they need no masks.
    const int64_t used = (reach.last + LANES - 1) / LANES * LANES;
    const int64_t full = std::min((reach.first + LANES - 1) / LANES * LANES, used);
    const int64_t end = std::max(full, reach.last / LANES * LANES);
    Floats tops[4] = {low, low, low, low};  // several, because each maximum waits for the one before
    const auto edge_top = [&](int64_t i) { return hn::IfThenElse(within(i), hn::LoadU(f32, scores + i), low); };
    for (int64_t i = begin; i < full; i += LANES) tops[0] = hn::Max(tops[0], edge_top(i));
    for (int64_t i = end; i < used; i += LANES) tops[0] = hn::Max(tops[0], edge_top(i));
    int64_t at = full;
    for (; at + 4 * LANES <= end; at += 4 * LANES)
        for (int part = 0; part < 4; ++part) tops[part] = hn::Max(tops[part], hn::LoadU(f32, scores + at + part * LANES));
    for (; at < end; at += LANES) tops[0] = hn::Max(tops[0], hn::LoadU(f32, scores + at));
    const Floats top = hn::Max(hn::Max(tops[0], tops[1]), hn::Max(tops[2], tops[3]));
    const Floats most = hn::Set(f32, hn::ReduceMax(f32, top));
    Floats sum = hn::Zero(f32);
    const auto weight = [&](int64_t i) {
        return exponential(hn::Mul(factor, hn::Sub(hn::LoadU(f32, scores + i), most)));
    };
    const auto add = [&](int64_t i, Floats e) {
        sum = hn::Add(sum, e);
        store_weight(weights + i, scales ? hn::Mul(e, hn::LoadU(f32, scales + i)) : e);
    };
    for (int64_t i = begin; i < full; i += LANES) add(i, hn::IfThenElseZero(within(i), weight(i)));
    for (int64_t i = full; i < end; i += LANES) add(i, weight(i));
    for (int64_t i = end; i < used; i += LANES) add(i, hn::IfThenElseZero(within(i), weight(i)));
    for (int64_t i = used; i < room; i += LANES) store_weight(weights + i, hn::Zero(f32));
    return 1.0f / sum_of(sum);
}

// Stores the scales of `count` tokens, and zeros up to `room`. Returns where.
inline const float* scales_of(const Source& source, int64_t count, int64_t room, std::vector<float>& scratch) {
    float* scales = fit(scratch, room);
    for (int64_t t = 0; t < room; ++t) scales[t] = t < count ? source.scale(t) : 0;
    return scales;
}

// Keys and values of one head, packed into tiles.
struct Tiles {
    const uint32_t *keys, *values;
    const float *key_scales, *value_scales;  // of each token, in int8; null: there are none
    int64_t count, dim, room, pairs;         // tokens, and dimensions; tokens with padding; pairs of a key with padding

    Tiles(int64_t count, int64_t dim)
        : key_scales(nullptr), value_scales(nullptr), count(count), dim(dim), room((count + PANEL - 1) / PANEL * PANEL),
          pairs(padded_pairs(dim / 2)) {}

    template <class Keys, class Values>
    void pack(Packed& scratch, const Keys& keys_of, const Values& values_of) {
        uint32_t* key_tiles = fit_aligned(scratch.keys, room * pairs);
        uint32_t* value_tiles = fit_aligned(scratch.values, (dim + PANEL - 1) / PANEL * PANEL * room / 2);
        pack_keys(keys_of, count, dim, pairs, key_tiles);
        pack_values(values_of, count, dim, room / 2, value_tiles);
        keys = key_tiles, values = value_tiles;
    }

    Tiles(Packed& scratch, const Rows& key_rows, const Rows& value_rows, int64_t count, int64_t dim) : Tiles(count, dim) {
        pack(scratch, [&](int64_t, int64_t) { return key_rows; }, [&](int64_t, int64_t) { return value_rows; });
    }

    Tiles(Packed& scratch, const Source& key_source, const Source& value_source, int64_t count, int64_t dim)
        : Tiles(count, dim) {
        if (!key_source.scaled()) {
            pack(scratch, [&](int64_t, int64_t) { return key_source.in_place(); },
                 [&](int64_t, int64_t) { return value_source.in_place(); });
            return;
        }
        pack(scratch,
             [&](int64_t first, int64_t last) { return key_source.converted(first, last, count, scratch.converted_keys); },
             [&](int64_t first, int64_t last) { return value_source.converted(first, last, count, scratch.converted_values); });
        key_scales = scales_of(key_source, count, room, scratch.key_scales);
        value_scales = scales_of(value_source, count, room, scratch.value_scales);
    }
};

// scores (rows, room), of a panel of keys, from queries in 16 bits, (rows, dim), and their scales (rows). rows: at most ROWS.
[[maybe_unused]] void score_whole(int64_t rows, const Tiles& tiles, int64_t panel, const int16_t* queries, const float* scales,
                                  float* scores) {
    for (int s = 0; s < STRIPS; ++s) {
        const uint32_t* strip = tiles.keys + (panel * PANEL + s * STRIP) * tiles.pairs;
        Ints sums[VECTOR_BLOCK][VECTORS];
        for (auto& row : sums)
            for (Ints& sum : row) sum = hn::Zero(i32);
        for (int64_t pair = 0; pair < tiles.dim / 2; ++pair)
            for (int r = 0; r < VECTOR_BLOCK; ++r) {  // rows behind the last one are not stored
                const Unsigned query = pair_of(queries + r * tiles.dim, pair);
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][v] = add_whole(sums[r][v], query, hn::Load(u32, strip + pair * STRIP + v * LANES));
            }
        for (int64_t r = 0; r < std::min<int64_t>(rows, VECTOR_BLOCK); ++r)
            for (int v = 0; v < VECTORS; ++v)
                hn::StoreU(hn::Mul(hn::ConvertTo(f32, sums[r][v]), hn::Set(f32, scales[r])), f32,
                           scores + r * tiles.room + panel * PANEL + s * STRIP + v * LANES);
    }
}

// Attention of one head: `queries` queries over packed keys and values. reach(i): the keys that query i attends to.
template <class Reaches>
void one_head(Packed& scratch, const bf16* query, int64_t query_stride, int64_t queries, const Tiles& tiles,
              const Reaches& reach, float scale, bf16* out, int64_t out_stride) {
    const int64_t count = tiles.count, dim = tiles.dim, room = tiles.room, pairs = tiles.pairs, width = 2 * pairs;
    const int64_t wide = (dim + PANEL - 1) / PANEL;
    const bool whole = WHOLE && tiles.key_scales;
    const int64_t apart = room + 64 / static_cast<int64_t>(sizeof(Input));  // rows 4 KiB apart would share sets of L1
    int16_t* rounded = whole ? fit(scratch.whole, ROWS * dim) : nullptr;
    float* scores = fit(scratch.scores, ROWS * room);
    Input* weights = fit_aligned(scratch.weights, ROWS * apart);
    Input* inputs = fit_aligned(scratch.queries, ROWS * width);
    std::fill(inputs, inputs + ROWS * width, Input{0});
    float sums[ROWS * PANEL], inverse[ROWS];
    for (int64_t row = 0; row < queries; row += ROWS) {
        const int64_t rows = std::min<int64_t>(ROWS, queries - row);
        // Panels before the first key that any of these rows sees, and after the last, are left out.
        int64_t first = count, last = 0;
        for (int64_t r = 0; r < rows; ++r)
            first = std::min(first, reach(row + r).first), last = std::max(last, reach(row + r).last);
        const int64_t begin = first / PANEL, used = (last + PANEL - 1) / PANEL;
        if (whole) {
            float scales[ROWS];
            for (int64_t r = 0; r < rows; ++r) scales[r] = whole_query(query + (row + r) * query_stride, dim, rounded + r * dim);
            for (int64_t panel = begin; panel < used; ++panel) score_whole(rows, tiles, panel, rounded, scales, scores);
        } else {
            for (int64_t r = 0; r < rows; ++r) to_inputs(query + (row + r) * query_stride, dim, inputs + r * width);
            for (int64_t panel = begin; panel < used; ++panel)
                block_panel(rows, tiles.keys + panel * pairs * PANEL, pairs, pairs, inputs, width, scores + panel * PANEL, room);
        }
        for (int64_t r = 0; tiles.key_scales && r < rows; ++r)
            for (int64_t i = r * room + begin * PANEL; i < r * room + used * PANEL; i += LANES)
                hn::StoreU(hn::Mul(hn::LoadU(f32, scores + i), hn::LoadU(f32, tiles.key_scales + i - r * room)), f32, scores + i);
        for (int64_t r = 0; r < rows; ++r)
            inverse[r] = weigh(scores + r * room, reach(row + r), begin * PANEL, used * PANEL, scale, tiles.value_scales,
                               weights + r * apart);
        for (int64_t part = 0; part < wide; ++part) {
            block_panel(rows, tiles.values + (part * room * PANEL + begin * PANEL * STRIP) / 2, room / 2,
                        (used - begin) * PANEL / 2, weights + begin * PANEL, apart, sums, PANEL);
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t lane = 0; lane < PANEL; lane += LANES) {
                    const int64_t d = part * PANEL + lane;
                    const Floats sum = hn::LoadU(f32, sums + r * PANEL + lane);
                    store(out + (row + r) * out_stride + d, hn::Mul(sum, hn::Set(f32, inverse[r])), dim - d);
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
    parallel<TileScope>(threads, groups * (to - from), 1, [&](int64_t part) {
        thread_local Packed scratch;
        const int64_t group = part / (to - from), head = from + part % (to - from);
        const bf16* query = qkv + group * queries * stride + head * dim;
        const Rows keys{query + heads * dim, stride, {nullptr, 1, 0}}, values{query + 2 * heads * dim, stride, {nullptr, 1, 0}};
        one_head(scratch, query, stride, queries, Tiles(scratch, keys, values, queries, dim),
                 [&](int64_t) { return Reach{0, queries}; }, scale, out + (group * queries * heads + head) * dim, heads * dim);
    });
}

// Causal attention of a chunk of a prompt: `queries` queries, from position first_key on, over the pages of
// their sequence. query: rows (heads, dim), `query_stride` values apart; table: block numbers of the sequence;
// limits (queries, 2): the keys [first, last) that each query attends to, or null: all keys up to its own;
// out (queries, heads, dim).
void fovea_chunk_attention(const bf16* query, int64_t query_stride, int64_t queries, int64_t first_key, int64_t heads,
                           int64_t kv_heads, int64_t dim, const Pages* kv, const int64_t* table,
                           const int64_t* limits, float scale, bf16* out, int threads) {
    const auto reach = [&](int64_t i) {
        return limits ? Reach{limits[2 * i], limits[2 * i + 1]} : Reach{0, first_key + i + 1};
    };
    const int64_t group = heads / kv_heads;
    parallel<TileScope>(threads, heads, 1, [&](int64_t head) {
        thread_local Packed scratch;
        const Source keys(*kv, kv_heads, dim, 0, head / group, table), values(*kv, kv_heads, dim, 1, head / group, table);
        one_head(scratch, query + head * dim, query_stride, queries, Tiles(scratch, keys, values, first_key + queries, dim), reach,
                 scale, out + head * dim, heads * dim);
    });
}

}  // extern "C"

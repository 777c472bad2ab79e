// Attention of decodes: one query per sequence, which reads the sequence's pages in place. No copy, no
// padding, no mask.
//
// Tokens are processed in stretches. While a stretch is in the processor's cache, it is scored (multiplied with the
// queries) or mixed (its values are added up by weight). Keys and values in int8 are converted to bf16 there. Their
// scales multiply scores and weights, see pages.py.
//
// Sequences that begin with the same pages (questions about one picture) form a family. They read these pages once,
// because a stretch serves all rows of the family. No partial results are merged afterwards. Each query head has a lane and sums of its own, over its
// tokens in their order. So a row's result does not depend on its family, to the last bit.
//
// Scores, weights and sums are computed with the operations and in the order of attention.cpp. So a row has the same
// bits, too, whether it is computed here or as a row of a chunk. A change of the order must be made in both files.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "team.h"
#include "tiles.h"

using namespace fovea;

namespace {

constexpr int KEYS = 8;                     // keys whose scores are computed together
constexpr int MIXED = REGISTERS == 32 && !FOVEA_AMX ? 8 : 4;  // query heads whose sums are kept in registers together
constexpr int64_t STRETCH_BYTES = 16 << 10; // keys or values in bf16 that are processed together: they stay in L1
// Tokens whose weighted values are added up together, counted from the first of a context: pairs, or with AMX the 16 pairs of
// a matrix register. A stretch is a multiple of them.
constexpr int64_t TOGETHER = 2 * PAIRS_TOGETHER;
constexpr int DIMS = 2 * LANES;             // dimensions that are mixed together: a vector of values
// A lane of a tile of queries, or of weights, holds a pair of bf16, or, without instructions for them, two floats
// that are a vector apart. PAIR: vectors that a pair of values takes.
constexpr int PAIR = FOVEA_BF16_DOT ? 1 : 2;

// The types to which levels of keys and of values are converted.
using Key = std::conditional_t<WHOLE, int16_t, bf16>;
using Value = std::conditional_t<WHOLE, float, bf16>;

// Up to LANES query heads of one row, in neighbouring lanes of one tile. head, lane: the first of them.
struct Piece {
    int64_t row, head;
    int count, tile, lane;
    int64_t own;  // where the scores of the row's own tokens begin, counted in tokens
};

// Scratch memory for one family and one KV head. The weights of a pair of tokens are like a pair of a query.
struct Decode {
    std::vector<Piece> pieces;
    std::vector<uint32_t> queries;  // tiles of (dim / 2, PAIR, LANES): a pair of each query head
    std::vector<float> scores;      // (tiles, shared, LANES), then (own tokens, LANES) per piece: a query head per lane
    std::vector<uint32_t> weights;  // like scores, with (tokens / 2, PAIR) in place of tokens
    std::vector<float> inverse;     // (tiles, LANES): 1 / sum of weights
    std::vector<float> sums;        // (pieces, dim / DIMS, LANES, 2, LANES), or, of levels, (pieces, LANES, dim): weighted values
    // For keys in int8, see WHOLE in tiles.h: tiles of queries, (dim / 2, LANES), and the scale of each query head.
    std::vector<uint32_t> whole;
    std::vector<float> query_scales;
    std::vector<Key> keys;          // a stretch of converted keys, and of values
    std::vector<Value> values;
};

struct Contexts {
    const Pages& pages;
    int64_t kv_heads, dim;
    const int64_t *tables, width, *lengths, *firsts;
    // The first token that a row attends to.
    int64_t first(int64_t row) const { return firsts ? firsts[row] : 0; }
    // The first token that a row reads itself, after `shared` tokens that it reads with others: a multiple of TOGETHER.
    int64_t own(int64_t row, int64_t shared) const { return shared ? shared : first(row) / TOGETHER * TOGETHER; }
    Source keys(int64_t row, int64_t head) const { return {pages, kv_heads, dim, 0, head, tables + row * width}; }
    Source values(int64_t row, int64_t head) const { return {pages, kv_heads, dim, 1, head, tables + row * width}; }
};

// Calls use(rows, start, end) for each stretch of tokens [first, last).
template <class T, class Use>
void each_stretch(const Source& source, int64_t first, int64_t last, std::vector<T>& scratch, const Use& use) {
    const int64_t size = source.scaled() ? sizeof(T) : sizeof(bf16);
    const int64_t step = std::max<int64_t>(STRETCH_BYTES / (size * source.dim) / 32 * 32, 32);
    for (int64_t start = first; start < last; start += step) {
        const int64_t end = std::min(start + step, last);
        if (source.scaled())
            use(source.converted(start, end, last, scratch), start, end);
        else
            use(source.in_place(), start, end);
    }
}

// Writes a pair of bf16 to one lane of a tile of queries.
inline void set_pair(uint32_t* at, const bf16* pair) {
    if constexpr (PAIR == 1) {
        std::memcpy(at, pair, 4);
    } else {
        at[0] = static_cast<uint32_t>(pair[0]) << 16;
        at[LANES] = static_cast<uint32_t>(pair[1]) << 16;
    }
}

// Writes two vectors of weights.
FOVEA_INLINE void set_weights(uint32_t* at, Floats even, Floats odd) {
#if FOVEA_BF16_DOT
    const Unsigned low = hn::PromoteTo(u32, narrow(even)), high = hn::PromoteTo(u32, narrow(odd));
    hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), u32, at);
#else
    const auto kept = [](Floats weight) { return hn::BitCast(u32, FOVEA_AMX ? rounded(weight) : weight); };
    hn::StoreU(kept(even), u32, at);
    hn::StoreU(kept(odd), u32, at + LANES);
#endif
}

// scores (last - first, LANES) = products of up to LANES query heads with the keys of tokens [first, last). Each query
// head has a lane.
void score_keys(const uint32_t* queries, const Rows& keys, int64_t first, int64_t last, int64_t dim, float* scores) {
    for (int64_t start = first; start < last; start += KEYS) {
        const bf16* key[KEYS];
        for (int64_t i = 0; i < KEYS; ++i) {
            key[i] = keys.at(std::min(start + i, last - 1));
            const bf16* later = keys.at(std::min(start + KEYS + i, last - 1));
            for (int64_t d = 0; d < dim; d += 32) prefetch(later + d);
        }
        Floats sums[KEYS];
        for (auto& sum : sums) sum = hn::Zero(f32);
#if FOVEA_AMX
        for (int64_t pair = 0; pair < dim / 2;) {
            Floats evens[KEYS], odds[KEYS];
            for (int i = 0; i < KEYS; ++i) evens[i] = odds[i] = hn::Zero(f32);
            for (const int64_t end = std::min<int64_t>(pair + MATRIX_PAIRS, dim / 2); pair < end; ++pair) {
                const uint32_t* tile = queries + pair * PAIR * LANES;
                const Floats even = hn::BitCast(f32, hn::LoadU(u32, tile)), odd = hn::BitCast(f32, hn::LoadU(u32, tile + LANES));
                for (int i = 0; i < KEYS; ++i) {
                    const Unsigned both = pair_of(key[i], pair);
                    evens[i] = hn::MulAdd(even_of(both), even, evens[i]);
                    odds[i] = hn::MulAdd(odd_of(both), odd, odds[i]);
                }
            }
            for (int i = 0; i < KEYS; ++i) sums[i] = hn::Add(sums[i], hn::Add(evens[i], odds[i]));
        }
#else
        for (int64_t pair = 0; pair < dim / 2; ++pair) {
            const uint32_t* tile = queries + pair * PAIR * LANES;
#if FOVEA_BF16_DOT
            const Unsigned query = hn::LoadU(u32, tile);
            for (int i = 0; i < KEYS; ++i) sums[i] = add_pairs(sums[i], pair_of(key[i], pair), query);
#else
            const Floats even = hn::BitCast(f32, hn::LoadU(u32, tile)), odd = hn::BitCast(f32, hn::LoadU(u32, tile + LANES));
            for (int i = 0; i < KEYS; ++i) {
                const Unsigned both = pair_of(key[i], pair);
                sums[i] = hn::MulAdd(odd_of(both), odd, hn::MulAdd(even_of(both), even, sums[i]));
            }
#endif
        }
#endif
        for (int64_t i = 0; i < KEYS && start + i < last; ++i)
            hn::StoreU(sums[i], f32, scores + (start - first + i) * LANES);
    }
}

// Does the work of `score_keys` for queries in 16 bits, whose scales are (LANES).
[[maybe_unused]] void score_whole(const uint32_t* queries, const float* scales, const RowsOf<int16_t>& keys, int64_t first,
                                  int64_t last, int64_t dim, float* scores) {
    const Floats scale = hn::LoadU(f32, scales);
    for (int64_t start = first; start < last; start += KEYS) {
        const int16_t* key[KEYS];
        Ints sums[KEYS];
        for (int64_t i = 0; i < KEYS; ++i) key[i] = keys.at(std::min(start + i, last - 1)), sums[i] = hn::Zero(i32);
        for (int64_t pair = 0; pair < dim / 2; ++pair) {
            const Unsigned query = hn::LoadU(u32, queries + pair * LANES);
            for (int i = 0; i < KEYS; ++i) sums[i] = add_whole(sums[i], pair_of(key[i], pair), query);
        }
        for (int64_t i = 0; i < KEYS && start + i < last; ++i)
            hn::StoreU(hn::Mul(hn::ConvertTo(f32, sums[i]), scale), f32, scores + (start - first + i) * LANES);
    }
}

// Multiplies scores (last - first, LANES) of keys [first, last) by the scales of these keys.
void scale_scores(const Source& keys, int64_t first, int64_t last, float* scores) {
    for (int64_t t = first; t < last; ++t, scores += LANES)
        hn::StoreU(hn::Mul(hn::LoadU(f32, scores), hn::Set(f32, keys.scale(t))), f32, scores);
}

// The maximum of `most` and of scores (count, LANES), lane by lane.
Floats most_of(Floats most, const float* scores, int64_t count) {
    for (int64_t t = 0; t < count; ++t) most = hn::Max(most, hn::LoadU(f32, scores + t * LANES));
    return most;
}

// Turns the scores (last - start, LANES) of tokens [start, last) into weights e^(scale * (score - most)), stored by pairs
// of tokens. Tokens before `first` get weight 0. `start` is even; `last` is odd only at the end of a row's own tokens.
// Adds the weights to sums (LANES, LANES): the weight of token t to sums[t % LANES]. Then multiplies them by the scales of
// the values.
void weigh_lanes(const float* scores, int64_t start, int64_t first, int64_t last, Floats most, float scale,
                 const Source& values, Floats* sums, uint32_t* weights) {
    const Floats factor = hn::Set(f32, scale);
    const auto weight = [&](int64_t t) {
        if (t < first || t >= last) return hn::Zero(f32);
        return exponential(hn::Mul(factor, hn::Sub(hn::LoadU(f32, scores + (t - start) * LANES), most)));
    };
    const auto scaled = [&](int64_t t, Floats of) {
        return values.scaled() && t < last ? hn::Mul(of, hn::Set(f32, values.scale(t))) : of;
    };
    for (int64_t t = start; t < last; t += 2) {
        const Floats even = weight(t), odd = weight(t + 1);
        sums[t % LANES] = hn::Add(sums[t % LANES], even);
        sums[(t + 1) % LANES] = hn::Add(sums[(t + 1) % LANES], odd);
        set_weights(weights + (t - start) / 2 * PAIR * LANES, scaled(t, even), scaled(t + 1, odd));
    }
}

// Adds the weighted values of tokens [first, last), dimensions d..d + DIMS - 1, to the sums kept (heads, 2, LANES) of
// `heads` (at most G) query heads, whose weights begin at `weights`. fresh: overwrite the sums. Their
// dimensions are not in order, see `store_mixed`.
template <int G>
void mix_values(const uint32_t* weights, const Rows& values, int64_t first, int64_t last, int64_t d, int heads,
                bool fresh, float* kept) {
#if FOVEA_AMX
    for (int64_t start = first; start < last; start += TOGETHER) {
        Floats added[G][2][2];  // by query head, half of the dimensions, and even or odd token
        for (auto& of_head : added)
            for (auto& half : of_head) half[0] = half[1] = hn::Zero(f32);
        for (int64_t t = start; t < std::min(start + TOGETHER, last); t += 2, weights += PAIR * LANES)
            for (int token = 0; token < 2; ++token) {
                const bf16* at = values.at(std::min(t + token, last - 1)) + d;
                prefetch(values.at(std::min(t + 8 + token, last - 1)) + d);
                const Unsigned pairs = hn::BitCast(u32, hn::LoadU(u16, at));
                const Floats left = even_of(pairs), right = odd_of(pairs);
                for (int g = 0; g < G; ++g) {
                    const Floats weight = hn::BitCast(f32, hn::Set(u32, weights[token * LANES + g]));
                    added[g][0][token] = hn::MulAdd(weight, left, added[g][0][token]);
                    added[g][1][token] = hn::MulAdd(weight, right, added[g][1][token]);
                }
            }
        for (int g = 0; g < G; ++g)
            for (int side = 0; side < 2 && g < heads; ++side) {
                float* sum = kept + (2 * g + side) * LANES;
                const Floats before = fresh && start == first ? hn::Zero(f32) : hn::LoadU(f32, sum);
                hn::StoreU(hn::Add(before, hn::Add(added[g][side][0], added[g][side][1])), f32, sum);
            }
    }
#else
    Floats sums[G][2];
    for (int g = 0; g < G; ++g)
        for (int side = 0; side < 2; ++side)
            sums[g][side] = fresh || g >= heads ? hn::Zero(f32) : hn::LoadU(f32, kept + (2 * g + side) * LANES);
    for (int64_t t = first; t < last; t += 2, weights += PAIR * LANES) {
        const auto even = hn::LoadU(u16, values.at(t) + d);
        const auto odd = hn::LoadU(u16, values.at(std::min(t + 1, last - 1)) + d);
        prefetch(values.at(std::min(t + 8, last - 1)) + d);
        prefetch(values.at(std::min(t + 9, last - 1)) + d);
#if FOVEA_BF16_DOT
        const Unsigned low = hn::BitCast(u32, hn::InterleaveLower(u16, even, odd));
        const Unsigned high = hn::BitCast(u32, hn::InterleaveUpper(u16, even, odd));
        for (int g = 0; g < G; ++g) {
            const Unsigned weight = hn::Set(u32, weights[g]);
            sums[g][0] = add_pairs(sums[g][0], weight, low);
            sums[g][1] = add_pairs(sums[g][1], weight, high);
        }
#else
        const hn::Vec<Words> tokens[2] = {even, odd};
        for (int token = 0; token < 2; ++token) {
            const Unsigned pairs = hn::BitCast(u32, tokens[token]);
            const Floats left = even_of(pairs), right = odd_of(pairs);
            for (int g = 0; g < G; ++g) {
                const Floats weight = hn::BitCast(f32, hn::Set(u32, weights[token * LANES + g]));
                sums[g][0] = hn::MulAdd(weight, left, sums[g][0]);
                sums[g][1] = hn::MulAdd(weight, right, sums[g][1]);
            }
        }
#endif
    }
    for (int g = 0; g < heads; ++g)
        for (int side = 0; side < 2; ++side) hn::StoreU(sums[g][side], f32, kept + (2 * g + side) * LANES);
#endif
}

// Does the work of `mix_values` for all query heads of a piece.
void mix_piece(const uint32_t* weights, const Rows& values, int64_t first, int64_t last, int64_t d, int heads,
               bool fresh, float* kept) {
    for (int from = 0; from < heads; from += MIXED) {
        const int some = std::min(MIXED, heads - from);
        const auto mix = some == 1 ? mix_values<1> : some <= 2 ? mix_values<2> : some <= 4 ? mix_values<4> : mix_values<MIXED>;
        mix(weights + from, values, first, last, d, some, fresh, kept + 2 * from * LANES);
    }
}

// Does the work of `mix_values` for V vectors of floats, dimensions d..d + V * LANES - 1, and one query head. kept (V, LANES).
template <int V>
void mix_floats(const uint32_t* weights, const RowsOf<float>& values, int64_t first, int64_t last, int64_t d, bool fresh,
                float* kept) {
    Floats sums[V];
    for (int v = 0; v < V; ++v) sums[v] = fresh ? hn::Zero(f32) : hn::LoadU(f32, kept + v * LANES);
    const float* at = values.at(first) + d;
    for (int64_t t = first; t < last; ++t, at += values.stride, weights += LANES) {
        const Floats weight = hn::BitCast(f32, hn::Set(u32, *weights));
        for (int v = 0; v < V; ++v) sums[v] = hn::MulAdd(weight, hn::LoadU(f32, at + v * LANES), sums[v]);
    }
    for (int v = 0; v < V; ++v) hn::StoreU(sums[v], f32, kept + v * LANES);
}

// Adds the weighted values of tokens [first, last) to the sums kept of a piece's query heads, in the layout of `Decode`.
void mix_stretch(const uint32_t* weights, const Rows& values, int64_t first, int64_t last, int64_t dim, int heads, bool fresh,
                 float* kept) {
    for (int64_t d = 0; d < dim; d += DIMS)
        mix_piece(weights, values, first, last, d, heads, fresh, kept + d / DIMS * 2 * LANES * LANES);
}

[[maybe_unused]] void mix_stretch(const uint32_t* weights, const RowsOf<float>& values, int64_t first, int64_t last, int64_t dim,
                                  int heads, bool fresh, float* kept) {
    for (int g = 0; g < heads; ++g)
        for (int64_t d = 0; d < dim;) {
            const int64_t vectors = (dim - d) / LANES;
            const auto mix = vectors >= 8 ? mix_floats<8> : vectors >= 4 ? mix_floats<4> : mix_floats<2>;
            mix(weights + g, values, first, last, d, fresh, kept + g * dim + d);
            d += (vectors >= 8 ? 8 : vectors >= 4 ? 4 : 2) * LANES;
        }
}

// Multiplies sums (heads, 2, LANES) by `inverse` and stores them to out, DIMS dimensions of each head, in their
// order. With bf16 products, values were interleaved within blocks of 16 bytes, so four dimensions come from one
// half of the sums, the next four from the other. Without, even dimensions are in one half, odd ones in the other.
void store_mixed(const float* sums, const float* inverse, int heads, bf16* out, int64_t stride) {
    for (int g = 0; g < heads; ++g, sums += 2 * LANES, out += stride) {
        const Floats scale = hn::Set(f32, inverse[g]);
        const Floats left = hn::Mul(scale, hn::LoadU(f32, sums)), right = hn::Mul(scale, hn::LoadU(f32, sums + LANES));
#if FOVEA_BF16_DOT && HWY_ARCH_ARM
        store(out, left), store(out + LANES, right);  // a vector is one block
#elif FOVEA_BF16_DOT
        const hn::Repartition<uint64_t, Halves> fours;
        const auto low = hn::BitCast(fours, narrow(left)), high = hn::BitCast(fours, narrow(right));
        hn::StoreU(hn::BitCast(halves, hn::InterleaveWholeLower(fours, low, high)), halves, out);
        hn::StoreU(hn::BitCast(halves, hn::InterleaveWholeUpper(fours, low, high)), halves, out + LANES);
#else
        const auto low = hn::PromoteTo(u32, narrow(left)), high = hn::PromoteTo(u32, narrow(right));
        hn::StoreU(hn::BitCast(u16, hn::Or(low, hn::ShiftLeft<16>(high))), u16, out);
#endif
    }
}

// Divides the query heads of one KV head into pieces and gives them lanes of tiles. Returns the number of
// tiles.
int lay_out(Decode& scratch, const int64_t* rows, int64_t count, int64_t group, int64_t first_head, const Contexts& contexts,
            int64_t shared) {
    scratch.pieces.clear();
    int tile = 0, lane = 0;
    int64_t own = 0;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t from = 0; from < group; from += LANES) {
            const int some = static_cast<int>(std::min<int64_t>(LANES, group - from));
            if (lane + some > LANES) ++tile, lane = 0;
            scratch.pieces.push_back({rows[i], first_head + from, some, tile, lane, own});
            lane += some;
            own += (contexts.lengths[rows[i]] - contexts.own(rows[i], shared) + 1) / 2 * 2;
        }
    return tile + 1;
}

// The lanes of a piece.
FOVEA_INLINE auto lanes_of(const Piece& p) {
    return hn::And(hn::FirstN(f32, p.lane + p.count), hn::Not(hn::FirstN(f32, p.lane)));
}

// Fills the tiles of queries in 16 bits. Lanes without a query head are zero.
void round_queries(Decode& scratch, const bf16* query, int64_t query_stride, int tiles, int64_t dim) {
    scratch.whole.assign(tiles * dim / 2 * LANES, 0);
    scratch.query_scales.assign(tiles * LANES, 0);
    int16_t rounded[MAX_DIM];
    for (const Piece& p : scratch.pieces)
        for (int g = 0; g < p.count; ++g) {
            const int64_t lane = p.lane + g;
            scratch.query_scales[p.tile * LANES + lane] =
                whole_query(query + p.row * query_stride + (p.head + g) * dim, dim, rounded);
            for (int64_t pair = 0; pair < dim / 2; ++pair)
                std::memcpy(&scratch.whole[(p.tile * dim / 2 + pair) * LANES + lane], rounded + 2 * pair, 4);
        }
}

// Attention of rows that begin with the same `shared` tokens (a multiple of TOGETHER), for the query heads of one KV
// head.
void family(Decode& scratch, const bf16* query, int64_t query_stride, int64_t heads, const Contexts& contexts,
            int64_t kv_head, const int64_t* rows, int64_t count, int64_t shared, float scale, bf16* out) {
    const int64_t dim = contexts.dim, group = heads / contexts.kv_heads, tile_queries = dim / 2 * PAIR * LANES;
    const int tiles = lay_out(scratch, rows, count, group, kv_head * group, contexts, shared);
    const auto own = [&](const Piece& p) { return contexts.own(p.row, shared); };
    const auto length = [&](const Piece& p) { return contexts.lengths[p.row]; };
    const Piece& last = scratch.pieces.back();
    const int64_t common = tiles * shared, room = common + last.own + (length(last) - own(last) + 1) / 2 * 2;
    float* scores = fit(scratch.scores, room * LANES);
    // mix_values reads up to MIXED weights behind the last ones, and does not use them.
    uint32_t* weights = fit(scratch.weights, room / 2 * PAIR * LANES + MIXED);
    scratch.inverse.resize(tiles * LANES);
    scratch.queries.assign(tiles * tile_queries, 0);
    const int64_t block_sums = 2 * LANES * LANES, piece_sums = dim / DIMS * block_sums;
    float* sums = fit(scratch.sums, static_cast<int64_t>(scratch.pieces.size()) * piece_sums);
    for (const Piece& p : scratch.pieces)
        for (int g = 0; g < p.count; ++g)
            for (int64_t pair = 0; pair < dim / 2; ++pair)
                set_pair(&scratch.queries[p.tile * tile_queries + pair * PAIR * LANES + p.lane + g],
                         query + p.row * query_stride + (p.head + g) * dim + 2 * pair);

    if (WHOLE && contexts.pages.quantized) round_queries(scratch, query, query_stride, tiles, dim);
    const auto score = [&](int tile, const Source& source, const auto& keys, int64_t start, int64_t end, float* to) {
        if constexpr (std::is_same_v<std::decay_t<decltype(keys)>, Rows>)
            score_keys(&scratch.queries[tile * tile_queries], keys, start, end, dim, to);
        else
            score_whole(&scratch.whole[tile * dim / 2 * LANES], &scratch.query_scales[tile * LANES], keys, start, end, dim, to);
        if (source.scaled()) scale_scores(source, start, end, to);
    };
    const Source keys = contexts.keys(rows[0], kv_head), values = contexts.values(rows[0], kv_head);
    each_stretch(keys, 0, shared, scratch.keys, [&](const auto& some, int64_t start, int64_t end) {
        for (int tile = 0; tile < tiles; ++tile)
            score(tile, keys, some, start, end, scores + (tile * shared + start) * LANES);
    });
    for (const Piece& p : scratch.pieces) {
        const Source of_row = contexts.keys(p.row, kv_head);
        each_stretch(of_row, own(p), length(p), scratch.keys, [&](const auto& some, int64_t start, int64_t end) {
            score(p.tile, of_row, some, start, end, scores + (common + p.own + start - own(p)) * LANES);
        });
    }

    for (size_t at = 0; at < scratch.pieces.size();) {
        const int tile = scratch.pieces[at].tile;
        const float* of_tile = scores + tile * shared * LANES;
        Floats most = most_of(hn::Set(f32, -3.0e38f), of_tile, shared);
        size_t end = at;
        for (; end < scratch.pieces.size() && scratch.pieces[end].tile == tile; ++end) {
            const Piece& p = scratch.pieces[end];
            const int64_t start = own(p), seen = std::max(start, contexts.first(p.row));
            const Floats of_row = most_of(most, scores + (common + p.own + seen - start) * LANES, length(p) - seen);
            most = hn::IfThenElse(lanes_of(p), of_row, most);
        }
        Floats begun[LANES], total = hn::Zero(f32);
        for (Floats& sum : begun) sum = hn::Zero(f32);
        weigh_lanes(of_tile, 0, 0, shared, most, scale, values, begun, weights + tile * shared / 2 * PAIR * LANES);
        for (; at < end; ++at) {
            const Piece& p = scratch.pieces[at];
            Floats sums_of_row[LANES];
            std::copy(begun, begun + LANES, sums_of_row);
            weigh_lanes(scores + (common + p.own) * LANES, own(p), contexts.first(p.row), length(p), most, scale,
                        contexts.values(p.row, kv_head), sums_of_row, weights + (common + p.own) / 2 * PAIR * LANES);
            total = hn::IfThenElse(lanes_of(p), sum_of(sums_of_row), total);
        }
        hn::StoreU(hn::Div(hn::Set(f32, 1.0f), total), f32, &scratch.inverse[tile * LANES]);
    }

    // place: where the weights of the piece's tokens from `start` on are, counted in tokens.
    const auto mix = [&](size_t i, int64_t place, const auto& some, int64_t start, int64_t end, bool fresh) {
        const Piece& p = scratch.pieces[i];
        mix_stretch(weights + place / 2 * PAIR * LANES + p.lane, some, start, end, dim, p.count, fresh, sums + i * piece_sums);
    };
    each_stretch(values, 0, shared, scratch.values, [&](const auto& some, int64_t start, int64_t end) {
        for (size_t i = 0; i < scratch.pieces.size(); ++i)
            mix(i, scratch.pieces[i].tile * shared + start, some, start, end, start == 0);
    });
    for (size_t i = 0; i < scratch.pieces.size(); ++i) {
        const Piece& p = scratch.pieces[i];
        const int64_t begin = own(p);
        each_stretch(contexts.values(p.row, kv_head), begin, length(p), scratch.values,
                     [&](const auto& some, int64_t start, int64_t end) {
                         mix(i, common + p.own + start - begin, some, start, end, shared == 0 && start == begin);
                     });
        const float *inverse = &scratch.inverse[p.tile * LANES + p.lane], *mixed = sums + i * piece_sums;
        bf16* to = out + (p.row * heads + p.head) * dim;
        if (WHOLE && contexts.pages.quantized) {
            for (int64_t g = 0; g < p.count; ++g)
                for (int64_t d = g * dim; d < (g + 1) * dim; d += LANES)
                    store(to + d, hn::Mul(hn::Set(f32, inverse[g]), hn::LoadU(f32, mixed + d)));
        } else {
            for (int64_t d = 0; d < dim; d += DIMS) store_mixed(mixed + d / DIMS * block_sums, inverse, p.count, to + d, dim);
        }
    }
}

// All rows by family: rows[starts[f]..starts[f + 1]) are family f and begin with the same shared[f] tokens. A
// row that shares nothing is a family of its own.
struct Families {
    std::vector<int64_t> rows, starts, shared;
    std::vector<char> placed;

    // Forms the families from the given prefix groups. A family has at most `most` rows.
    void form(int64_t count, const PrefixGroups* given, int64_t most) {
        rows.clear(), starts.clear(), shared.clear();
        placed.assign(count, false);
        for (int64_t s = 0; given && s < given->count; ++s)
            for (int64_t i = 0; i < given->width && given->members[s * given->width + i] >= 0; ++i)
                add(given->members[s * given->width + i], i % most == 0, given->lengths[s] / TOGETHER * TOGETHER);
        for (int64_t row = 0; row < count; ++row)
            if (!placed[row]) add(row, true, 0);
        starts.push_back(count);
    }

    void add(int64_t row, bool founds, int64_t length) {
        if (founds) starts.push_back(static_cast<int64_t>(rows.size())), shared.push_back(length);
        rows.push_back(row);
        placed[row] = true;
    }
};

}  // namespace

extern "C" {

// Attention of one query per row over the pages of its sequence.
// query: rows (heads, dim), `query_stride` values apart.
// tables (rows, width): block numbers. lengths (rows): tokens of each context, the row's own included.
// firsts (rows): the first token that each row reads, or null: the first of its context. Not together with shared.
// shared: rows that begin with the same blocks, or null; every row is in at most one group.
// out (rows, heads, dim).
void fovea_decode_attention(const bf16* query, int64_t query_stride, int64_t rows, int64_t heads, int64_t kv_heads,
                            int64_t dim, const Pages* kv, const int64_t* tables, int64_t width,
                            const int64_t* lengths, const int64_t* firsts, const PrefixGroups* shared, float scale,
                            bf16* out, int threads) {
    thread_local Families families;
    // Families are limited in size so that every thread has work.
    families.form(rows, shared, std::max<int64_t>(1, rows * kv_heads / threads));
    const Contexts contexts{*kv, kv_heads, dim, tables, width, lengths, firsts};
    const Families& all = families;  // the calling thread's families, for all threads
    parallel<TileScope>(threads, static_cast<int64_t>(all.shared.size()) * kv_heads, 1, [&](int64_t part) {
        thread_local Decode scratch;
        const int64_t f = part / kv_heads;
        family(scratch, query, query_stride, heads, contexts, part % kv_heads, &all.rows[all.starts[f]],
               all.starts[f + 1] - all.starts[f], all.shared[f], scale, out);
    });
}

}  // extern "C"

// Attention of decodes: one query per sequence, which reads the sequence's pages in place. No copy, no
// padding, no mask.
//
// Sequences that begin with the same pages (questions about one picture) form a family and read these pages
// once. The shared tokens are processed in stretches. While a stretch is in the processor's cache, it is
// scored (multiplied with the queries) or mixed (its values are added up by weight) for all rows of the
// family. No partial results are merged afterwards. Each query head has a lane and sums of its own, over its
// tokens in their order. So a row's result does not depend on its family, to the last bit.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "tiles.h"

using namespace fovea;

namespace {

constexpr int KEYS = 8;      // keys whose scores are computed together
constexpr int MIXED = 8;     // query heads whose sums are kept in registers together
constexpr int STRETCH = 256; // shared tokens that are processed together: 64 bytes of each stay in L1

// Up to 16 query heads of one row, in neighbouring lanes of one tile. head, lane: the first of them.
struct Piece {
    int64_t row, head;
    int count, tile, lane;
    int64_t own;  // where the scores of the row's own tokens begin, counted in tokens
};

// Scratch memory for one family and one KV head.
struct Decode {
    std::vector<Piece> pieces;
    std::vector<int32_t> queries;   // tiles of (dim / 2, 16): two bf16 of each query head
    std::vector<float> scores;      // (tiles, shared, 16), then (own tokens, 16) per piece: 16 query heads
    std::vector<uint32_t> weights;  // like scores, with tokens / 2: two bf16 weights of neighbouring tokens
    std::vector<float> inverse;     // (tiles, 16): 1 / sum of weights
    std::vector<float> sums;        // (pieces, 16, 32): weighted sums of values, 32 dimensions at a time
};

struct Pages {
    const bf16* kv;
    int64_t block, kv_heads, dim;
    const int64_t *tables, width, *lengths;
    int64_t stride() const { return 2 * kv_heads * dim; }
    Rows keys(int64_t row, int64_t head) const { return {kv + head * dim, stride(), tables + row * width, block}; }
    Rows values(int64_t row, int64_t head) const {
        return {kv + (kv_heads + head) * dim, stride(), tables + row * width, block};
    }
};

// scores (last - first, 16) = scale * products of up to 16 query heads with the keys of tokens [first, last).
// Each query head has a lane.
void score_keys(const int32_t* queries, const Rows& keys, int64_t first, int64_t last, int64_t dim, float scale,
                float* scores) {
    for (int64_t start = first; start < last; start += KEYS) {
        const bf16* key[KEYS];
        for (int64_t i = 0; i < KEYS; ++i) {
            key[i] = keys.at(std::min(start + i, last - 1));
            const bf16* later = keys.at(std::min(start + KEYS + i, last - 1));
            for (int64_t d = 0; d < dim; d += 32) _mm_prefetch(reinterpret_cast<const char*>(later + d), _MM_HINT_T0);
        }
        __m512 sums[KEYS];
        for (auto& sum : sums) sum = _mm512_setzero_ps();
        for (int64_t pair = 0; pair < dim / 2; ++pair) {
            const __m512i tile = _mm512_loadu_si512(queries + pair * LANES);
            for (int i = 0; i < KEYS; ++i)
                sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)pair_of(key[i], pair), (__m512bh)tile);
        }
        for (int64_t i = 0; i < KEYS && start + i < last; ++i)
            _mm512_storeu_ps(scores + (start - first + i) * LANES, _mm512_mul_ps(sums[i], _mm512_set1_ps(scale)));
    }
}

// The maximum of `most` and of scores (count, 16), lane by lane.
__m512 most_of(__m512 most, const float* scores, int64_t count) {
    for (int64_t t = 0; t < count; ++t) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + t * LANES));
    return most;
}

// Turns scores (count, 16) into weights e^(score - most), stored in bf16 by pairs of tokens. Returns `sum`
// plus these weights. Only a row's own tokens may be an odd number.
__m512 weigh_lanes(const float* scores, int64_t count, __m512 most, __m512 sum, uint32_t* weights) {
    for (int64_t t = 0; t < count; t += 2) {
        const __m512 even = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + t * LANES), most));
        const __m512 odd = t + 1 < count ? exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + (t + 1) * LANES), most))
                                         : _mm512_setzero_ps();
        sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
        const __m512i low = _mm512_cvtepu16_epi32(narrow(even)), high = _mm512_cvtepu16_epi32(narrow(odd));
        _mm512_storeu_si512(weights + t / 2 * LANES, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    return sum;
}

// Adds the weighted values of tokens [first, last), dimensions d..d + 31, to the sums kept (heads, 2, 16) of
// `heads` (at most G) query heads, whose weights begin at `weights`. fresh: overwrite the sums. Their
// dimensions are interleaved, see `store_mixed`.
template <int G>
void mix_values(const uint32_t* weights, const Rows& values, int64_t first, int64_t last, int64_t d, int heads,
                bool fresh, float* kept) {
    __m512 sums[G][2];
    for (int g = 0; g < G; ++g)
        for (int side = 0; side < 2; ++side)
            sums[g][side] = fresh || g >= heads ? _mm512_setzero_ps() : _mm512_loadu_ps(kept + (2 * g + side) * LANES);
    for (int64_t t = first; t < last; t += 2) {
        const __m512i even = _mm512_loadu_si512(values.at(t) + d);
        const __m512i odd = _mm512_loadu_si512(values.at(std::min(t + 1, last - 1)) + d);
        _mm_prefetch(reinterpret_cast<const char*>(values.at(std::min(t + 8, last - 1)) + d), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(values.at(std::min(t + 9, last - 1)) + d), _MM_HINT_T0);
        const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
        for (int g = 0; g < G; ++g) {
            const __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[(t - first) / 2 * LANES + g]));
            sums[g][0] = _mm512_dpbf16_ps(sums[g][0], (__m512bh)weight, (__m512bh)low);
            sums[g][1] = _mm512_dpbf16_ps(sums[g][1], (__m512bh)weight, (__m512bh)high);
        }
    }
    for (int g = 0; g < heads; ++g)
        for (int side = 0; side < 2; ++side) _mm512_storeu_ps(kept + (2 * g + side) * LANES, sums[g][side]);
}

// Does the work of `mix_values` for all query heads of a piece.
void mix_piece(const uint32_t* weights, const Rows& values, int64_t first, int64_t last, int64_t d, int heads,
               bool fresh, float* kept) {
    for (int from = 0; from < heads; from += MIXED) {
        const int some = std::min(MIXED, heads - from);
        const auto mix = some == 1 ? mix_values<1> : some <= 2 ? mix_values<2> : some <= 4 ? mix_values<4> : mix_values<8>;
        mix(weights + from, values, first, last, d, some, fresh, kept + 2 * from * LANES);
    }
}

// Multiplies sums (heads, 2, 16) by `inverse` and stores them to out, 32 dimensions of each head, in their
// order. The interleaving in `mix_values` worked within lanes of 128 bits, so four dimensions come from one
// half of the sums, the next four from the other.
void store_mixed(const float* sums, const float* inverse, int heads, bf16* out, int64_t stride) {
    const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i right = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int g = 0; g < heads; ++g) {
        const __m512 scale = _mm512_set1_ps(inverse[g]);
        const __m512 low = _mm512_loadu_ps(sums + 2 * g * LANES), high = _mm512_loadu_ps(sums + (2 * g + 1) * LANES);
        store16(out + g * stride, _mm512_mul_ps(scale, _mm512_permutex2var_ps(low, left, high)));
        store16(out + g * stride + 16, _mm512_mul_ps(scale, _mm512_permutex2var_ps(low, right, high)));
    }
}

// Divides the query heads of one KV head into pieces and gives them lanes of tiles. Returns the number of
// tiles.
int lay_out(Decode& scratch, const int64_t* rows, int64_t count, int64_t group, int64_t first_head,
            const int64_t* lengths, int64_t shared) {
    scratch.pieces.clear();
    int tile = 0, lane = 0;
    int64_t own = 0;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t from = 0; from < group; from += LANES) {
            const int some = static_cast<int>(std::min<int64_t>(LANES, group - from));
            if (lane + some > LANES) ++tile, lane = 0;
            scratch.pieces.push_back({rows[i], first_head + from, some, tile, lane, own});
            lane += some;
            own += (lengths[rows[i]] - shared + 1) / 2 * 2;
        }
    return tile + 1;
}

// Attention of rows that begin with the same `shared` tokens (an even number), for the query heads of one KV
// head.
void family(Decode& scratch, const bf16* query, int64_t query_stride, int64_t heads, const Pages& pages, int64_t kv_head,
            const int64_t* rows, int64_t count, int64_t shared, float scale, bf16* out) {
    const int64_t dim = pages.dim, group = heads / pages.kv_heads, tile_queries = dim / 2 * LANES;
    const int tiles = lay_out(scratch, rows, count, group, kv_head * group, pages.lengths, shared);
    const Piece& last = scratch.pieces.back();
    const int64_t common = tiles * shared, room = common + last.own + (pages.lengths[last.row] - shared + 1) / 2 * 2;
    float* scores = fit(scratch.scores, room * LANES);
    // mix_values reads up to MIXED weights behind the last ones, and does not use them.
    uint32_t* weights = fit(scratch.weights, room / 2 * LANES + MIXED);
    scratch.inverse.resize(tiles * LANES);
    scratch.queries.assign(tiles * tile_queries, 0);
    const int64_t piece_sums = 2 * LANES * LANES;
    float* sums = fit(scratch.sums, static_cast<int64_t>(scratch.pieces.size()) * piece_sums);
    for (const Piece& p : scratch.pieces)
        for (int g = 0; g < p.count; ++g)
            for (int64_t pair = 0; pair < dim / 2; ++pair)
                std::memcpy(&scratch.queries[p.tile * tile_queries + pair * LANES + p.lane + g],
                            query + p.row * query_stride + (p.head + g) * dim + 2 * pair, 4);

    const Rows keys = pages.keys(rows[0], kv_head), values = pages.values(rows[0], kv_head);
    for (int64_t start = 0; start < shared; start += STRETCH)
        for (int tile = 0; tile < tiles; ++tile)
            score_keys(&scratch.queries[tile * tile_queries], keys, start, std::min(start + STRETCH, shared), dim, scale,
                       scores + (tile * shared + start) * LANES);
    for (const Piece& p : scratch.pieces)
        score_keys(&scratch.queries[p.tile * tile_queries], pages.keys(p.row, kv_head), shared, pages.lengths[p.row], dim,
                   scale, scores + (common + p.own) * LANES);

    for (size_t at = 0; at < scratch.pieces.size();) {
        const int tile = scratch.pieces[at].tile;
        const float* of_tile = scores + tile * shared * LANES;
        __m512 most = most_of(_mm512_set1_ps(-3.0e38f), of_tile, shared);
        size_t end = at;
        for (; end < scratch.pieces.size() && scratch.pieces[end].tile == tile; ++end) {
            const Piece& p = scratch.pieces[end];
            const __mmask16 lanes = static_cast<__mmask16>(((1u << p.count) - 1) << p.lane);
            most = _mm512_mask_mov_ps(most, lanes, most_of(most, scores + (common + p.own) * LANES, pages.lengths[p.row] - shared));
        }
        const __m512 begun = weigh_lanes(of_tile, shared, most, _mm512_setzero_ps(), weights + tile * shared / 2 * LANES);
        __m512 total = begun;
        for (; at < end; ++at) {
            const Piece& p = scratch.pieces[at];
            const __mmask16 lanes = static_cast<__mmask16>(((1u << p.count) - 1) << p.lane);
            total = _mm512_mask_mov_ps(total, lanes, weigh_lanes(scores + (common + p.own) * LANES, pages.lengths[p.row] - shared,
                                                                most, begun, weights + (common + p.own) / 2 * LANES));
        }
        _mm512_storeu_ps(&scratch.inverse[tile * LANES], _mm512_div_ps(_mm512_set1_ps(1.0f), total));
    }

    for (int64_t d = 0; d < dim; d += 32) {
        for (int64_t start = 0; start < shared; start += STRETCH)
            for (size_t i = 0; i < scratch.pieces.size(); ++i) {
                const Piece& p = scratch.pieces[i];
                mix_piece(weights + (p.tile * shared + start) / 2 * LANES + p.lane, values, start,
                          std::min(start + STRETCH, shared), d, p.count, start == 0, sums + i * piece_sums);
            }
        for (size_t i = 0; i < scratch.pieces.size(); ++i) {
            const Piece& p = scratch.pieces[i];
            mix_piece(weights + (common + p.own) / 2 * LANES + p.lane, pages.values(p.row, kv_head), shared,
                      pages.lengths[p.row], d, p.count, shared == 0, sums + i * piece_sums);
            store_mixed(sums + i * piece_sums, &scratch.inverse[p.tile * LANES + p.lane], p.count,
                        out + (p.row * heads + p.head) * dim + d, dim);
        }
    }
}

// All rows by family: rows[starts[f]..starts[f + 1]) are family f and begin with the same shared[f] tokens. A
// row that shares nothing is a family of its own.
struct Families {
    std::vector<int64_t> rows, starts, shared;
    std::vector<char> placed;

    // Forms the families from the given shares. A family has at most `most` rows.
    void form(int64_t count, const DecodeShares* given, int64_t most) {
        rows.clear(), starts.clear(), shared.clear();
        placed.assign(count, false);
        for (int64_t s = 0; given && s < given->count; ++s)
            for (int64_t i = 0; i < given->width && given->members[s * given->width + i] >= 0; ++i)
                add(given->members[s * given->width + i], i % most == 0, given->lengths[s] / 2 * 2);
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
// query: rows (heads, dim), `query_stride` values apart. kv (blocks, block, 2, kv_heads, dim).
// tables (rows, width): block numbers. lengths (rows): tokens of each context, the row's own included.
// shared: rows that begin with the same blocks, or null; every row is in at most one share.
// out (rows, heads, dim).
void fovea_decode_attention(const bf16* query, int64_t query_stride, int64_t rows, int64_t heads, int64_t kv_heads,
                            int64_t dim, const bf16* kv, int64_t block, const int64_t* tables, int64_t width,
                            const int64_t* lengths, const DecodeShares* shared, float scale, bf16* out, int threads) {
    thread_local Families families;
    // Families are limited in size so that every thread has work.
    families.form(rows, shared, std::max<int64_t>(1, rows * kv_heads / threads));
    const Pages pages{kv, block, kv_heads, dim, tables, width, lengths};
    const Families& all = families;  // the calling thread's families, for all threads
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) collapse(2)
    for (size_t f = 0; f < all.shared.size(); ++f) {
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
            thread_local Decode scratch;
            family(scratch, query, query_stride, heads, pages, kv_head, &all.rows[all.starts[f]],
                   all.starts[f + 1] - all.starts[f], all.shared[f], scale, out);
        }
    }
}

}  // extern "C"

// Layers with a state: short convolutions and the gated delta rule, token by token. A token's result depends on the
// state before it alone, not on how the tokens are divided among steps, so it has the same bits in every schedule.

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "team.h"

using namespace fovea;

namespace {

// Consecutive tokens of one sequence: a row of `RunTable.runs` in kernels/states.py.
struct Run {
    int64_t row, count, source, first_save, last_save;
};
// After `tokens` tokens of a run the state is written to a slot: a row of `RunTable.saves`.
struct Save {
    int64_t tokens, slot;
};

constexpr int64_t NOTHING = -1;  // the source of a sequence that begins: its state is zero
constexpr int64_t CHANNELS = 16 * LANES;  // channels of a convolution that one task computes
constexpr float NORM_EPS = 1e-6f;
constexpr int COLUMNS = 4;  // vectors of a state's columns that one task computes: their sums stay in registers

// The convolution of one sequence's runs over channels [first, last). Inputs are read from x, and those before a run
// from its source. width - 1 inputs are a state.
void convolve(const bf16* x, int64_t stride, int64_t channels, int64_t width, const bf16* weight, const bf16* bias,
              bool silu, bf16* state, const Run* runs, int64_t count, const Save* saves, int64_t first, int64_t last,
              bf16* out) {
    thread_local std::vector<bf16> scratch;
    const int64_t kept = width - 1, span = last - first;
    bf16* before = fit(scratch, kept * span);
    for (int64_t r = 0; r < count; ++r) {
        const Run& run = runs[r];
        // A copy, because a save may overwrite the source before later tokens are computed.
        for (int64_t i = 0; i < kept; ++i)
            if (run.source == NOTHING) std::memset(before + i * span, 0, span * sizeof(bf16));
            else std::memcpy(before + i * span, state + (run.source * kept + i) * channels + first, span * sizeof(bf16));
        const auto input = [&](int64_t token) {
            return token < 0 ? before + (kept + token) * span : x + (run.row + token) * stride + first;
        };
        for (int64_t token = 0; token < run.count; ++token)
            for (int64_t c = 0; c < span; c += LANES) {
                const int64_t left = span - c;
                Floats sum = bias ? load(bias + first + c, left) : hn::Zero(f32);
                for (int64_t i = 0; i < width; ++i)
                    sum = hn::MulAdd(load(input(token - kept + i) + c, left), load(weight + i * channels + first + c, left), sum);
                if (silu) sum = rounded(sum), sum = hn::Mul(sum, sigmoid(sum));
                store(out + (run.row + token) * channels + first + c, sum, left);
            }
        for (int64_t s = run.first_save; s < run.last_save; ++s)
            for (int64_t i = 0; i < kept; ++i)
                std::memcpy(state + (saves[s].slot * kept + i) * channels + first, input(saves[s].tokens - kept + i),
                            span * sizeof(bf16));
    }
}

// The numbers of a rule that all its tasks share.
struct Rule {
    const float *query, *key;  // (rows, key_heads, key_dim), scaled
    const bf16* value;         // (rows, heads, value_dim), `stride` values from row to row
    const float *beta, *decay;  // (rows, heads); decay as a factor
    int64_t stride, key_heads, heads, key_dim, value_dim;
    float* state;  // (slots, heads, key_dim, value_dim)
    const Save* saves;
    bf16* out;  // (rows, heads, value_dim)
};

// One token: columns [0, N vectors) of the matrix S (key_dim, N * LANES). `left` of these columns exist.
template <int N>
FOVEA_INLINE void token_step(float* matrix, const float* query, const float* key, const bf16* value, int64_t left,
                             float beta, float decay, int64_t key_dim, bf16* out) {
    constexpr int64_t WIDE = N * LANES;
    Floats sums[N];
    for (auto& sum : sums) sum = hn::Zero(f32);
    for (int64_t k = 0; k < key_dim; ++k) {
        const Floats scale = hn::Set(f32, key[k]);
        for (int n = 0; n < N; ++n) sums[n] = hn::MulAdd(hn::LoadU(f32, matrix + k * WIDE + n * LANES), scale, sums[n]);
    }
    const Floats factor = hn::Set(f32, decay);
    Floats change[N], result[N];
    for (int n = 0; n < N; ++n) {
        const Floats wanted = load(value + n * LANES, left - n * LANES);
        change[n] = hn::Mul(hn::Set(f32, beta), hn::NegMulAdd(factor, sums[n], wanted));
        result[n] = hn::Zero(f32);
    }
    for (int64_t k = 0; k < key_dim; ++k) {
        const Floats scale = hn::Set(f32, key[k]), read = hn::Set(f32, query[k]);
        for (int n = 0; n < N; ++n) {
            float* at = matrix + k * WIDE + n * LANES;
            const Floats next = hn::MulAdd(scale, change[n], hn::Mul(factor, hn::LoadU(f32, at)));
            hn::StoreU(next, f32, at);
            result[n] = hn::MulAdd(read, next, result[n]);
        }
    }
    for (int n = 0; n < N; ++n) store(out + n * LANES, result[n], left - n * LANES);
}

// All runs of a sequence, for the columns of one head from `first` on.
void delta_columns(const Rule& rule, const Run* runs, int64_t count, int64_t head, int64_t first) {
    constexpr int64_t WIDE = COLUMNS * LANES;
    thread_local std::vector<float> scratch;
    float* matrix = fit_aligned(scratch, rule.key_dim * WIDE);
    const int64_t left = std::min<int64_t>(WIDE, rule.value_dim - first), key_head = head / (rule.heads / rule.key_heads);
    const auto slot = [&](int64_t number) {
        return rule.state + (number * rule.heads + head) * rule.key_dim * rule.value_dim + first;
    };
    for (int64_t r = 0; r < count; ++r) {
        const Run& run = runs[r];
        for (int64_t k = 0; k < rule.key_dim; ++k) {
            std::memset(matrix + k * WIDE, 0, WIDE * sizeof(float));
            if (run.source != NOTHING)
                std::memcpy(matrix + k * WIDE, slot(run.source) + k * rule.value_dim, left * sizeof(float));
        }
        int64_t save = run.first_save;
        for (int64_t token = 0; token < run.count; ++token) {
            const int64_t row = run.row + token, at = row * rule.key_heads + key_head, of = row * rule.heads + head;
            token_step<COLUMNS>(matrix, rule.query + at * rule.key_dim, rule.key + at * rule.key_dim,
                                rule.value + row * rule.stride + head * rule.value_dim + first, left, rule.beta[of],
                                rule.decay[of], rule.key_dim, rule.out + of * rule.value_dim + first);
            for (; save < run.last_save && rule.saves[save].tokens == token + 1; ++save)
                for (int64_t k = 0; k < rule.key_dim; ++k)
                    std::memcpy(slot(rule.saves[save].slot) + k * rule.value_dim, matrix + k * WIDE, left * sizeof(float));
        }
    }
}

// out (dim) = x (dim) scaled to length `length`.
void normalized(const bf16* x, int64_t dim, float length, float* out) {
    Floats sum = hn::Zero(f32);
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats v = load(x + i, dim - i);
        sum = hn::MulAdd(v, v, sum);
    }
    const Floats scale = hn::Set(f32, length / std::sqrt(hn::ReduceSum(f32, sum) + NORM_EPS));
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats v = hn::Mul(load(x + i, dim - i), scale);
        if (dim - i >= LANES) hn::StoreU(v, f32, out + i);
        else hn::StoreN(v, f32, out + i, dim - i);
    }
}

}  // namespace

extern "C" {

// Each channel of x (rows, channels; `stride` values from row to row) convolved over `width` tokens of its sequence.
// weight (width, channels): the last row belongs to the token itself. bias (channels), or null. state (slots, width - 1,
// channels). starts (sequences + 1): the first run of each sequence. out (rows, channels).
void fovea_short_conv(const bf16* x, int64_t stride, int64_t, int64_t channels, int64_t width, const bf16* weight,
                      const bf16* bias, int silu, bf16* state, const int64_t* starts, const int64_t* runs,
                      const int64_t* saves, int64_t sequences, bf16* out, int threads) {
    const int64_t parts = (channels + CHANNELS - 1) / CHANNELS;
    parallel(threads, sequences * parts, 1, [&](int64_t task) {
        const int64_t sequence = task / parts, first = task % parts * CHANNELS;
        convolve(x, stride, channels, width, weight, bias, silu, state,
                 reinterpret_cast<const Run*>(runs) + starts[sequence], starts[sequence + 1] - starts[sequence],
                 reinterpret_cast<const Save*>(saves), first, std::min(first + CHANNELS, channels), out);
    });
}

// The gated delta rule, see kernels/base.py. qkv (rows, 2 * key_heads * key_dim + heads * value_dim). beta, step (rows,
// heads). log_rate, bias (heads): a token's decay is exp(-e^log_rate * softplus(step + bias)). state (slots, heads, key_dim, value_dim). out (rows, heads, value_dim).
void fovea_gated_delta(const bf16* qkv, int64_t rows, const float* beta, const float* step, const float* log_rate,
                       const float* bias, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim, float* state, const int64_t* starts,
                       const int64_t* runs, const int64_t* saves, int64_t sequences, bf16* out, int threads) {
    thread_local std::vector<float> scratch;
    const int64_t keys = key_heads * key_dim, stride = 2 * keys + heads * value_dim;
    float* query = fit(scratch, rows * (2 * keys + heads));
    float *key = query + rows * keys, *factor = key + rows * keys;
    const float length = 1.0f / std::sqrt(static_cast<float>(key_dim));
    each_row(threads, rows, 2 * keys, [&](int64_t row) {
        for (int64_t head = 0; head < key_heads; ++head) {
            const bf16* at = qkv + row * stride + head * key_dim;
            normalized(at, key_dim, length, query + row * keys + head * key_dim);
            normalized(at + keys, key_dim, 1.0f, key + row * keys + head * key_dim);
        }
        for (int64_t head = 0; head < heads; ++head) {
            const float x = step[row * heads + head] + bias[head], softplus = x > 20.0f ? x : std::log1p(std::exp(x));
            factor[row * heads + head] = std::exp(-std::exp(log_rate[head]) * softplus);
        }
    });
    const Rule rule{query, key, qkv + 2 * keys, beta, factor, stride, key_heads, heads, key_dim, value_dim, state,
                    reinterpret_cast<const Save*>(saves), out};
    constexpr int64_t WIDE = COLUMNS * LANES;
    const int64_t parts = (value_dim + WIDE - 1) / WIDE;
    parallel(threads, sequences * heads * parts, 1, [&](int64_t task) {
        const int64_t sequence = task / (heads * parts), head = task / parts % heads, first = task % parts * WIDE;
        delta_columns(rule, reinterpret_cast<const Run*>(runs) + starts[sequence], starts[sequence + 1] - starts[sequence],
                      head, first);
    });
}

// out = RMS norm of x times silu of gate; x, out (rows, width), weight (width). Rows of the gate are `stride` apart.
void fovea_gated_norm(const bf16* x, const bf16* gate, int64_t stride, int64_t rows, int64_t width, const bf16* weight,
                      float eps, bf16* out, int threads) {
    fovea_rms_norm(x, rows, width, weight, eps, 0, out, threads);
    each_row(threads, rows, width, [&](int64_t row) {
        for (int64_t i = 0; i < width; i += LANES) {
            const Floats g = load(gate + row * stride + i, width - i), v = load(out + row * width + i, width - i);
            store(out + row * width + i, hn::Mul(v, hn::Mul(g, sigmoid(g))), width - i);
        }
    });
}

}  // extern "C"

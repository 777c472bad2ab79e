// A mixture of experts: every row is computed by the experts that a router has chosen for it.
//
// The rows are sorted by expert, so that each expert's weights are read once, and those of experts that nobody has
// chosen are not read. The panels of all experts are the work of one call, so the threads wait for each other twice per
// layer and not for every expert. A row's results are added in the order of its choices, which depends on that row alone.

#include <algorithm>
#include <cmath>
#include <vector>

#include "pages.h"
#include "product.h"
#include "team.h"

using namespace fovea;

namespace {

// Memory of the calling thread.
struct Room {
    std::vector<int64_t> chosen, counts, used, places;
    std::vector<float> scales;
    std::vector<RowRange> ranges;
    std::vector<bf16> inputs, inner, outputs;
};

// Chooses the `active` experts with the highest logits, of equal ones the first. Their scales are their probabilities
// among all experts, divided by the sum of the chosen ones and rounded to bf16.
void choose(const bf16* logits, int64_t experts, int64_t active, int64_t* chosen, float* scales) {
    float highest = widen(logits[0]), sum = 0.0f;
    for (int64_t expert = 1; expert < experts; ++expert) highest = std::max(highest, widen(logits[expert]));
    for (int64_t i = 0; i < active; ++i) {
        int64_t best = -1;
        for (int64_t expert = 0; expert < experts; ++expert)
            if ((best < 0 || widen(logits[expert]) > widen(logits[best])) && std::find(chosen, chosen + i, expert) == chosen + i)
                best = expert;
        chosen[i] = best;
        // The sum over all experts would be divided out again.
        scales[i] = std::exp(widen(logits[best]) - highest);
        sum += scales[i];
    }
    for (int64_t i = 0; i < active; ++i) scales[i] = widen(narrow(scales[i] / sum));
}

// Sorts the choices by expert. used: the chosen experts. ranges: the rows of each of them, without a weight. places
// (count): the sorted row of every choice.
void sort_choices(const int64_t* chosen, int64_t count, int64_t experts, Room& room) {
    room.counts.assign(experts, 0);
    for (int64_t i = 0; i < count; ++i) ++room.counts[chosen[i]];
    room.used.clear(), room.ranges.clear();
    int64_t start = 0;
    for (int64_t expert = 0; expert < experts; ++expert) {
        const int64_t rows = room.counts[expert];
        if (rows) room.used.push_back(expert), room.ranges.push_back({nullptr, start, rows});
        room.counts[expert] = start;  // from here on: the place of the expert's next row
        start += rows;
    }
    int64_t* places = grown(room.places, count);
    for (int64_t i = 0; i < count; ++i) places[i] = room.counts[chosen[i]]++;
}

// Multiplies the sorted rows x (rows, k) with the weights of their experts.
void multiply_sorted(Room& room, const Weight* const* weights, const bf16* x, int64_t rows, int kind, bf16* out,
                     int threads) {
    const int64_t count = static_cast<int64_t>(room.used.size());
    for (int64_t i = 0; i < count; ++i) room.ranges[i].weight = weights[room.used[i]];
    multiply(room.ranges.data(), count, x, room.ranges[0].weight->k, rows, kind, nullptr, out,
             width_of(*room.ranges[0].weight, kind), threads);
}

}  // namespace

extern "C" {

// out (rows, hidden) = sum of scale * expert(x) over the experts that are chosen by logits (rows, experts)
// [+ residual]. x, residual (rows, hidden); out may be the residual.
void fovea_experts(const Mixture* mixture, const bf16* x, int64_t rows, const bf16* logits, const bf16* residual,
                   bf16* out, int threads) {
    if (rows == 0) return;
    thread_local Room room;
    const int64_t experts = mixture->experts, active = mixture->active, count = rows * active;
    const int64_t hidden = mixture->gate_up[0]->k, width = mixture->down[0]->k;
    int64_t* chosen = grown(room.chosen, count);
    float* scales = grown(room.scales, count);
    each_row(threads, rows, active * experts, [&](int64_t row) {
        choose(logits + row * experts, experts, active, chosen + row * active, scales + row * active);
    });
    sort_choices(chosen, count, experts, room);
    const int64_t* places = room.places.data();
    bf16* inputs = grown(room.inputs, count * hidden);
    each_row(threads, count, hidden, [&](int64_t i) {
        std::memcpy(inputs + places[i] * hidden, x + i / active * hidden, hidden * sizeof(bf16));
    });
    bf16* inner = grown(room.inner, count * width);
    multiply_sorted(room, mixture->gate_up, inputs, count, static_cast<int>(mixture->activation), inner, threads);
    bf16* outputs = grown(room.outputs, count * hidden);
    multiply_sorted(room, mixture->down, inner, count, NONE, outputs, threads);
    each_row(threads, rows, active * hidden, [&](int64_t row) {
        for (int64_t at = 0; at < hidden; at += LANES) {
            const int64_t left = hidden - at;
            Floats sum = hn::Zero(f32);
            for (int64_t i = row * active; i < (row + 1) * active; ++i)
                sum = hn::MulAdd(hn::Set(f32, scales[i]), load(outputs + places[i] * hidden + at, left), sum);
            if (residual) sum = hn::Add(rounded(sum), load(residual + row * hidden + at, left));
            store(out + row * hidden + at, sum, left);
        }
    });
}

}  // extern "C"

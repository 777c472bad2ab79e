// Pictures become the input of a vision tower: their bytes are resized, normalised and cut into patches.
//
// Nothing here uses the team's threads: they belong to the engine's products, and a server prepares several pictures at a
// time, each in a thread of its own.

#include <algorithm>
#include <vector>

#include "simd.h"

using namespace fovea;

namespace {

// Resizing is Pillow's, to the last bit. A new pixel is a weighted sum of old ones in 32-bit integers, first along rows,
// then along columns. Weights have 22 bits after the point. Vectors multiply 16-bit numbers fastest, and two of them at
// once, so a weight is cut into high * 2^11 + low; the two sums are exact, and so is their sum.
constexpr int POINT = 22, CUT = 11;
constexpr int64_t ROWS = 16;         // rows that are resized side by side
constexpr int64_t STRIP = 256;       // old pixels of these rows, approximately, that are resized together
constexpr int64_t STEP = 3 * LANES;  // bytes that a call of `blend_step` computes
constexpr hn::Rebind<uint8_t, F> narrow_bytes;
constexpr hn::ScalableTag<int16_t> i16;
constexpr hn::FixedTag<uint8_t, 16> block;

// The weights of one axis. New pixel i is made of `counts[i]` old ones from `firsts[i]` on.
struct Axis {
    int64_t size;  // new pixels
    const int64_t *firsts, *counts;
    int64_t pairs;                 // pairs of weights per new pixel
    std::vector<int32_t> weights;  // (size, pairs, 2): high parts of two weights, then their low parts

    Axis(int64_t size, int64_t taps, const int64_t* firsts, const int64_t* counts, const int32_t* from)
        : size(size), firsts(firsts), counts(counts), pairs((taps + 1) / 2), weights(size * pairs * 2) {
        const auto two = [](int32_t first, int32_t second) {
            return static_cast<int32_t>((static_cast<uint32_t>(first) & 0xFFFF) | static_cast<uint32_t>(second) << 16);
        };
        for (int64_t i = 0; i < size; ++i)
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const int32_t a = from[i * taps + 2 * pair], b = 2 * pair + 1 < taps ? from[i * taps + 2 * pair + 1] : 0;
                int32_t* to = &weights[(i * pairs + pair) * 2];
                to[0] = two(a >> CUT, b >> CUT);
                to[1] = two(a & ((1 << CUT) - 1), b & ((1 << CUT) - 1));
            }
    }

    int64_t end(int64_t i) const { return firsts[i] + counts[i]; }
};

// STEP bytes of new pixel `pixel`, from byte `at` on. row(i): the bytes of old pixel or row i.
template <class Row>
FOVEA_INLINE void blend_step(const Axis& axis, int64_t pixel, const Row& row, int64_t at, uint8_t* out) {
    Ints high[3], low[3];
    for (int v = 0; v < 3; ++v) high[v] = hn::Zero(i32), low[v] = hn::Set(i32, 1 << (POINT - 1));
    const int64_t first = axis.firsts[pixel], last = axis.end(pixel) - 1;
    const int32_t* weights = &axis.weights[pixel * axis.pairs * 2];
    for (int64_t i = first; i <= last; i += 2, weights += 2) {
        const uint8_t *a = row(i) + at, *b = row(std::min(i + 1, last)) + at;
        const auto both_high = hn::BitCast(i16, hn::Set(i32, weights[0]));
        const auto both_low = hn::BitCast(i16, hn::Set(i32, weights[1]));
        for (int v = 0; v < 3; ++v) {
            const auto x = hn::PromoteTo(u32, hn::LoadU(narrow_bytes, a + v * LANES));
            const auto y = hn::PromoteTo(u32, hn::LoadU(narrow_bytes, b + v * LANES));
            const auto pair = hn::BitCast(i16, hn::Or(x, hn::ShiftLeft<16>(y)));
            high[v] = hn::Add(high[v], hn::WidenMulPairwiseAdd(i32, pair, both_high));
            low[v] = hn::Add(low[v], hn::WidenMulPairwiseAdd(i32, pair, both_low));
        }
    }
    for (int v = 0; v < 3; ++v) {
        const Ints sum = hn::ShiftRight<POINT>(hn::Add(hn::ShiftLeft<CUT>(high[v]), low[v]));
        hn::StoreU(hn::DemoteTo(narrow_bytes, sum), narrow_bytes, out + at + v * LANES);
    }
}

// Bytes 0 to `width` - 1 of a new pixel or row.
template <class Row>
inline void blend(const Axis& axis, int64_t pixel, const Row& row, int64_t width, uint8_t* out) {
    if (width >= STEP) {
        for (int64_t at = 0; at + STEP <= width; at += STEP) blend_step(axis, pixel, row, at, out);
        if (width % STEP) blend_step(axis, pixel, row, width - STEP, out);  // some bytes once more
        return;
    }
    const int32_t* weights = &axis.weights[pixel * axis.pairs * 2];
    const auto half = [](int32_t two, int64_t odd) { return static_cast<int16_t>(odd ? two >> 16 : two); };
    for (int64_t at = 0; at < width; ++at) {
        int32_t high = 0, low = 1 << (POINT - 1);
        for (int64_t i = 0; i < axis.counts[pixel]; ++i) {
            const int32_t value = row(axis.firsts[pixel] + i)[at];
            high += value * half(weights[i / 2 * 2], i % 2), low += value * half(weights[i / 2 * 2 + 1], i % 2);
        }
        out[at] = static_cast<uint8_t>(std::clamp((high * (1 << CUT) + low) >> POINT, 0, 255));
    }
}

// out (width, ROWS) = the bytes of ROWS rows, column by column.
inline void to_columns(const uint8_t* const (&rows)[ROWS], int64_t width, uint8_t* out) {
    hn::Vec<decltype(block)> v[16];
    for (int64_t at = 0; width >= 16 && at < width; at += 16) {
        at = std::min(at, width - 16);
        for (int i = 0; i < 16; ++i) v[i] = hn::LoadU(block, rows[i] + at);
        transpose(block, v);
        for (int i = 0; i < 16; ++i) hn::StoreU(v[i], block, out + (at + i) * ROWS);
    }
    for (int64_t at = 0; width < 16 && at < width; ++at)
        for (int64_t i = 0; i < ROWS; ++i) out[at * ROWS + i] = rows[i][at];
}

// rows[i] = row i of `columns` (width, ROWS).
inline void to_rows(const uint8_t* columns, int64_t width, uint8_t* const (&rows)[ROWS]) {
    hn::Vec<decltype(block)> v[16];
    for (int64_t at = 0; width >= 16 && at < width; at += 16) {
        at = std::min(at, width - 16);
        for (int i = 0; i < 16; ++i) v[i] = hn::LoadU(block, columns + (at + i) * ROWS);
        transpose(block, v);
        for (int i = 0; i < 16; ++i) hn::StoreU(v[i], block, rows[i] + at);
    }
    for (int64_t at = 0; width < 16 && at < width; ++at)
        for (int64_t i = 0; i < ROWS; ++i) rows[i][at] = columns[at * ROWS + i];
}

// Resizes rows to another width, ROWS at a time. After transposing, each pixel of these rows is contiguous, so the code that
// blends rows also blends pixels. It is done strip by strip, so that a strip stays in the processor's first cache.
class RowResizer {
  public:
    explicit RowResizer(const Axis& axis) : axis_(axis) {
        const int64_t scale = std::max<int64_t>(1, axis.end(axis.size - 1) / axis.size);
        strip_ = std::max<int64_t>(1, STRIP / scale);
        int64_t most = 0;
        for (int64_t x = 0; x < axis.size; x += strip_) {
            const int64_t last = std::min(axis.size, x + strip_) - 1;
            most = std::max(most, axis.end(last) - axis.firsts[x]);
        }
        old_.resize(most * 3 * ROWS);
        new_.resize(strip_ * 3 * ROWS);
    }

    void run(const uint8_t* const (&from)[ROWS], uint8_t* const (&to)[ROWS]) {
        for (int64_t x = 0; x < axis_.size; x += strip_) {
            const int64_t end = std::min(axis_.size, x + strip_), first = axis_.firsts[x];
            const uint8_t* sources[ROWS];
            uint8_t* targets[ROWS];
            for (int64_t i = 0; i < ROWS; ++i) sources[i] = from[i] + 3 * first, targets[i] = to[i] + 3 * x;
            to_columns(sources, 3 * (axis_.end(end - 1) - first), old_.data());
            const auto pixel = [&](int64_t i) { return old_.data() + (i - first) * 3 * ROWS; };
            for (int64_t i = x; i < end; ++i) blend(axis_, i, pixel, 3 * ROWS, new_.data() + (i - x) * 3 * ROWS);
            to_rows(new_.data(), 3 * (end - x), targets);
        }
    }

  private:
    const Axis& axis_;
    int64_t strip_;
    std::vector<uint8_t> old_, new_;
};

template <class Value>
void cut(const uint8_t* pixels, int64_t stride, const int64_t* places, int64_t count, int64_t height, int64_t width,
         const Value* table, int64_t patch_step, int64_t channel_step, int64_t value_step, Value* out) {
    for (int64_t patch = 0; patch < count; ++patch)
        for (int64_t channel = 0; channel < 3; ++channel) {
            const uint8_t* from = pixels + places[patch] + channel;
            const Value* values = table + 256 * channel;
            Value* to = out + patch * patch_step + channel * channel_step;
            for (int64_t y = 0; y < height; ++y, from += stride, to += width * value_step)
                for (int64_t x = 0; x < width; ++x) to[x * value_step] = values[from[3 * x]];
        }
}

}  // namespace

extern "C" {

// out (new_height, new_width, 3) = in (height, width, 3), resized. Both axes have new_size, taps, firsts (new_size), counts
// (new_size) and weights (new_size, taps); null weights leave that axis as it is.
void fovea_resize(const uint8_t* in, int64_t height, int64_t width, int64_t new_height, int64_t row_taps,
                  const int64_t* row_firsts, const int64_t* row_counts, const int32_t* row_weights, int64_t new_width,
                  int64_t column_taps, const int64_t* column_firsts, const int64_t* column_counts,
                  const int32_t* column_weights, uint8_t* out) {
    const int64_t line = 3 * new_width;
    if (!column_weights) {
        const Axis rows(new_height, row_taps, row_firsts, row_counts, row_weights);
        for (int64_t y = 0; y < new_height; ++y)
            blend(rows, y, [&](int64_t i) { return in + i * line; }, line, out + y * line);
        return;
    }
    const Axis columns(new_width, column_taps, column_firsts, column_counts, column_weights);
    RowResizer resizer(columns);
    // Resizes the rows from `first` on; row i goes to to(i).
    const auto resize_rows = [&](int64_t first, const auto& to) {
        const uint8_t* from[ROWS];
        uint8_t* targets[ROWS];
        for (int64_t i = 0; i < ROWS; ++i) {
            const int64_t row = std::min(first + i, height - 1);
            from[i] = in + row * 3 * width, targets[i] = to(row);
        }
        resizer.run(from, targets);
    };
    if (!row_weights) {
        for (int64_t y = 0; y < height; y += ROWS) resize_rows(y, [&](int64_t i) { return out + i * line; });
        return;
    }
    // Rows of the new width wait in a ring until all new rows that need them are there.
    const Axis rows(new_height, row_taps, row_firsts, row_counts, row_weights);
    const int64_t capacity = (row_taps + 2 * ROWS - 1) / ROWS * ROWS;
    std::vector<uint8_t> ring(capacity * line);
    const auto waiting = [&](int64_t i) { return ring.data() + i % capacity * line; };
    int64_t done = 0;
    for (int64_t y = 0; y < new_height; ++y) {
        for (; done < rows.end(y); done += ROWS) resize_rows(done, waiting);
        blend(rows, y, waiting, line, out + y * line);
    }
}

// Cuts patches (height, width) out of a picture of bytes, and writes table[channel][byte] for each byte of a patch.
// pixels: rows of pixels of three bytes; stride: bytes from a row to the next. places (count): the first byte of each
// patch. table (3, 256): values of `size` bytes, 2 or 4. out: patches are patch_step values apart, channels
// channel_step, and the values of a channel value_step.
void fovea_patches(const uint8_t* pixels, int64_t stride, const int64_t* places, int64_t count, int64_t height,
                   int64_t width, const void* table, int64_t size, int64_t patch_step, int64_t channel_step,
                   int64_t value_step, void* out) {
    if (size == 2)
        cut(pixels, stride, places, count, height, width, static_cast<const uint16_t*>(table), patch_step, channel_step,
            value_step, static_cast<uint16_t*>(out));
    else
        cut(pixels, stride, places, count, height, width, static_cast<const uint32_t*>(table), patch_step, channel_step,
            value_step, static_cast<uint32_t*>(out));
}

}  // extern "C"

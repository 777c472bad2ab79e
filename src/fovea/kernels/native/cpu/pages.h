// Addresses of keys and values, and scratch memory for results computed from them.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace fovea {

// Each thread keeps its scratch memory between calls. A buffer of more than KEPT bytes is freed when a call
// needs less than a quarter of it, so that one long context does not hold its memory forever. Smaller buffers
// only grow, so that contexts of ordinary, changing lengths do not allocate in every call.
constexpr int64_t KEPT = 8 << 20;

template <class T>
T* fit(std::vector<T>& scratch, int64_t size) {
    const int64_t have = static_cast<int64_t>(scratch.size());
    if (have < size || (have > 4 * size && have * static_cast<int64_t>(sizeof(T)) > KEPT)) {
        std::vector<T>().swap(scratch);  // before resize: the old and the new buffer never exist together
        scratch.resize(size);
    }
    return scratch.data();
}

// Like `fit`, but the buffer only grows. For calls that follow each other with sizes that differ by much, such as the
// products of a layer: freeing and filling 40 MB for each of them would take a tenth of their time.
template <class T>
T* grown(std::vector<T>& scratch, int64_t size) {
    if (static_cast<int64_t>(scratch.size()) < size) {
        std::vector<T>().swap(scratch);
        scratch.resize(size);
    }
    return scratch.data();
}

// The first address from `at` on that is aligned for vectors.
template <class T>
T* aligned(T* at) {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
}

// Like `fit` and `grown`, but the address is aligned for vectors.
template <class T>
T* fit_aligned(std::vector<T>& scratch, int64_t size) {
    return aligned(fit(scratch, size + static_cast<int64_t>(64 / sizeof(T))));
}

template <class T>
T* grown_aligned(std::vector<T>& scratch, int64_t size) {
    return aligned(grown(scratch, size + static_cast<int64_t>(64 / sizeof(T))));
}

// Bits of a number of tokens per block if it is a power of two, else -1. Divisions would take half of the time of a decode.
inline int bits_of(int64_t block) { return block & (block - 1) ? -1 : __builtin_ctzll(block); }

// Where token t lies in the pages of a sequence.
struct Place {
    int64_t page, offset;
};

struct Table {
    const int64_t* blocks;
    int64_t block;
    int bits;

    Place of(int64_t t) const {
        const int64_t number = bits >= 0 ? t >> bits : t / block;
        return {blocks[number], t - number * block};
    }
};

// Address of the key or value of token t: in pages, or, without a table, row after row. Tokens are `stride` values apart.
template <class T>
struct RowsOf {
    const T* base;
    int64_t stride;
    Table table;

    const T* at(int64_t t) const {
        if (!table.blocks) return base + t * stride;
        const Place place = table.of(t);
        return base + (place.page * table.block + place.offset) * stride;
    }
};

using Rows = RowsOf<bf16>;

// These functions convert `dim` levels, a multiple of 2 * LANES. All of these types hold levels exactly.
inline void convert(const int8_t* levels, int64_t dim, bf16* out) {
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        // An even and an odd level in each lane. A float of so small a whole number has zeros in its lower half.
        const Unsigned both = hn::PromoteTo(u32, hn::LoadU(halves, reinterpret_cast<const uint16_t*>(levels + d)));
        const auto value = [&](Unsigned left) {
            return hn::BitCast(u32, hn::ConvertTo(f32, hn::ShiftRight<24>(hn::BitCast(i32, left))));
        };
        const Unsigned even = value(hn::ShiftLeft<24>(both)), odd = value(hn::ShiftLeft<16>(both));
        hn::StoreU(hn::Or(hn::ShiftRight<16>(even), odd), u32, reinterpret_cast<uint32_t*>(out + d));
    }
}

inline void convert(const int8_t* levels, int64_t dim, int16_t* out) {
    const hn::ScalableTag<int16_t> values;
    for (int64_t d = 0; d < dim; d += 2 * LANES)
        hn::StoreU(hn::PromoteTo(values, hn::LoadU(hn::Rebind<int8_t, decltype(values)>(), levels + d)), values, out + d);
}

inline void convert(const int8_t* levels, int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; d += LANES)
        hn::StoreU(hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(hn::Rebind<int8_t, F>(), levels + d))), f32, out + d);
}

// The keys, or the values, of one KV head in the pages of a sequence.
struct Source {
    const uint8_t* base;  // of the head's numbers in the first page
    int64_t page, stride; // bytes from page to page, and from token to token
    const bf16* scales;   // of the head in the first page; null: the numbers are bf16
    int64_t scale_stride; // scales from token to token
    int64_t dim;
    Table table;

    // side: 0 for keys, 1 for values.
    Source(const Pages& pages, int64_t kv_heads, int64_t dim, int side, int64_t head, const int64_t* blocks)
        : page(pages.page), stride(2 * kv_heads * dim * (pages.quantized ? 1 : 2)), scales(nullptr),
          scale_stride(2 * kv_heads), dim(dim), table{blocks, pages.block, bits_of(pages.block)} {
        const int64_t place = side * kv_heads + head;
        base = pages.data + place * dim * (pages.quantized ? 1 : 2);
        if (pages.quantized) scales = reinterpret_cast<const bf16*>(pages.data + pages.block * stride) + place;
    }

    bool scaled() const { return scales; }

    float scale(int64_t t) const {
        const Place place = table.of(t);
        return widen(scales[place.page * page / 2 + place.offset * scale_stride]);
    }

    // Rows of numbers that are bf16.
    Rows in_place() const { return {reinterpret_cast<const bf16*>(base), stride / 2, table}; }

    // Rows of levels: tokens [first, last) converted into `scratch`. Tokens up to `end` are read next.
    template <class T>
    RowsOf<T> converted(int64_t first, int64_t last, int64_t end, std::vector<T>& scratch) const {
        T* const out = grown(scratch, std::max<int64_t>(0, last - first) * dim);
        const auto at = [&](Place place) { return base + place.page * page + place.offset * stride; };
        T* to = out;
        for (int64_t t = first; t < last;) {
            const Place place = table.of(t);
            const uint8_t* from = at(place);
            const uint8_t* ahead = at(table.of(std::min(t + table.block, end - 1)));
            const int64_t run = std::min(last - t, table.block - place.offset);
            for (int64_t i = 0; i < run; ++i, from += stride, ahead += stride, to += dim) {
                for (int64_t d = 0; d < dim; d += 64) prefetch(ahead + d);
                convert(reinterpret_cast<const int8_t*>(from), dim, to);
            }
            t += run;
        }
        return {out - first * dim, dim, {nullptr, 1, 0}};
    }
};

}  // namespace fovea

// Addresses of keys and values, and scratch memory for results computed from them.
#pragma once

#include <vector>

#include "simd.h"

namespace fovea {

// Address of the key or value of token t: in pages of `block` tokens, or, without a table, row after row.
// Tokens are `stride` values apart.
struct Rows {
    const bf16* base;
    int64_t stride;
    const int64_t* table;
    int64_t block;

    const bf16* at(int64_t t) const {
        return base + (table ? table[t / block] * block + t % block : t) * stride;
    }
};

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

}  // namespace fovea

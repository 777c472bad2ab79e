// Where keys and values lie, and scratch for what is computed from them.
#pragma once

#include <vector>

#include "common.h"

namespace fovea {

// Where the key or value of token t lies: in pages, or, without a table, row after row.
struct Rows {
    const bf16* base;
    int64_t stride;
    const int64_t* table;
    int64_t block;

    const bf16* at(int64_t t) const {
        return base + (table ? table[t / block] * block + t % block : t) * stride;
    }
};

// Scratch stays with its thread from call to call. What one long context needed is given back when a call needs far
// less; up to KEPT bytes a buffer stays, so that contexts of ordinary lengths in turn never wait for memory.
constexpr int64_t KEPT = 8 << 20;

template <class T>
T* fit(std::vector<T>& scratch, int64_t size) {
    const int64_t have = static_cast<int64_t>(scratch.size());
    if (have < size || (have > 4 * size && have * static_cast<int64_t>(sizeof(T)) > KEPT)) {
        std::vector<T>().swap(scratch);  // first: both at once would be more than either needs
        scratch.resize(size);
    }
    return scratch.data();
}

}  // namespace fovea

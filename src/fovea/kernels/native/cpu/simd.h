// Vectors of this library's instruction set, by Google Highway, and functions on them that all kernels share.
//
// The kernels are compiled once for each instruction set of instruction_sets.json, into a library each. The
// kernels read and write rows of bf16, and add up in float32.
#pragma once

#define HWY_COMPILE_ONLY_STATIC
#define HWY_WANT_AVX3_ZEN4  // means: AVX-512 with bf16 products
#define HWY_DISABLE_PCLMUL_AES
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define FOVEA_INLINE HWY_INLINE

namespace fovea {

namespace hn = hwy::HWY_NAMESPACE;
using bf16 = uint16_t;

using F = hn::ScalableTag<float>;
using I = hn::ScalableTag<int32_t>;
using U = hn::ScalableTag<uint32_t>;
using Words = hn::ScalableTag<uint16_t>;
using Bytes = hn::ScalableTag<uint8_t>;
using Halves = hn::Rebind<uint16_t, F>;  // as many 16-bit values as a vector has floats
using Floats = hn::Vec<F>;
using Ints = hn::Vec<I>;
using Unsigned = hn::Vec<U>;

constexpr F f32;
constexpr I i32;
constexpr U u32;
constexpr Words u16;
constexpr Bytes u8;
constexpr Halves halves;

// Floats in a vector, bytes of a vector, vectors that fit in registers.
constexpr int LANES = hn::MaxLanes(f32), WIDTH = 4 * LANES;
constexpr int REGISTERS = HWY_ARCH_ARM || HWY_TARGET <= HWY_AVX3 ? 32 : 16;

inline float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

FOVEA_INLINE Floats widened(hn::Vec<Halves> values) {
    return hn::BitCast(f32, hn::ShiftLeft<16>(hn::PromoteTo(u32, values)));
}

// load() and store() need no alignment.
FOVEA_INLINE Floats load(const bf16* from) { return widened(hn::LoadU(halves, from)); }

// Loads the first `count` values, at least 0; the other lanes are zero.
FOVEA_INLINE Floats load(const bf16* from, int64_t count) {
    return count >= LANES ? load(from) : widened(hn::LoadN(halves, from, count > 0 ? count : 0));
}

FOVEA_INLINE Floats load(const float* from, int64_t count) {
    return count >= LANES ? hn::LoadU(f32, from) : hn::LoadN(f32, from, count > 0 ? count : 0);
}

// Rounds to bf16, to the nearest, ties to even. NaN stays NaN.
FOVEA_INLINE hn::Vec<Halves> narrow(Floats values) {
#if HWY_NATIVE_DOT_BF16
    return hn::BitCast(halves, hn::DemoteTo(hn::Rebind<hwy::bfloat16_t, F>(), values));
#else
    const Unsigned bits = hn::BitCast(u32, values);
    const Unsigned odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1));
    const Unsigned up = hn::Add(bits, hn::Add(odd, hn::Set(u32, 0x7FFF)));
    // Adding could carry a NaN into infinity or zero, so NaN only gets its quiet bit.
    const Unsigned quiet = hn::Or(bits, hn::Set(u32, 1u << 22));
    const auto nan = hn::RebindMask(u32, hn::IsNaN(values));
    return hn::TruncateTo(halves, hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, up)));
#endif
}

inline bf16 narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return static_cast<bf16>(bits >> 16 | 64);
    return static_cast<bf16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

FOVEA_INLINE void store(bf16* to, Floats values) { hn::StoreU(narrow(values), halves, to); }

FOVEA_INLINE void store(bf16* to, Floats values, int64_t count) {
    if (count >= LANES) return store(to, values);
    if (count > 0) hn::StoreN(narrow(values), halves, to, count);
}

// The values rounded to bf16, as float32.
FOVEA_INLINE Floats rounded(Floats values) { return widened(narrow(values)); }

// e^x to about 2 units in the last place of float32: 2^n times a polynomial on [-ln2/2, ln2/2].
FOVEA_INLINE Floats exponential(Floats x) {
    const Floats lowest = hn::Set(f32, -87.0f), highest = hn::Set(f32, 88.0f);
#if HWY_ARCH_X86
    // Min and Max return their second operand if one of the two is NaN. x is the second, so NaN stays NaN.
    x = hn::Min(highest, hn::Max(lowest, x));
#else
    // Here they would return the number. Comparisons with NaN are false.
    x = hn::IfThenElse(hn::Lt(x, lowest), lowest, hn::IfThenElse(hn::Gt(x, highest), highest, x));
#endif
    // Adding 1.5 * 2^23 rounds to a whole number n, which is then in the lowest bits of the mantissa: quicker than conversions.
    const Floats magic = hn::Set(f32, 12582912.0f), shifted = hn::MulAdd(x, hn::Set(f32, 1.44269504f), magic);
    const Floats n = hn::Sub(shifted, magic);
    Floats f = hn::NegMulAdd(n, hn::Set(f32, 0.693359375f), x);
    f = hn::NegMulAdd(n, hn::Set(f32, -2.12194440e-4f), f);
    Floats p = hn::Set(f32, 1.0f / 720);
    p = hn::MulAdd(p, f, hn::Set(f32, 1.0f / 120));
    p = hn::MulAdd(p, f, hn::Set(f32, 1.0f / 24));
    p = hn::MulAdd(p, f, hn::Set(f32, 1.0f / 6));
    p = hn::MulAdd(p, f, hn::Set(f32, 0.5f));
    p = hn::MulAdd(p, f, hn::Set(f32, 1.0f));
    p = hn::MulAdd(p, f, hn::Set(f32, 1.0f));
    // Times 2^n, by adding n to the exponent. After the clamp n is -126 to 127, and the result is not subnormal. A NaN stays
    // one, because its lowest bits are zero.
    return hn::BitCast(f32, hn::Add(hn::BitCast(i32, p), hn::ShiftLeft<23>(hn::BitCast(i32, shifted))));
}

// The sum of LANES numbers: those of one vector, or of each lane of LANES vectors. Both functions add in the same order,
// by halves.
inline float sum_of(Floats numbers) {
    float parts[LANES];
    hn::StoreU(numbers, f32, parts);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
    return parts[0];
}

FOVEA_INLINE Floats sum_of(Floats (&numbers)[LANES]) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) numbers[i] = hn::Add(numbers[i], numbers[i + half]);
    return numbers[0];
}

// Exchanges rows and columns: afterwards lane i of vector v is what lane v of vector i was. N: lanes of a vector. Each round
// interleaves the first half of the vectors with the second.
template <class D, int N>
FOVEA_INLINE void transpose(D tag, hn::Vec<D> (&vectors)[N]) {
    for (int round = 1; round < N; round *= 2) {
        hn::Vec<D> next[N];
        for (int i = 0; i < N / 2; ++i) {
            next[2 * i] = hn::InterleaveWholeLower(tag, vectors[i], vectors[i + N / 2]);
            next[2 * i + 1] = hn::InterleaveWholeUpper(tag, vectors[i], vectors[i + N / 2]);
        }
        for (int i = 0; i < N; ++i) vectors[i] = next[i];
    }
}

FOVEA_INLINE Floats sigmoid(Floats x) {
    const Floats one = hn::Set(f32, 1.0f);
    return hn::Div(one, hn::Add(one, exponential(hn::Neg(x))));
}

// Fetches the cache line at an address. The address may be outside of any memory. These functions must be inlined:
// GCC finds that they have no effect, and would remove calls.
FOVEA_INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
FOVEA_INLINE void prefetch_l2(const void* at) { __builtin_prefetch(at, 0, 2); }

}  // namespace fovea

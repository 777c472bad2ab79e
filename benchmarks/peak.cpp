// The rates at which a core multiplies and adds in registers, without any memory: what a product could reach at most.
// One function per sequence of instructions. Each returns billions of multiplications and additions per second.
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Runs STEP(sum) for twelve sums in registers, so that the latency of an instruction is hidden, and returns the best
// rate of five tries. Sums are variables of their own: an array would be kept in memory.
#define MEASURE(TYPE, ZERO, OPERATIONS)                                                                              \
    TYPE a0 = ZERO, a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0, a8 = a0, a9 = a0, a10 = a0, a11 = a0; \
    double best = 0;                                                                                                 \
    for (int repeat = 0; repeat < 5; ++repeat) {                                                                     \
        const auto start = std::chrono::steady_clock::now();                                                         \
        constexpr int64_t rounds = 1 << 21;                                                                          \
        for (int64_t i = 0; i < rounds; ++i) {                                                                       \
            STEP(a0) STEP(a1) STEP(a2) STEP(a3) STEP(a4) STEP(a5) STEP(a6) STEP(a7) STEP(a8) STEP(a9) STEP(a10)      \
            STEP(a11)                                                                                                \
        }                                                                                                            \
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;                         \
        const double rate = 12.0 * OPERATIONS * rounds / took.count() * 1e-9;                                        \
        best = rate > best ? rate : best;                                                                            \
    }                                                                                                                \
    return best;

#if defined(__AMX_BF16__)
// Products in matrix registers: four sums of 16 x 16, so that the latency of an instruction is hidden.
#define MEASURE_AMX(INSTRUCTION, OPERATIONS)                                                                         \
    struct alignas(64) { uint8_t palette = 1, rest[15] = {}; uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  \
                         uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16}; } config;                              \
    asm volatile("ldtilecfg %0" : : "m"(config));                                                                    \
    asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm4\n\t"                      \
                 "tilezero %tmm5\n\ttilezero %tmm6\n\ttilezero %tmm7");                                             \
    double best = 0;                                                                                                 \
    for (int repeat = 0; repeat < 5; ++repeat) {                                                                     \
        const auto start = std::chrono::steady_clock::now();                                                         \
        constexpr int64_t rounds = 1 << 19;                                                                          \
        for (int64_t i = 0; i < rounds; ++i)                                                                         \
            asm volatile(INSTRUCTION " %tmm1, %tmm0, %tmm4\n\t" INSTRUCTION " %tmm1, %tmm0, %tmm5\n\t"              \
                         INSTRUCTION " %tmm1, %tmm0, %tmm6\n\t" INSTRUCTION " %tmm1, %tmm0, %tmm7");                 \
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;                         \
        const double rate = 4.0 * OPERATIONS * rounds / took.count() * 1e-9;                                         \
        best = rate > best ? rate : best;                                                                            \
    }                                                                                                                \
    asm volatile("tilerelease");                                                                                     \
    return best;
#endif

extern "C" {

#if defined(__AMX_BF16__)
double fovea_peak_float() {  // TDPBF16PS: 16 x 16 sums of 32 products of bf16
    MEASURE_AMX("tdpbf16ps", 16384)
}
#elif defined(__AVX512BF16__)
double fovea_peak_float() {  // VDPBF16PS: 32 products and sums of bf16
    const __m512 w = _mm512_set1_ps(1.0f);
#define STEP(a) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(a) : "v"(w));
    MEASURE(__m512, _mm512_setzero_ps(), 64)
#undef STEP
}
#elif defined(__AVX2__)
double fovea_peak_float() {  // VFMADD231PS: 8 products and sums of float32
    const __m256 w = _mm256_set1_ps(1.0f);
#define STEP(a) asm volatile("vfmadd231ps %1, %1, %0" : "+x"(a) : "x"(w));
    MEASURE(__m256, _mm256_setzero_ps(), 16)
#undef STEP
}
#else
double fovea_peak_float() { return 0; }
#endif

#if defined(__AMX_INT8__)
double fovea_peak_int8() {  // TDPBSUD: 16 x 16 sums of 64 products of bytes
    MEASURE_AMX("tdpbsud", 32768)
}
#elif defined(__AVX512VNNI__)
double fovea_peak_int8() {  // VPDPBUSD: 64 products and sums of bytes
    const __m512i w = _mm512_set1_epi8(1);
#define STEP(a) asm volatile("vpdpbusd %1, %1, %0" : "+v"(a) : "v"(w));
    MEASURE(__m512i, _mm512_setzero_si512(), 128)
#undef STEP
}
#elif defined(__AVXVNNI__)
double fovea_peak_int8() {  // VPDPBUSD: 32 products and sums of bytes
    const __m256i w = _mm256_set1_epi8(1);
#define STEP(a) asm volatile("%{vex%} vpdpbusd %1, %1, %0" : "+x"(a) : "x"(w));
    MEASURE(__m256i, _mm256_setzero_si256(), 64)
#undef STEP
}
#elif defined(__AVX2__)
double fovea_peak_int8() {  // VPMADDUBSW, VPMADDWD with ones, VPADDD: 32 products and sums of bytes
    __m256i t;
    const __m256i w = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
#define STEP(a)                                                                                     \
    asm volatile("vpmaddubsw %2, %2, %1\n\tvpmaddwd %3, %1, %1\n\tvpaddd %1, %0, %0" : "+x"(a), "=&x"(t) \
                 : "x"(w), "x"(ones));
    MEASURE(__m256i, _mm256_setzero_si256(), 64)
#undef STEP
}
#else
double fovea_peak_int8() { return 0; }
#endif
}

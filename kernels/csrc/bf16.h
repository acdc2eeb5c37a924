/* bfloat16 in memory, float32 in registers. */

#ifndef BATCHRUN_BF16_H
#define BATCHRUN_BF16_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8") /* or arrays of registers stay in memory */
#define ALL_LANES ((__mmask16)0xffff)

typedef uint16_t bf16;

INLINE __m512 widen(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

INLINE __m256i narrow(__m512 values) {
    return (__m256i)_mm512_cvtneps_pbh(values);
}

/* To the nearest bfloat16, as a store and a load would: for the points where a sequence of torch operations rounds. */
INLINE __m512 rounded(__m512 values) {
    return widen(narrow(values));
}

/* The last `left` elements of a row; all 16 while there are more. */
INLINE __mmask16 lanes_of(int64_t left) {
    return left >= 16 ? ALL_LANES : (__mmask16)((1u << left) - 1);
}

INLINE __m256i load_lanes(const bf16 *from, __mmask16 lanes) {
    return lanes == ALL_LANES ? _mm256_loadu_si256((const __m256i *)from) : _mm256_maskz_loadu_epi16(lanes, from);
}

INLINE void store_lanes(bf16 *to, __mmask16 lanes, __m256i values) {
    if (lanes == ALL_LANES)
        _mm256_storeu_si256((__m256i *)to, values);
    else
        _mm256_mask_storeu_epi16(to, lanes, values);
}

/* Per lane, sum + a0 b0 + a1 b1 of its pairs. */
INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* A pair in every lane. */
INLINE __m512i broadcast_pair(const void *pair) {
    int32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
}

#endif

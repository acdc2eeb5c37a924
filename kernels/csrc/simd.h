/* Sixteen numbers at a time: the types and operations that the kernels are written in.
 *
 *     Floats   16 float32
 *     Halves   16 bfloat16
 *     Pairs    16 pairs of bfloat16
 *     Ints     16 int32
 *     Doubles  16 float64
 *     Mask     one bit of each of the 16
 */

#ifndef BATCHRUN_SIMD_H
#define BATCHRUN_SIMD_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8") /* or arrays of registers stay in memory */
#define LANES 16
#define MOST_TILE_ROWS 6 /* that a backend may ask for by TILE_ROWS, with 1 or 4 registers of 16 numbers: TILE_VECTORS */

typedef uint16_t bf16;

#ifdef __AVX512BF16__
#include "simd_avx512_bf16.h"
#else
#include "simd_vectors.h"
#endif

INLINE Floats zero(void) {
    return broadcast(0.0f);
}

INLINE Mask is_nan(Floats x) {
    return differs(x, x);
}

/* To the nearest bfloat16, as a store and a load would: for the points where a sequence of torch operations rounds. */
INLINE Floats rounded(Floats x) {
    return widen(narrow(x));
}

INLINE float float_of(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Into the second-level cache: what is read now and what comes next do not fit into the first. */
INLINE void prefetch(const void *line) {
    __builtin_prefetch(line, 0, 2);
}

#endif

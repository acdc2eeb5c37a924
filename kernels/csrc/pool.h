/* Pool, per layer: [kv head][page][K then V], a page being 16 tokens of one kv head:
 *
 *     K   [head_dim / 2][16 keys][2]    one register holds a pair of dims of 16 keys: a query's pair, broadcast, adds to the
 *                                       scores of 16 keys lane by lane, and no sum over lanes is ever needed
 *     V   [8 pairs of keys][head_dim][2]    one register holds a pair of keys in 16 dims: a pair of weights, broadcast, adds to
 *                                       16 elements of the output
 *
 * Elements are bfloat16, or int8: the same places, and 32 float32 behind them, the scales of the page's 16 keys and 16 values.
 */

#ifndef BATCHRUN_POOL_H
#define BATCHRUN_POOL_H

#include "simd.h"

#define PAGE 16
#define MAX_DIM 256
#define LINE 64 /* bytes of a cache line */

/* Bytes of a page of one kv head: whole cache lines, as a head size is a multiple of 16. */
INLINE int64_t bytes_of_page(int dim, int is_int8) {
    return is_int8 ? 2 * PAGE * dim + 2 * PAGE * (int64_t)sizeof(float) : 2 * PAGE * dim * (int64_t)sizeof(bf16);
}

#endif

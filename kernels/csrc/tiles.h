/* The two products of attention in tiles of query rows: scores of a block of pages, and weights times values. */

#ifndef BATCHRUN_TILES_H
#define BATCHRUN_TILES_H

#include "block.h"


/* scores[row][16 * page + lane] of R rows and C pages. With A, a line of each of C half pages `ahead` is fetched with every line that
 * is read. */
INLINE void score_tile(const int R, const int C, const int A, const bf16 *const *queries, const bf16 *const *keys,
                       const bf16 *const *ahead, int dim, float *scores) {
    Floats sum[MOST_TILE_ROWS][TILE_VECTORS];
    UNROLL
    for (int r = 0; r < R; r++)
    UNROLL
        for (int c = 0; c < C; c++) sum[r][c] = zero();
    for (int d = 0; d < dim; d += 2) {
        Pairs key[TILE_VECTORS];
    UNROLL
        for (int c = 0; c < C; c++) key[c] = load_pairs(keys[c] + (int64_t)d * PAGE);
    UNROLL
        for (int c = 0; c < A * C; c++) prefetch(ahead[c] + (int64_t)d * PAGE);
    UNROLL
        for (int r = 0; r < R; r++) {
            Pairs query = broadcast_pair(queries[r] + d);
    UNROLL
            for (int c = 0; c < C; c++) sum[r][c] = dot(sum[r][c], key[c], query);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
    UNROLL
        for (int c = 0; c < C; c++) store_floats(scores + r * BLOCK_KEYS + c * PAGE, sum[r][c]);
}

/* out[row][16 * c ...] = scale[row] * out + sum over pairs of weights times values, of R rows and C registers of dims. */
INLINE void value_tile(const int R, const int C, const int A, const uint32_t *weights, const bf16 *const *values,
                       const bf16 *const *ahead, int num_pairs, int first, int dim, const float *scale, float *out) {
    Floats sum[MOST_TILE_ROWS][TILE_VECTORS];
    UNROLL
    for (int r = 0; r < R; r++)
    UNROLL
        for (int c = 0; c < C; c++)
            sum[r][c] = multiply(broadcast(scale[r]), load_floats(out + r * dim + c * 16));
    for (int j = 0; j < num_pairs; j++) {
        Pairs value[TILE_VECTORS];
    UNROLL
        for (int c = 0; c < C; c++) value[c] = load_pairs(values[j] + 2 * first + c * 32);
    UNROLL
        for (int c = 0; c < A * C; c++)
            prefetch(ahead[j / PAIRS] + (j % PAIRS * 2) * (int64_t)dim + 2 * first + c * 32);
    UNROLL
        for (int r = 0; r < R; r++) {
            Pairs weight = broadcast_pair(weights + r * BLOCK_PAIRS + j);
    UNROLL
            for (int c = 0; c < C; c++) sum[r][c] = dot(sum[r][c], value[c], weight);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
    UNROLL
        for (int c = 0; c < C; c++) store_floats(out + r * dim + c * 16, sum[r][c]);
}

typedef void ScoreTile(const bf16 *const *, const bf16 *const *, const bf16 *const *, int, float *);
typedef void ValueTile(const uint32_t *, const bf16 *const *, const bf16 *const *, int, int, int, const float *, float *);

#define TILE(R, C, A)                                                                                          \
    static void score_tile_##R##_##C##_##A(const bf16 *const *queries, const bf16 *const *keys,                \
                                           const bf16 *const *ahead, int dim, float *out) {                    \
        score_tile(R, C, A, queries, keys, ahead, dim, out);                                                   \
    }                                                                                                          \
    static void value_tile_##R##_##C##_##A(const uint32_t *weights, const bf16 *const *values,                 \
                                           const bf16 *const *ahead, int num_pairs, int first, int dim,        \
                                           const float *scale, float *out) {                                   \
        value_tile(R, C, A, weights, values, ahead, num_pairs, first, dim, scale, out + first);                \
    }
#if TILE_VECTORS == 4
#define TILES(R) TILE(R, 1, 0) TILE(R, 2, 0) TILE(R, 3, 0) TILE(R, 4, 0) TILE(R, 1, 1) TILE(R, 2, 1) TILE(R, 3, 1) TILE(R, 4, 1)
#define NAMES(KIND, R, A) {KIND##_tile_##R##_1_##A, KIND##_tile_##R##_2_##A, KIND##_tile_##R##_3_##A, KIND##_tile_##R##_4_##A}
#else
#define TILES(R) TILE(R, 1, 0) TILE(R, 1, 1)
#define NAMES(KIND, R, A) {KIND##_tile_##R##_1_##A}
#endif
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#define HALF(KIND, A)                                                                                                         \
    {NAMES(KIND, 1, A), NAMES(KIND, 2, A), NAMES(KIND, 3, A), NAMES(KIND, 4, A), NAMES(KIND, 5, A), NAMES(KIND, 6, A)}
static ScoreTile *const SCORE_TILES[2][MOST_TILE_ROWS][TILE_VECTORS] = {HALF(score, 0), HALF(score, 1)};
static ValueTile *const VALUE_TILES[2][MOST_TILE_ROWS][TILE_VECTORS] = {HALF(value, 0), HALF(value, 1)};

#endif

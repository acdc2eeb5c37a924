/* The two products of attention in matrix tiles of up to 16 query rows, where tiles.h has 6. */

#ifndef BATCHRUN_AMX_TILES_H
#define BATCHRUN_AMX_TILES_H

#include "block.h"

#define AMX_ROWS 16

/* This thread's matrix tiles, for tiles of `rows` query rows of `dim`; between the two calls nothing else may use them. The
 * products below read and write `rows` rows of everything, however many of them hold something. */
void amx_begin(int rows, int dim);
void amx_end(void);

/* scores[row][16 * page + lane]. queries: dense rows of `dim`. The half pages `ahead` are fetched meanwhile. */
void amx_scores(const bf16 *queries, const bf16 *const *keys, const bf16 *const *ahead, int num_pages, int dim, float *scores);

/* A block's values for amx_values, BLOCK_PAIRS * 2 * dim elements: [16 pairs of keys][16 dims] by [16][16][2]. */
void amx_pack_values(const bf16 *const *values, int num_pages, int dim, bf16 *packed);

/* sums[row] = scale[row] * sums[row] + sum over pairs of weights times values. Of an odd last page, the weights of another page
 * behind it are read: they must be 0. */
void amx_values(const uint32_t *weights, const bf16 *packed, const bf16 *const *ahead, int num_pages, int dim, int rows,
                const float *scale, float *sums);

#endif

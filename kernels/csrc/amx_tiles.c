/* Attention's products in matrix tiles. A page of keys is a right-hand tile as it lies: a pair of dims of 16 keys to a row. So are
 * 16 pairs of keys in 16 dims, of which a page has 8: values are brought together once per block, for all its query rows.
 *
 * Tiles 0 to 3 hold sums, 4 the left-hand side, 5 and 6 in turn the right-hand side. One step multiplies 32 dims, or 16 pairs of
 * keys; half of that where the head size is no multiple of 32, so that no step reads past a page's keys.
 */

#include "amx_tiles.h"

#include "amx.h"

#define COLUMNS 4 /* sums in flight: a product takes three times as long as the next one has to wait for its turn */

INLINE int pairs_of_a_step(int dim) {
    return dim % 32 ? 8 : 16;
}

void amx_begin(int rows, int dim) {
    AmxConfig config = {.palette = 1};
    for (int t = 0; t < 7; t++) {
        config.rows[t] = (uint8_t)(t < 5 ? rows : pairs_of_a_step(dim));
        config.row_bytes[t] = (uint16_t)(t == 4 ? 4 * pairs_of_a_step(dim) : 64);
    }
    amx_configure(&config);
}

void amx_end(void) {
    amx_release();
}

/* What follows is for columns 0 to 3, a tile's number being a constant. */
#define EACH_COLUMN(DO, count)   \
    do {                         \
        DO(0, 5);                \
        if (count > 1) DO(1, 6); \
        if (count > 2) DO(2, 5); \
        if (count > 3) DO(3, 6); \
    } while (0)

void amx_scores(const bf16 *queries, const bf16 *const *keys, const bf16 *const *ahead, int num_pages, int dim, float *scores) {
    int step = 2 * pairs_of_a_step(dim);
    for (int first = 0; first < num_pages; first += COLUMNS) {
        int count = num_pages - first;
#define ZERO(c, right) amx_zero(c)
        EACH_COLUMN(ZERO, count);
#undef ZERO
        for (int d = 0; d < dim; d += step) {
            int64_t at = (int64_t)d * PAGE;
            amx_load(4, queries + d, 2 * dim);
            for (int i = 0; ahead && i < COLUMNS && i < count; i++)
                for (int line = 0; line < step / 2; line++) prefetch(ahead[first + i] + at + line * 32);
#define MULTIPLY(c, right)                         \
    do {                                           \
        amx_load(right, keys[first + c] + at, 64); \
        amx_dot(c, 4, right);                      \
    } while (0)
            EACH_COLUMN(MULTIPLY, count);
#undef MULTIPLY
        }
#define STORE(c, right) amx_store(c, scores + (first + c) * PAGE, BLOCK_KEYS * 4)
        EACH_COLUMN(STORE, count);
#undef STORE
    }
}

void amx_pack_values(const bf16 *const *values, int num_pages, int dim, bf16 *packed) {
    int pairs = num_pages * PAIRS;
    for (int first = 0; first < pairs; first += 16, packed += 16 * 2 * dim)
        for (int j = 0; j < 16; j++)
            for (int d = 0; d < dim; d += 16) {
                bf16 *to = packed + 16 * 2 * d + j * 32;
                if (first + j < pairs)
                    memcpy(to, values[first + j] + 2 * d, 64);
                else
                    memset(to, 0, 64);
            }
}

void amx_values(const uint32_t *weights, const bf16 *packed, const bf16 *const *ahead, int num_pages, int dim, int rows,
                const float *scale, float *sums) {
    int step = pairs_of_a_step(dim), pairs = num_pages * PAIRS;
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim && scale[r] != 1.0f; d += 16) {
            float *at = sums + (int64_t)r * dim + d;
            store_floats(at, multiply(broadcast(scale[r]), load_floats(at)));
        }
    for (int first = 0; first < dim; first += 16 * COLUMNS) {
        int count = (dim - first) / 16;
#define LOAD(c, right) amx_load(c, sums + first + 16 * c, 4 * dim)
        EACH_COLUMN(LOAD, count);
#undef LOAD
        for (int j = 0; j < pairs; j += step) {
            const bf16 *at = packed + (int64_t)(j & ~15) * 2 * dim + (j & 15) * 32 + 16 * 2 * first;
            amx_load(4, weights + j, BLOCK_PAIRS * 4);
            for (int i = j; ahead && i < j + step && i < pairs; i++)
                for (int d = first; d < dim && d < first + 16 * COLUMNS; d += 16)
                    prefetch(ahead[i / PAIRS] + (i % PAIRS * 2) * (int64_t)dim + 2 * d);
#define MULTIPLY(c, right)                     \
    do {                                       \
        amx_load(right, at + c * 16 * 32, 64); \
        amx_dot(c, 4, right);                  \
    } while (0)
            EACH_COLUMN(MULTIPLY, count);
#undef MULTIPLY
        }
#define STORE(c, right) amx_store(c, sums + first + 16 * c, 4 * dim)
        EACH_COLUMN(STORE, count);
#undef STORE
    }
}

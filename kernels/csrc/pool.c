/* Writing and copying keys and values; the pool's layout is in pool.h. */

#include "pool.h"

#include <immintrin.h>
#include <string.h>

/* Position of the first slot outside the pool, or -1. */
static int64_t find_bad_slot(const int64_t *slots, int64_t tokens, int64_t num_pages) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_pages * PAGE) return t;
    return -1;
}

/* Slots of one layer from k, v [tokens, kv_heads, head_dim], whose last dimension is dense. Returns -1, or the position of a slot outside
 * the pool, with nothing written. */
int64_t batchrun_write_kv(bf16 *pool, int64_t num_pages, int32_t kv_heads, int32_t dim, const bf16 *k, int64_t k_token,
                       int64_t k_head, const bf16 *v, int64_t v_token, int64_t v_head, const int64_t *slots, int64_t tokens,
                       int32_t threads) {
    int64_t bad = find_bad_slot(slots, tokens, num_pages);
    if (bad >= 0) return bad;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens >= 16)
    for (int64_t t = 0; t < tokens; t++)
        for (int h = 0; h < kv_heads; h++) {
            int64_t page = slots[t] / PAGE, lane = slots[t] % PAGE;
            bf16 *keys = pool + (h * num_pages + page) * 2 * PAGE * dim, *values = keys + (PAGE + (lane & ~1)) * (int64_t)dim;
            const bf16 *key = k + t * k_token + h * k_head, *value = v + t * v_token + h * v_head;
            for (int d = 0; d < dim; d += 2) memcpy(keys + d * PAGE + 2 * lane, key + d, 2 * sizeof(bf16));
            /* Another thread may write the other key of the pair: a masked store leaves its bytes alone. */
            __mmask32 mine = lane & 1 ? 0xaaaaaaaa : 0x55555555;
            for (int d = 0; d < dim; d += 16) {
                __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value + d)));
                _mm512_mask_storeu_epi16(values + 2 * d, mine, lane & 1 ? _mm512_slli_epi32(wide, 16) : wide);
            }
        }
    return -1;
}

/* Between the pool of all layers and staging [regions, tokens, 2, head_dim], a region being a kv head of a layer. Returns as
 * batchrun_write_kv. */
int64_t batchrun_move_kv(bf16 *pool, int64_t num_pages, int64_t regions, int32_t dim, const int64_t *slots, int64_t tokens,
                      bf16 *staging, int32_t into_pool) {
    int64_t bad = find_bad_slot(slots, tokens, num_pages);
    if (bad >= 0) return bad;
    for (int64_t region = 0; region < regions; region++)
        for (int64_t t = 0; t < tokens; t++, staging += 2 * dim) {
            int64_t page = slots[t] / PAGE, lane = slots[t] % PAGE;
            bf16 *keys = pool + (region * num_pages + page) * 2 * PAGE * dim + 2 * lane;
            bf16 *values = keys - 2 * lane + (PAGE + (lane & ~1)) * (int64_t)dim + (lane & 1);
            for (int d = 0; d < dim; d++) {
                bf16 *key = keys + (d & ~1) * PAGE + (d & 1), *value = values + 2 * d;
                if (into_pool)
                    *key = staging[d], *value = staging[dim + d];
                else
                    staging[d] = *key, staging[dim + d] = *value;
            }
        }
    return -1;
}

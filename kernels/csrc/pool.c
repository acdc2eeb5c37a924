/* Writing and copying keys and values; the pool's layout is in pool.h. */

#include "pool.h"

#include <string.h>

#include "threads.h"

#define TOKENS_AT_ONCE 16

/* Position of the first slot outside the pool, or -1. */
static int64_t find_bad_slot(const int64_t *slots, int64_t tokens, int64_t num_pages) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_pages * PAGE) return t;
    return -1;
}

/* A token of one kv head. Another thread may write the other key of its pair. */
static void store_token(bf16 *head, int64_t slot, int dim, const bf16 *key, const bf16 *value) {
    int64_t lane = slot % PAGE;
    bf16 *keys = head + slot / PAGE * 2 * PAGE * dim, *values = keys + (PAGE + (lane & ~1)) * (int64_t)dim;
    for (int d = 0; d < dim; d += 2) memcpy(keys + d * PAGE + 2 * lane, key + d, 2 * sizeof(bf16));
    for (int d = 0; d < dim; d += 16) store_half_of_pairs(values + 2 * d, lane & 1, load_halves(value + d, LANES));
}

typedef struct {
    bf16 *pool;
    int64_t pool_head;
    int kv_heads, dim;
    const bf16 *k;
    int64_t k_token, k_head;
    const bf16 *v;
    int64_t v_token, v_head;
    const int64_t *slots;
    int64_t tokens;
} Write;

static void write_task(const void *argument, int64_t index, int64_t next, int thread) {
    (void)next, (void)thread;
    const Write *job = argument;
    int64_t end = (index + 1) * TOKENS_AT_ONCE;
    for (int64_t t = index * TOKENS_AT_ONCE; t < end && t < job->tokens; t++)
        for (int h = 0; h < job->kv_heads; h++)
            store_token(job->pool + h * job->pool_head, job->slots[t], job->dim, job->k + t * job->k_token + h * job->k_head,
                        job->v + t * job->v_token + h * job->v_head);
}

/* Slots of one layer from k, v [tokens, kv_heads, head_dim], whose last dimension is dense. Returns -1, or the position of a slot
 * outside the pool, with nothing written. */
int64_t batchrun_write_kv(bf16 *pool, int64_t num_pages, int32_t kv_heads, int32_t dim, const bf16 *k, int64_t k_token,
                          int64_t k_head, const bf16 *v, int64_t v_token, int64_t v_head, const int64_t *slots, int64_t tokens,
                          int32_t threads) {
    int64_t bad = find_bad_slot(slots, tokens, num_pages);
    if (bad >= 0) return bad;
    Write job = {pool, num_pages * 2 * PAGE * dim, kv_heads, dim, k, k_token, k_head, v, v_token, v_head, slots, tokens};
    share_out(threads, (tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, write_task, &job);
    return -1;
}

/* Rotary embedding of one head in the rotate-half form. Both products are rounded before they are added, as torch's are. */
static void turn(const bf16 *x, const bf16 *cosine, const bf16 *sine, int dim, bf16 *out) {
    int half = dim / 2;
    for (int d = 0; d < half; d += 16) {
        int64_t left = half - d;
        Floats low = widen(load_halves(x + d, left)), high = widen(load_halves(x + half + d, left));
        Floats low_cos = widen(load_halves(cosine + d, left)), high_cos = widen(load_halves(cosine + half + d, left));
        Floats low_sin = widen(load_halves(sine + d, left)), high_sin = widen(load_halves(sine + half + d, left));
        Floats a = subtract(rounded(multiply(low, low_cos)), rounded(multiply(high, low_sin)));
        Floats b = add(rounded(multiply(high, high_cos)), rounded(multiply(low, high_sin)));
        store_halves(out + d, left, narrow(a));
        store_halves(out + half + d, left, narrow(b));
    }
}

typedef struct {
    bf16 *pool;
    int64_t pool_head;
    int heads, kv_heads, dim;
    const bf16 *qkv;
    int64_t qkv_token;
    const bf16 *cosine, *sine;
    const int64_t *slots;
    int64_t tokens;
    bf16 *q;
} Rotation;

static void rotate_task(const void *argument, int64_t index, int64_t next, int thread) {
    (void)next, (void)thread;
    const Rotation *job = argument;
    int dim = job->dim;
    int64_t end = (index + 1) * TOKENS_AT_ONCE;
    for (int64_t t = index * TOKENS_AT_ONCE; t < end && t < job->tokens; t++) {
        const bf16 *cosine = job->cosine + t * dim, *sine = job->sine + t * dim, *from = job->qkv + t * job->qkv_token;
        bf16 key[MAX_DIM];
        for (int h = 0; h < job->heads; h++) turn(from + h * dim, cosine, sine, dim, job->q + (t * job->heads + h) * dim);
        from += job->heads * dim;
        for (int h = 0; h < job->kv_heads; h++) {
            turn(from + h * dim, cosine, sine, dim, key);
            store_token(job->pool + h * job->pool_head, job->slots[t], dim, key, from + (job->kv_heads + h) * dim);
        }
    }
}

/* From qkv [tokens, heads + 2 kv_heads, head_dim], the last two dimensions dense: q turned into `q`, k turned and v into slots of
 * one layer. cosine, sine: [tokens, head_dim]. Returns as batchrun_write_kv. */
int64_t batchrun_rotate_and_write(bf16 *pool, int64_t num_pages, int32_t heads, int32_t kv_heads, int32_t dim, const bf16 *qkv,
                                  int64_t qkv_token, const bf16 *cosine, const bf16 *sine, const int64_t *slots, int64_t tokens,
                                  bf16 *q, int32_t threads) {
    int64_t bad = find_bad_slot(slots, tokens, num_pages);
    if (bad >= 0) return bad;
    Rotation job = {pool, num_pages * 2 * PAGE * dim, heads, kv_heads, dim, qkv, qkv_token, cosine, sine, slots, tokens, q};
    share_out(threads, (tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, rotate_task, &job);
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

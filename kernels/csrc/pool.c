/* Writing and copying keys and values; the pool's layout is in pool.h. */

#include "pool.h"

#include <string.h>

#include "int8.h"
#include "threads.h"

#define TOKENS_AT_ONCE 16

/* Position of the first slot outside the pool, or -1. */
static int64_t find_bad_slot(const int64_t *slots, int64_t tokens, int64_t num_pages) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_pages * PAGE) return t;
    return -1;
}

/* A layer's. */
typedef struct {
    char *memory;
    int64_t page_bytes, head_bytes;
    int dim, is_int8;
} Pool;

static Pool pool_of(char *memory, int64_t num_pages, int dim, int is_int8) {
    int64_t page_bytes = bytes_of_page(dim, is_int8);
    return (Pool){memory, page_bytes, num_pages * page_bytes, dim, is_int8};
}

/* A token of one kv head. Another thread may write the other key of its pair. */
static void store_token(const Pool *pool, int head, int64_t slot, const bf16 *key, const bf16 *value) {
    char *page = pool->memory + head * pool->head_bytes + slot / PAGE * pool->page_bytes;
    int dim = pool->dim, lane = (int)(slot % PAGE);
    if (pool->is_int8) {
        store_int8(page, lane, dim, key, value);
        return;
    }
    bf16 *keys = (bf16 *)page, *values = keys + (PAGE + (lane & ~1)) * dim;
    for (int d = 0; d < dim; d += 2) memcpy(keys + d * PAGE + 2 * lane, key + d, 2 * sizeof(bf16));
    for (int d = 0; d < dim; d += 16) store_half_of_pairs(values + 2 * d, lane & 1, load_halves(value + d, LANES));
}

typedef struct {
    Pool pool;
    int kv_heads;
    const bf16 *k;
    int64_t k_token, k_head;
    const bf16 *v;
    int64_t v_token, v_head;
    const int64_t *slots;
} Write;

static void write_tokens(const void *argument, int64_t first, int64_t end) {
    const Write *job = argument;
    for (int64_t t = first; t < end; t++)
        for (int h = 0; h < job->kv_heads; h++)
            store_token(&job->pool, h, job->slots[t], job->k + t * job->k_token + h * job->k_head,
                        job->v + t * job->v_token + h * job->v_head);
}

/* Slots of one layer from k, v [tokens, kv_heads, head_dim], whose last dimension is dense. Returns -1, or the position of a slot
 * outside the pool, with nothing written. */
int64_t batchrun_write_kv(char *pool, int64_t num_pages, int32_t kv_heads, int32_t dim, int32_t is_int8, const bf16 *k,
                          int64_t k_token, int64_t k_head, const bf16 *v, int64_t v_token, int64_t v_head, const int64_t *slots,
                          int64_t tokens, int32_t threads) {
    int64_t bad = find_bad_slot(slots, tokens, num_pages);
    if (bad >= 0) return bad;
    Write job = {pool_of(pool, num_pages, dim, is_int8), kv_heads, k, k_token, k_head, v, v_token, v_head, slots};
    share_rows(threads, tokens, TOKENS_AT_ONCE, write_tokens, &job);
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
    Pool pool;
    int heads, kv_heads;
    const bf16 *qkv;
    int64_t qkv_token;
    const bf16 *cosine, *sine;
    const int64_t *slots;
    bf16 *q;
} Rotation;

static void rotate_tokens(const void *argument, int64_t first, int64_t end) {
    const Rotation *job = argument;
    int dim = job->pool.dim;
    for (int64_t t = first; t < end; t++) {
        const bf16 *cosine = job->cosine + t * dim, *sine = job->sine + t * dim, *from = job->qkv + t * job->qkv_token;
        bf16 key[MAX_DIM];
        for (int h = 0; h < job->heads; h++) turn(from + h * dim, cosine, sine, dim, job->q + (t * job->heads + h) * dim);
        from += job->heads * dim;
        for (int h = 0; h < job->kv_heads; h++) {
            turn(from + h * dim, cosine, sine, dim, key);
            store_token(&job->pool, h, job->slots[t], key, from + (job->kv_heads + h) * dim);
        }
    }
}

/* From qkv [tokens, heads + 2 kv_heads, head_dim], the last two dimensions dense: q turned into `q`, k turned and v into slots of
 * one layer. cosine, sine: [tokens, head_dim]. Returns as batchrun_write_kv. */
int64_t batchrun_rotate_and_write(char *pool, int64_t num_pages, int32_t heads, int32_t kv_heads, int32_t dim, int32_t is_int8,
                                  const bf16 *qkv, int64_t qkv_token, const bf16 *cosine, const bf16 *sine, const int64_t *slots,
                                  int64_t tokens, bf16 *q, int32_t threads) {
    int64_t bad = find_bad_slot(slots, tokens, num_pages);
    if (bad >= 0) return bad;
    Rotation job = {pool_of(pool, num_pages, dim, is_int8), heads, kv_heads, qkv, qkv_token, cosine, sine, slots, q};
    share_rows(threads, tokens, TOKENS_AT_ONCE, rotate_tokens, &job);
    return -1;
}

INLINE void move(char *in_pool, char *staging, size_t size, int into_pool) {
    memcpy(into_pool ? in_pool : staging, into_pool ? staging : in_pool, size);
}

/* Elements of `size` bytes of a token of one kv head. */
INLINE void move_token(char *page, int64_t lane, int dim, size_t size, char *staging, int into_pool) {
    char *keys = page + 2 * lane * size, *values = page + ((PAGE + (lane & ~1)) * dim + (lane & 1)) * size;
    for (int d = 0; d < dim; d++) {
        move(keys + ((d & ~1) * PAGE + (d & 1)) * size, staging + d * size, size, into_pool);
        move(values + 2 * d * size, staging + (dim + d) * size, size, into_pool);
    }
}

/* Between the pool of all layers and staging [regions, tokens, bytes], a region being a kv head of a layer, the bytes being a
 * page's share: key, value, scales if there are any. Returns as batchrun_write_kv. */
int64_t batchrun_move_kv(char *pool, int64_t num_pages, int64_t regions, int32_t dim, int32_t is_int8, const int64_t *slots,
                         int64_t tokens, char *staging, int32_t into_pool) {
    int64_t bad = find_bad_slot(slots, tokens, num_pages), page_bytes = bytes_of_page(dim, is_int8);
    if (bad >= 0) return bad;
    for (int64_t region = 0; region < regions; region++)
        for (int64_t t = 0; t < tokens; t++, staging += page_bytes / PAGE) {
            int64_t lane = slots[t] % PAGE;
            char *page = pool + (region * num_pages + slots[t] / PAGE) * page_bytes, *scales = page + 2 * PAGE * dim;
            if (!is_int8) {
                move_token(page, lane, dim, sizeof(bf16), staging, into_pool);
                continue;
            }
            move_token(page, lane, dim, 1, staging, into_pool);
            move(scales + lane * sizeof(float), staging + 2 * dim, sizeof(float), into_pool);
            move(scales + (PAGE + lane) * sizeof(float), staging + 2 * dim + sizeof(float), sizeof(float), into_pool);
        }
    return -1;
}

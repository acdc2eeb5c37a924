/* Attention over pages of keys in bfloat16.
 *
 * The pool's layout is in pool.h. Pages in int8 are widened block by block, once for all query rows of a task, and what follows is
 * the same.
 *
 * A task is an interval of an item's queries, one kv head and an interval of the item's pages. It goes over its pages in blocks
 * with an online softmax (Milakov and Gimelshein 2018; Dao et al., FlashAttention) and leaves the sum of weights times values,
 * the sum of weights, and the maximum they are relative to. The second pass adds up the tasks of each token. Tasks and the
 * order of additions depend on the plan alone, never on the number of threads.
 *
 * Memory of a page outside an item's keys may hold anything, NaN included: its scores are replaced by -inf, its values by 0.
 */

#include <math.h>
#include <string.h>

#include "amx_tiles.h"
#include "exp.h"
#include "threads.h"
#include "tiles.h"

#define MERGED_AT_ONCE 8

typedef struct {
    int32_t start, count, num_keys, causal;
} Item;

typedef struct {
    int32_t item, kv_head, first, count; /* queries [first, first + count) of the item */
    int32_t entry, num_entries;
    int32_t partial; /* row of the first query's partial result; -1: nothing else reaches its tokens, write the output */
    int32_t unused;
} Task;

typedef struct {
    int32_t num_heads, kv_heads, head_dim, num_tasks;
    int64_t num_pages;
    const Item *items;
    const Entry *entries;
    const Task *tasks;
    int64_t num_merged;
    const int32_t *merged;         /* tokens with partial results */
    const int32_t *merge_offsets;  /* [num_merged + 1] */
    const int32_t *merge_rows;     /* their rows, in the order of addition */
    float *sums, *maxima, *totals; /* partial results: [rows, heads, dim], [rows, heads], [rows, heads] */
    float *scratch;
    int64_t scratch_size; /* floats per thread */
    int32_t amx_rows;     /* tasks of at least so many query rows use matrix tiles; 0: none does */
    int32_t is_int8;      /* the pool's elements are */
    int32_t few_rows;     /* tasks of fewer query rows mostly wait for memory */
} Plan;

static Head head_of(const Plan *plan, const char *pool, int kv_head) {
    int64_t page_bytes = bytes_of_page(plan->head_dim, plan->is_int8);
    return (Head){pool + kv_head * plan->num_pages * page_bytes, page_bytes};
}

INLINE Floats zero_if_minus_infinity(Floats x) {
    return select(equal(x, broadcast(-INFINITY)), zero(), x);
}

INLINE Floats one_if_zero(Floats x) {
    return select(equal(x, zero()), broadcast(1.0f), x);
}

#define MOST_ROWS (AMX_ROWS > TILE_ROWS ? AMX_ROWS : TILE_ROWS)

/* Rows of a tile and their running state. */
typedef struct {
    int rows, at_once;     /* at_once: pages whose scores are computed side by side */
    const bf16 *queries[MOST_ROWS];
    const bf16 *packed;    /* the queries for matrix tiles, or NULL */
    int limits[MOST_ROWS]; /* keys that each row sees */
    float *sums;           /* [rows, dim] */
    float *maximum, *total;
} Tile;

static void mask_scores(const Tile *tile, const Block *block, int num_pages, float *scores) {
    for (int r = 0; r < tile->rows; r++)
        for (int i = 0; i < num_pages; i++) {
            int low = block->low[i], end = low + tile->limits[r] - block->position[i];
            int high = end < block->high[i] ? end : block->high[i];
            float *at = scores + r * BLOCK_KEYS + i * PAGE;
            store_floats(at, select(lanes_between(low, high), load_floats(at), broadcast(-INFINITY)));
        }
}

static void score(const Tile *tile, const Block *block, const bf16 *const *ahead, int num_pages, int dim, float *scores) {
    if (tile->packed) {
        amx_scores(tile->packed, block->keys, ahead, num_pages, dim, scores);
        return;
    }
    for (int i = 0; i < num_pages; i += tile->at_once) {
        int count = num_pages - i < tile->at_once ? num_pages - i : tile->at_once;
        ScoreTile *multiply = SCORE_TILES[ahead != NULL][tile->rows - 1][count - 1];
        multiply(tile->queries, block->keys + i, ahead ? ahead + i : NULL, dim, scores + i * PAGE);
    }
}

static void add_values(const Tile *tile, const Block *block, const bf16 *const *ahead, int num_pages, int dim,
                       const uint32_t *weights, const float *shrink) {
    if (tile->packed) {
        amx_values(weights, block->packed, ahead, num_pages, dim, tile->rows, shrink, tile->sums);
        return;
    }
    for (int vectors = dim / 16, d = 0; vectors > 0;) {
        int groups = (vectors + TILE_VECTORS - 1) / TILE_VECTORS, count = (vectors + groups - 1) / groups;
        ValueTile *multiply = VALUE_TILES[ahead != NULL][tile->rows - 1][count - 1];
        multiply(weights, block->values, ahead, num_pages * PAIRS, d, dim, shrink, tile->sums);
        vectors -= count;
        d += 16 * count;
    }
}

static void attend_tile(const Tile *tile, const Block *block, const bf16 *const *ahead, int dim, float scale) {
    int num_pages = block->num_pages, rows = tile->rows;
    while (num_pages > 0 && block->position[num_pages - 1] >= tile->limits[rows - 1]) num_pages--;
    if (num_pages == 0) return;
    float scores[MOST_ROWS * BLOCK_KEYS] __attribute__((aligned(64)));
    score(tile, block, ahead, num_pages, dim, scores);
    int last = num_pages - 1, end = block->position[last] + block->high[last] - block->low[last];
    if (block->masked || tile->limits[0] < end) mask_scores(tile, block, num_pages, scores);

    float top[16] __attribute__((aligned(64))) = {0}, shrink[16] __attribute__((aligned(64)));
    for (int r = 0; r < rows; r++) {
        const float *row = scores + r * BLOCK_KEYS;
        Floats most = load_floats(row);
        for (int i = 1; i < num_pages; i++) most = maximum(most, load_floats(row + i * PAGE));
        top[r] = largest_of(most);
    }
    Floats before = load_some_floats(tile->maximum, rows);
    Floats now = maximum(before, multiply(load_floats(top), broadcast(scale)));
    Floats base = zero_if_minus_infinity(now); /* -inf - -inf would be NaN */
    Floats factor = exp2_nonpositive(subtract(before, base));
    store_some_floats(tile->maximum, rows, now);
    store_floats(top, base);
    store_floats(shrink, factor);

    /* The total is of the weights as rounded for the second product, so that the result is a true mean of values. */
    uint32_t weights[MOST_ROWS * BLOCK_PAIRS] __attribute__((aligned(64)));
    for (int r = 0; r < rows; r++) {
        Floats subtract = broadcast(top[r]), total = zero(), c = broadcast(scale);
        float *row = scores + r * BLOCK_KEYS;
        if (num_pages & 1) store_floats(row + num_pages * PAGE, broadcast(-INFINITY));
        for (int i = 0; i < num_pages; i += 2) {
            Floats a = exp2_nonpositive(multiply_subtract(load_floats(row + i * PAGE), c, subtract));
            Floats b = exp2_nonpositive(multiply_subtract(load_floats(row + (i + 1) * PAGE), c, subtract));
            total = add_and_store_pairs(total, weights + r * BLOCK_PAIRS + i * PAIRS, a, b);
        }
        tile->total[r] = tile->total[r] * shrink[r] + sum_of(total);
    }
    add_values(tile, block, ahead ? ahead + num_pages : NULL, num_pages, dim, weights, shrink);
}

static Ahead first_block(const Plan *plan, const Task *task, const char *pool) {
    return (Ahead){head_of(plan, pool, task->kv_head), plan->entries + task->entry,
                   task->num_entries < BLOCK_PAGES ? task->num_entries : BLOCK_PAGES, plan->items[task->item].num_keys};
}

/* The block behind the one at entry `e` or, if none is, `following`. */
static Ahead block_behind(const Task *task, const Entry *entries, int e, int most, const Head *head, const Ahead *following) {
    int rest = task->num_entries - e - BLOCK_PAGES;
    if (rest <= 0 || entries[e + BLOCK_PAGES].position >= most) return *following;
    return (Ahead){*head, entries + e + BLOCK_PAGES, rest < BLOCK_PAGES ? rest : BLOCK_PAGES, most};
}

/* Into the output, or where the token's partial results are added up. */
static void leave_results(const Plan *plan, const Task *task, const float *maximum, const float *total, const float *sums,
                          bf16 *out) {
    int dim = plan->head_dim, heads = plan->num_heads, group = heads / plan->kv_heads, rows = task->count * group;
    int first = plan->items[task->item].start + task->first;
    for (int r = 0; r < rows; r++) {
        int token = r / group, h = task->kv_head * group + r % group;
        const float *sum = sums + (int64_t)r * dim;
        if (task->partial < 0) {
            bf16 *to = out + ((int64_t)(first + token) * heads + h) * dim;
            Floats inverse = divide(broadcast(1.0f), one_if_zero(broadcast(total[r])));
            for (int d = 0; d < dim; d += 16) store_halves(to + d, LANES, narrow(multiply(load_floats(sum + d), inverse)));
        } else {
            int64_t at = (int64_t)(task->partial + token) * heads + h;
            memcpy(plan->sums + at * dim, sum, sizeof(float) * dim);
            plan->maxima[at] = maximum[r];
            plan->totals[at] = total[r];
        }
    }
}

static void run_task(const Plan *plan, const Task *task, const Ahead *following, const char *pool, const bf16 *q, bf16 *out,
                     float *scratch) {
    const Item item = plan->items[task->item];
    const Entry *entries = plan->entries + task->entry;
    const Head head = head_of(plan, pool, task->kv_head);
    int dim = plan->head_dim, heads = plan->num_heads, group = heads / plan->kv_heads, rows = task->count * group;
    float scale = 1.44269504088896340736f / sqrtf((float)dim);
    int matrix = plan->amx_rows && rows >= plan->amx_rows, most_rows = matrix ? AMX_ROWS : TILE_ROWS;
    int tiles = (rows + most_rows - 1) / most_rows, height = (rows + tiles - 1) / tiles;
    int64_t padded = (rows + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS; /* keeps what follows at addresses of whole lines */
    float *maximum = scratch, *total = maximum + padded, *sums = total + padded;
    bf16 *packed = (bf16 *)(sums + padded * dim), *values = packed + padded * dim;
    bf16 *widened = plan->is_int8 ? values + BLOCK_KEYS * dim : NULL;
    for (int r = 0; r < rows; r++) maximum[r] = -INFINITY;
    memset(total, 0, sizeof(float) * (padded + (matrix ? padded : rows) * dim));
    q += ((int64_t)(item.start + task->first) * heads + task->kv_head * group) * dim;
    /* The first query sees `limit` keys, each later one one more; without causality all see all. */
    int limit = item.causal ? item.num_keys - item.count + task->first + 1 : item.num_keys;
    int most = item.causal ? limit + task->count - 1 : limit;
    /* A few rows wait for memory, which is fastest from one end of a page to the other. */
    int at_once = rows < plan->few_rows && !widened ? 1 : TILE_VECTORS;
    Block block; /* too large to be cleared for every task */
    block.packed = matrix ? values : NULL;
    if (matrix) {
        for (int r = 0; r < rows; r++)
            memcpy(packed + (int64_t)r * dim, q + ((int64_t)(r / group) * heads + r % group) * dim, sizeof(bf16) * dim);
        amx_begin(height, dim);
    }
    for (int e = 0; e < task->num_entries && entries[e].position < most; e += BLOCK_PAGES) {
        int rest = task->num_entries - e, pages = rest < BLOCK_PAGES ? rest : BLOCK_PAGES;
        while (entries[e + pages - 1].position >= most) pages--;
        Ahead ahead = block_behind(task, entries, e, most, &head, following);
        for (int i = e + 2 * BLOCK_PAGES; i < e + 3 * BLOCK_PAGES && i < task->num_entries; i++)
            prefetch(page_of(&head, entries + i)); /* for its translation: the page is fetched a block later */
        if (widened) widen_block(&ahead, &head, entries + e, pages, dim, widened);
        load_block(&block, &head, entries + e, pages, item.num_keys, dim, widened);
        if (matrix) amx_pack_values(block.values, pages, dim, block.packed);
        const bf16 *places[2 * BLOCK_PAGES], *const *fetched = widened ? NULL : halves_ahead(&ahead, pages, dim, places);
        for (int i = 0; i < tiles; i++, fetched = NULL) {
            int low = (int)((int64_t)rows * i / tiles), high = (int)((int64_t)rows * (i + 1) / tiles);
            if (matrix) low = i * height, high = i == tiles - 1 ? rows : low + height; /* only the last may write rows too many */
            Tile tile = {.rows = high - low,
                         .at_once = at_once,
                         .packed = matrix ? packed + (int64_t)low * dim : NULL,
                         .sums = sums + (int64_t)low * dim,
                         .maximum = maximum + low,
                         .total = total + low};
            for (int r = low, token = low / group, h = low % group; r < high; r++) {
                tile.queries[r - low] = q + ((int64_t)token * heads + h) * dim;
                tile.limits[r - low] = item.causal ? limit + token : limit;
                if (++h == group) h = 0, token++;
            }
            attend_tile(&tile, &block, fetched, dim, scale);
        }
    }
    if (matrix) amx_end();
    leave_results(plan, task, maximum, total, sums, out);
}

/* Add up a token's partial results: out = sum 2^(m_i - m) s_i / sum 2^(m_i - m) t_i; 0 where all are absent. */
static void merge_token(const Plan *plan, int64_t index, bf16 *out) {
    const int32_t *rows = plan->merge_rows + plan->merge_offsets[index];
    int count = plan->merge_offsets[index + 1] - plan->merge_offsets[index], heads = plan->num_heads, dim = plan->head_dim;
    out += (int64_t)plan->merged[index] * heads * dim;
    for (int first = 0; first < heads; first += 16) {
        int size = heads - first < 16 ? heads - first : 16;
        Floats top = broadcast(-INFINITY), total = zero();
        for (int i = 0; i < count; i++)
            top = maximum(top, load_some_floats(plan->maxima + (int64_t)rows[i] * heads + first, size));
        top = zero_if_minus_infinity(top);
        for (int i = 0; i < count; i++) { /* the weights take the maxima's place */
            int64_t at = (int64_t)rows[i] * heads + first;
            Floats weight = exp2_nonpositive(subtract(load_some_floats(plan->maxima + at, size), top));
            total = multiply_add(weight, load_some_floats(plan->totals + at, size), total);
            store_some_floats(plan->maxima + at, size, weight);
        }
        float inverse[16] __attribute__((aligned(64)));
        store_floats(inverse, divide(broadcast(1.0f), one_if_zero(total)));
        for (int h = first; h < first + size; h++)
            for (int d = 0; d < dim; d += 16) {
                Floats sum = zero();
                for (int i = 0; i < count; i++) {
                    int64_t at = (int64_t)rows[i] * heads + h;
                    sum = multiply_add(broadcast(plan->maxima[at]), load_floats(plan->sums + at * dim + d), sum);
                }
                store_halves(out + h * dim + d, LANES, narrow(multiply(sum, broadcast(inverse[h - first]))));
            }
    }
}

typedef struct {
    const Plan *plan;
    const char *pool;
    const bf16 *q;
    bf16 *out;
} Step;

static void attend_task(const void *argument, int64_t index, int64_t next, int thread) {
    const Step *step = argument;
    const Plan *plan = step->plan;
    Ahead following = {0};
    if (next >= 0) following = first_block(plan, plan->tasks + next, step->pool);
    run_task(plan, plan->tasks + index, &following, step->pool, step->q, step->out, plan->scratch + thread * plan->scratch_size);
}

static void merge_tokens(const void *argument, int64_t first, int64_t end) {
    const Step *step = argument;
    for (int64_t i = first; i < end; i++) merge_token(step->plan, i, step->out);
}

/* pool: the layer's; q, out: [tokens, heads, head_dim]. Every token of the step is written. */
void batchrun_attend(const Plan *plan, const char *pool, const bf16 *q, bf16 *out, int32_t threads) {
    Step step = {plan, pool, q, out};
    share_out(threads, plan->num_tasks, attend_task, &step);
    share_rows(threads, plan->num_merged, MERGED_AT_ONCE, merge_tokens, &step);
}

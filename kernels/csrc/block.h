/* A block of pages: what attention goes over in one step of its online softmax. */

#ifndef BATCHRUN_BLOCK_H
#define BATCHRUN_BLOCK_H

#include "pool.h"

#define PAIRS (PAGE / 2)
#define BLOCK_PAGES 8
#define BLOCK_PAIRS (BLOCK_PAGES * PAIRS)
#define BLOCK_KEYS (BLOCK_PAGES * PAGE)

typedef struct {
    int32_t page, position, low, high; /* keys of lanes [low, high) of the page; `position` is the first one's in the item */
} Entry;

/* Pages of one kv head. */
typedef struct {
    const char *first;
    int64_t page_bytes;
} Head;

INLINE const char *page_of(const Head *head, const Entry *entry) {
    return head->first + entry->page * head->page_bytes;
}

/* A block of pages, ready to be multiplied. */
typedef struct {
    int num_pages, masked; /* masked: some lane holds none of the item's keys */
    int position[BLOCK_PAGES], low[BLOCK_PAGES], high[BLOCK_PAGES];
    const bf16 *keys[BLOCK_PAGES];
    const bf16 *values[BLOCK_PAIRS];
    bf16 *packed; /* the values for matrix tiles, or NULL */
    bf16 edges[2 * BLOCK_PAGES][2 * MAX_DIM]; /* copies of pairs of which one key is not the item's, that one zeroed */
} Block;

/* `widened`: the pages in bfloat16, one behind the other, if they are not so in the pool; or NULL. */
void load_block(Block *block, const Head *head, const Entry *entries, int num_pages, int num_keys, int dim, const bf16 *widened);

/* Pages that will be read next. */
typedef struct {
    Head head;
    const Entry *entries;
    int num_pages, num_keys;
} Ahead;

/* Halves of the pages that take the places of a block's `num_pages` when it is done, in the order of memory; the last of them
 * more than once, or none: NULL. Pages beyond are fetched at once. */
const bf16 *const *halves_ahead(const Ahead *ahead, int num_pages, int dim, const bf16 **halves);

/* A block's int8 pages in bfloat16, one behind the other; those that take their places are fetched meanwhile. */
void widen_block(const Ahead *ahead, const Head *head, const Entry *entries, int num_pages, int dim, bf16 *out);

#endif

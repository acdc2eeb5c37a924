/* Where a block's keys and values lie, and what to fetch while they are read. */

#include "block.h"

#include "int8.h"

static const bf16 ZERO_VALUES[2 * MAX_DIM] __attribute__((aligned(64)));

void load_block(Block *block, const Head *head, const Entry *entries, int num_pages, int num_keys, int dim, const bf16 *widened) {
    block->num_pages = num_pages;
    block->masked = 0;
    for (int i = 0; i < num_pages; i++) {
        const bf16 *page = widened ? widened + i * 2 * PAGE * dim : (const bf16 *)page_of(head, entries + i);
        int low = entries[i].low, high = entries[i].high, end = low + num_keys - entries[i].position;
        if (high > end) high = end;
        block->position[i] = entries[i].position;
        block->low[i] = low;
        block->high[i] = high;
        block->keys[i] = page;
        const bf16 **values = block->values + i * PAIRS;
        for (int j = 0; j < PAIRS; j++) values[j] = page + (PAGE + 2 * j) * (int64_t)dim;
        if (low == 0 && high == PAGE) continue;
        block->masked = 1;
        for (int j = 0; j < PAIRS; j++) {
            int first = low <= 2 * j && 2 * j < high, second = low <= 2 * j + 1 && 2 * j + 1 < high;
            if (first && second) continue;
            if (!first && !second) {
                values[j] = ZERO_VALUES;
                continue;
            }
            bf16 *copy = block->edges[2 * i + (second ? 0 : 1)];
            for (int d = 0; d < dim; d++) {
                copy[2 * d] = first ? values[j][2 * d] : 0;
                copy[2 * d + 1] = second ? values[j][2 * d + 1] : 0;
            }
            values[j] = copy;
        }
    }
}

/* The pages that take the places of a block's `num_pages` when it is done: how many there are. Pages beyond are fetched at once. */
static int pages_ahead(const Ahead *ahead, int num_pages, const char **pages) {
    int count = 0;
    for (int i = 0; i < ahead->num_pages && ahead->entries[i].position < ahead->num_keys; i++) {
        const char *page = page_of(&ahead->head, ahead->entries + i);
        if (i < num_pages)
            pages[count++] = page;
        else
            for (int64_t at = 0; at < ahead->head.page_bytes; at += LINE) prefetch(page + at);
    }
    return count;
}

const bf16 *const *halves_ahead(const Ahead *ahead, int num_pages, int dim, const bf16 **halves) {
    const char *pages[BLOCK_PAGES];
    int count = pages_ahead(ahead, num_pages, pages);
    for (int i = 0; i < 2 * num_pages && count; i++) {
        const bf16 *last = (const bf16 *)pages[count - 1] + PAGE * dim;
        halves[i] = i < 2 * count ? (const bf16 *)pages[i / 2] + i % 2 * PAGE * dim : last;
    }
    return count ? halves : NULL;
}

void widen_block(const Ahead *ahead, const Head *head, const Entry *entries, int num_pages, int dim, bf16 *out) {
    const char *next[BLOCK_PAGES];
    int count = pages_ahead(ahead, num_pages, next);
    for (int i = 0; i < num_pages; i++) {
        const char *page = page_of(head, entries + i);
        widen_page(page, i < count ? next[i] : page, dim, out + i * 2 * PAGE * dim);
    }
}

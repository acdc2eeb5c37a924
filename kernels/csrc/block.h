/* A block of pages: what attention goes over in one step of its online softmax. */

#ifndef BATCHRUN_BLOCK_H
#define BATCHRUN_BLOCK_H

#include "pool.h"

#define PAIRS (PAGE / 2)
#define BLOCK_PAGES 8
#define BLOCK_PAIRS (BLOCK_PAGES * PAIRS)
#define BLOCK_KEYS (BLOCK_PAGES * PAGE)

#endif

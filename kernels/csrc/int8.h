/* Keys and values in int8: x is about scale * q, a token of a kv head having a scale for its key and one for its value. */

#ifndef BATCHRUN_INT8_H
#define BATCHRUN_INT8_H

#include "pool.h"

/* A token's key and value into lane `lane` of a page: of each the scale is its largest size / 127. The scale is NaN where a number is
 * not finite, so that whoever reads the token gets NaN; numbers that are all below 1e-36 become 0. Other lanes are left alone. */
void store_int8(char *page, int lane, int dim, const bf16 *key, const bf16 *value);

/* A page as a bfloat16 pool has it, rounded to the nearest. The page `ahead` is fetched meanwhile, line by line. */
void widen_page(const char *page, const char *ahead, int dim, bf16 *out);

#endif

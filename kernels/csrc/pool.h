/* Pool, per layer: [kv head][page][K then V], a page being 16 tokens of one kv head:
 *
 *     K   [head_dim / 2][16 keys][2]    one register holds a pair of dims of 16 keys: a query's pair, broadcast, adds to the
 *                                       scores of 16 keys lane by lane, and no sum over lanes is ever needed
 *     V   [8 pairs of keys][head_dim][2]    one register holds a pair of keys in 16 dims: a pair of weights, broadcast, adds to
 *                                       16 elements of the output
 */

#include "simd.h"

#define PAGE 16
#define MAX_DIM 256

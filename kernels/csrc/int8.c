/* Rounding keys and values to int8 and widening them again; the layout is in pool.h. */

#include "int8.h"

#include <float.h>
#include <math.h>

#define LARGEST 127.0f

static float find_scale(const bf16 *x, int dim) {
    Floats most = zero();
    Mask wrong = differs(most, most);
    for (int d = 0; d < dim; d += LANES) {
        Floats part = widen(load_halves(x + d, LANES));
        wrong = mask_or(wrong, is_nan(subtract(part, part))); /* infinite or NaN */
        most = maximum(most, maximum(part, subtract(zero(), part)));
    }
    float scale = largest_of(most) / LARGEST;
    return any(wrong) ? NAN : scale < FLT_MIN ? 0.0f : scale;
}

/* 16 of x in units of `scale`; 0 where that is 0 or NaN. Not times its inverse, which would round otherwise on other CPUs. */
INLINE Floats in_units(const bf16 *x, float scale) {
    return scale > 0 ? divide(widen(load_halves(x, LANES)), broadcast(scale)) : zero();
}

void store_int8(char *page, int lane, int dim, const bf16 *key, const bf16 *value) {
    int8_t *keys = (int8_t *)page, *values = keys + (PAGE + (lane & ~1)) * dim, rounded_key[MAX_DIM];
    float *scales = (float *)(page + 2 * PAGE * dim);
    float key_scale = scales[lane] = find_scale(key, dim), value_scale = scales[PAGE + lane] = find_scale(value, dim);
    for (int d = 0; d < dim; d += LANES) store_bytes(rounded_key + d, in_units(key + d, key_scale));
    for (int d = 0; d < dim; d += 2) memcpy(keys + d * PAGE + 2 * lane, rounded_key + d, 2);
    for (int d = 0; d < dim; d += LANES) store_half_of_byte_pairs(values + 2 * d, lane & 1, in_units(value + d, value_scale));
}

/* 32 elements, of which the first 16 have the scales `first`. */
INLINE void widen_elements(const int8_t *from, Floats first, Floats second, bf16 *to) {
    store_halves(to, LANES, narrow(multiply(load_bytes(from), first)));
    store_halves(to + LANES, LANES, narrow(multiply(load_bytes(from + LANES), second)));
}

void widen_page(const char *page, const char *ahead, int dim, bf16 *out) {
    const int8_t *from = (const int8_t *)page;
    const float *scales = (const float *)(page + 2 * PAGE * dim);
    float twice[2 * PAGE]; /* of the keys, as a pair of dims of each key lies side by side */
    for (int i = 0; i < 2 * PAGE; i++) twice[i] = scales[i / 2];
    Floats first = load_floats(twice), second = load_floats(twice + LANES);
    for (int64_t at = bytes_of_page(dim, 1) - LINE; at >= 2 * PAGE * dim; at -= LINE) prefetch(ahead + at);
    for (int d = 0; d < dim; d += 4, from += 4 * PAGE, ahead += LINE, out += 4 * PAGE) {
        prefetch(ahead);
        widen_elements(from, first, second, out);
        widen_elements(from + 2 * PAGE, first, second, out + 2 * PAGE);
    }
    for (int i = 0; i < PAGE; i += 2, from += 2 * dim, ahead += 2 * dim, out += 2 * dim) {
        Floats both = alternate(scales + PAGE + i);
        for (int d = 0; d < 2 * dim; d += LINE) prefetch(ahead + d);
        for (int d = 0; d < 2 * dim; d += 2 * LANES) widen_elements(from + d, both, both, out + d);
    }
}

/* Exponentials of 16 numbers. */

#ifndef BATCHRUN_EXP_H
#define BATCHRUN_EXP_H

#include "simd.h"

/* e^-x, relative error 2e-7; infinite or 0 where it leaves float32, NaN stays NaN. Of a large x, f and p are anything. */
INLINE Floats exp_minus(Floats x) {
    x = multiply(x, broadcast(-1.44269504088896340736f));
    Floats n = round_small(x), f = subtract(x, n);
    Floats p = broadcast(1.535336188319500e-4f); /* 2^f: Moshier, Cephes, exp2f.c */
    p = multiply_add(p, f, broadcast(1.339887440266574e-3f));
    p = multiply_add(p, f, broadcast(9.618437357674640e-3f));
    p = multiply_add(p, f, broadcast(5.550332471162809e-2f));
    p = multiply_add(p, f, broadcast(2.402264791363012e-1f));
    p = multiply_add(p, f, broadcast(6.931472028550421e-1f));
    p = multiply_add(p, f, broadcast(1.0f));
    return times_power_of_two(p, n);
}

/* silu(gate) * up, unrounded; silu is rounded before the product. */
INLINE Floats silu_times(Floats gate, Floats up) {
    Floats silu = divide(gate, add(broadcast(1.0f), exp_minus(gate)));
    return multiply(rounded(silu), up);
}

/* 2^x for x <= 0, relative error 3e-6, exactly 1 at 0 and exactly 0 far below; NaN stays NaN. Of -inf, f and p are anything. */
INLINE Floats exp2_nonpositive(Floats x) {
    Floats f = subtract(x, round_down(x));
    Floats p = broadcast(0.013426684774458408f);
    p = multiply_add(p, f, broadcast(0.052242472767829895f));
    p = multiply_add(p, f, broadcast(0.241280198097229f));
    p = multiply_add(p, f, broadcast(0.6930448412895203f));
    p = multiply_add(p, f, broadcast(1.0f));
    return times_power_of_two(p, x);
}

#endif

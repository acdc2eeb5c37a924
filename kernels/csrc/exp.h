/* Exponentials of 16 numbers. */

#ifndef BATCHRUN_EXP_H
#define BATCHRUN_EXP_H

#include "bf16.h"

/* e^-x, relative error 2e-7; infinite or 0 where it leaves float32, NaN stays NaN. Of an infinite x, f and p are NaN: scalef
 * makes 0 or infinity of that, as its definition says. */
INLINE __m512 exp_minus(__m512 x) {
    x = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504088896340736f));
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.535336188319500e-4f); /* 2^f: Moshier, Cephes, exp2f.c */
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887440266574e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437357674640e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332471162809e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791363012e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472028550421e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* silu(gate) * up, unrounded; silu is rounded before the product. */
INLINE __m512 silu_times(__m512 gate, __m512 up) {
    __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), exp_minus(gate)));
    return _mm512_mul_ps(rounded(silu), up);
}

/* 2^x for x <= 0, relative error 3e-6, exactly 1 at 0 and exactly 0 far below; NaN stays NaN. Of -inf, f and p are NaN: scalef
 * makes 0 of that, as its definition says. */
INLINE __m512 exp2_nonpositive(__m512 x) {
    __m512 f = _mm512_sub_ps(x, _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    __m512 p = _mm512_set1_ps(0.013426684774458408f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.052242472767829895f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241280198097229f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6930448412895203f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x); /* scales by 2^floor(x) */
}

#endif

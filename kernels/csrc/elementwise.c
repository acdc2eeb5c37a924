/* Norms and gates: one pass over memory each. Rows are independent, so results have the same bits on any number of threads. */

#include <math.h>
#include <stddef.h>

#include "exp.h"

#define SUMS 4 /* additions in flight */
#define THREADED_ELEMENTS (1 << 16) /* below, waking threads costs more than they save */

/* x, or x + residual, rounded and stored in `sum`. */
INLINE __m512 norm_input(const bf16 *x, const bf16 *residual, bf16 *sum, int64_t at, __mmask16 lanes) {
    __m512 value = widen(load_lanes(x + at, lanes));
    if (!residual) return value;
    __m256i added = narrow(_mm512_add_ps(widen(load_lanes(residual + at, lanes)), value));
    store_lanes(sum + at, lanes, added);
    return widen(added);
}

static void norm_row(const bf16 *x, const bf16 *residual, const bf16 *weight, float eps, bf16 *sum, bf16 *out, int64_t width) {
    __m512 squares[SUMS];
    int64_t at = 0;
    for (int i = 0; i < SUMS; i++) squares[i] = _mm512_setzero_ps();
    for (; at + 16 * SUMS <= width; at += 16 * SUMS)
        for (int i = 0; i < SUMS; i++) {
            __m512 value = norm_input(x, residual, sum, at + 16 * i, ALL_LANES);
            squares[i] = _mm512_fmadd_ps(value, value, squares[i]);
        }
    for (; at < width; at += 16) {
        __m512 value = norm_input(x, residual, sum, at, lanes_of(width - at));
        squares[0] = _mm512_fmadd_ps(value, value, squares[0]);
    }
    __m512 all = _mm512_add_ps(_mm512_add_ps(squares[0], squares[1]), _mm512_add_ps(squares[2], squares[3]));
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(all) / (float)width + eps));
    const bf16 *row = residual ? sum : x; /* still in the first-level cache */
    for (int64_t d = 0; d < width; d += 16) {
        __mmask16 lanes = lanes_of(width - d);
        __m512 normed = _mm512_mul_ps(widen(load_lanes(row + d, lanes)), scale);
        store_lanes(out + d, lanes, narrow(_mm512_mul_ps(normed, widen(load_lanes(weight + d, lanes)))));
    }
}

/* out = x / sqrt(mean(x^2) + eps) * weight over rows of `width`. Where residual is not NULL, sum = x + residual, rounded, takes
 * the place of x. x and residual have dense rows; sum and out are dense. */
void batchrun_rms_norm(const bf16 *x, int64_t x_row, const bf16 *residual, int64_t residual_row, const bf16 *weight, float eps,
                       bf16 *sum, bf16 *out, int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width >= THREADED_ELEMENTS)
    for (int64_t r = 0; r < rows; r++)
        if (residual)
            norm_row(x + r * x_row, residual + r * residual_row, weight, eps, sum + r * width, out + r * width, width);
        else
            norm_row(x + r * x_row, NULL, weight, eps, NULL, out + r * width, width);
}

/* out = silu(gate) * up of rows [2 * width], gate first; silu is rounded before the product. out is dense. */
void batchrun_silu_mul(const bf16 *gate_up, int64_t row, bf16 *out, int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width >= THREADED_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *gates = gate_up + r * row, *ups = gates + width;
        for (int64_t d = 0; d < width; d += 16) {
            __mmask16 lanes = lanes_of(width - d);
            __m512 gate = widen(load_lanes(gates + d, lanes)), up = widen(load_lanes(ups + d, lanes));
            store_lanes(out + r * width + d, lanes, narrow(silu_times(gate, up)));
        }
    }
}

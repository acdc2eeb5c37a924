/* Norms and gates: one pass over memory each. Rows are independent, so results have the same bits on any number of threads. */

#include <math.h>
#include <stddef.h>

#include "exp.h"

#define SUMS 4 /* additions in flight */
#define THREADED_ELEMENTS (1 << 16) /* below, waking threads costs more than they save */

/* x, or x + residual, rounded and stored in `sum`. */
INLINE Floats norm_input(const bf16 *x, const bf16 *residual, bf16 *sum, int64_t at, int64_t count) {
    Floats value = widen(load_halves(x + at, count));
    if (!residual) return value;
    Halves added = narrow(add(widen(load_halves(residual + at, count)), value));
    store_halves(sum + at, count, added);
    return widen(added);
}

static void norm_row(const bf16 *x, const bf16 *residual, const bf16 *weight, float eps, bf16 *sum, bf16 *out, int64_t width) {
    Floats squares[SUMS];
    int64_t at = 0;
    for (int i = 0; i < SUMS; i++) squares[i] = zero();
    for (; at + 16 * SUMS <= width; at += 16 * SUMS)
        for (int i = 0; i < SUMS; i++) {
            Floats value = norm_input(x, residual, sum, at + 16 * i, LANES);
            squares[i] = multiply_add(value, value, squares[i]);
        }
    for (; at < width; at += 16) {
        Floats value = norm_input(x, residual, sum, at, width - at);
        squares[0] = multiply_add(value, value, squares[0]);
    }
    Floats all = add(add(squares[0], squares[1]), add(squares[2], squares[3]));
    Floats scale = broadcast(1.0f / sqrtf(sum_of(all) / (float)width + eps));
    const bf16 *row = residual ? sum : x; /* still in the first-level cache */
    for (int64_t d = 0; d < width; d += 16) {
        int64_t left = width - d;
        Floats normed = multiply(widen(load_halves(row + d, left)), scale);
        store_halves(out + d, left, narrow(multiply(normed, widen(load_halves(weight + d, left)))));
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
            int64_t left = width - d;
            Floats gate = widen(load_halves(gates + d, left)), up = widen(load_halves(ups + d, left));
            store_halves(out + r * width + d, left, narrow(silu_times(gate, up)));
        }
    }
}

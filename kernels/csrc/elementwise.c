/* Norms and gates: one pass over memory each. Rows are independent, so results have the same bits on any number of threads. */

#include <math.h>
#include <stddef.h>

#include "exp.h"
#include "threads.h"

#define SUMS 4 /* additions in flight */
#define ROWS_AT_ONCE 16
#define THREADED_ELEMENTS (1 << 15) /* below, waking threads costs more than they save */

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

typedef struct {
    const bf16 *x, *residual, *weight;
    int64_t x_row, residual_row, width;
    float eps;
    bf16 *sum, *out;
} Norm;

static void norm_rows(const void *argument, int64_t first, int64_t end) {
    const Norm *job = argument;
    for (int64_t r = first; r < end; r++) {
        const bf16 *residual = job->residual ? job->residual + r * job->residual_row : NULL;
        bf16 *sum = residual ? job->sum + r * job->width : NULL;
        norm_row(job->x + r * job->x_row, residual, job->weight, job->eps, sum, job->out + r * job->width, job->width);
    }
}

static int threads_for(int64_t elements, int threads) {
    return elements < THREADED_ELEMENTS ? 1 : threads;
}

/* out = x / sqrt(mean(x^2) + eps) * weight over rows of `width`. Where residual is not NULL, sum = x + residual, rounded, takes
 * the place of x. x and residual have dense rows; sum and out are dense. */
void batchrun_rms_norm(const bf16 *x, int64_t x_row, const bf16 *residual, int64_t residual_row, const bf16 *weight, float eps,
                       bf16 *sum, bf16 *out, int64_t rows, int64_t width, int32_t threads) {
    Norm job = {x, residual, weight, x_row, residual_row, width, eps, sum, out};
    share_rows(threads_for(rows * width, threads), rows, ROWS_AT_ONCE, norm_rows, &job);
}

typedef struct {
    const bf16 *gate_up;
    int64_t row, width;
    bf16 *out;
} Gate;

static void gate_rows(const void *argument, int64_t first, int64_t end) {
    const Gate *job = argument;
    for (int64_t r = first; r < end; r++) {
        const bf16 *gates = job->gate_up + r * job->row, *ups = gates + job->width;
        for (int64_t d = 0; d < job->width; d += 16) {
            int64_t left = job->width - d;
            Floats gate = widen(load_halves(gates + d, left)), up = widen(load_halves(ups + d, left));
            store_halves(job->out + r * job->width + d, left, narrow(silu_times(gate, up)));
        }
    }
}

/* out = silu(gate) * up of rows [2 * width], gate first; silu is rounded before the product. out is dense. */
void batchrun_silu_mul(const bf16 *gate_up, int64_t row, bf16 *out, int64_t rows, int64_t width, int32_t threads) {
    Gate job = {gate_up, row, width, out};
    share_rows(threads_for(rows * width, threads), rows, ROWS_AT_ONCE, gate_rows, &job);
}

#define GATHERED_AT_ONCE 64

typedef struct {
    const char *table;
    int64_t row;
    const int64_t *which;
    char *out;
} Gather;

static void gather_rows(const void *argument, int64_t first, int64_t end) {
    const Gather *job = argument;
    for (int64_t i = first; i < end; i++) memcpy(job->out + i * job->row, job->table + job->which[i] * job->row, job->row);
}

/* out[i] = table[which[i]], dense rows of `row` bytes. Returns -1, or the first i whose place is outside [0, rows), with nothing
 * written. */
int64_t batchrun_gather(const char *table, int64_t row, int64_t rows, const int64_t *which, int64_t count, char *out, int32_t threads) {
    for (int64_t i = 0; i < count; i++)
        if (which[i] < 0 || which[i] >= rows) return i;
    Gather job = {table, row, which, out};
    share_rows(threads_for(count * row / (int64_t)sizeof(bf16), threads), count, GATHERED_AT_ONCE, gather_rows, &job);
    return -1;
}

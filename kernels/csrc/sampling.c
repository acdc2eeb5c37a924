/* Choosing tokens from rows of bfloat16 logits: the largest one, or one drawn from all of them. Each row is one thread's. */

#include <math.h>

#include "exp.h"
#include "threads.h"

#define MOST_BLOCKS 1024

typedef struct {
    const bf16 *logits;
    int64_t row, width;
    int64_t *best;
    uint8_t *finite;
} Best;

static void best_of_row(const Best *job, int64_t r) {
    const bf16 *from = job->logits + r * job->row;
    Floats most = broadcast(-INFINITY);
    Ints where = count_from(0);
    Mask nan = first_lanes(0);
    for (int64_t at = 0; at < job->width; at += 16) {
        int64_t left = job->width - at;
        Floats value = select(first_lanes(left), widen(load_halves(from + at, left)), broadcast(-INFINITY));
        Mask more = greater(value, most);
        nan = mask_or(nan, is_nan(value));
        most = select(more, value, most);
        where = select_ints(more, count_from((int32_t)at), where);
    }
    float largest = largest_of(most);
    job->best[r] = smallest_of(equal(most, broadcast(largest)), where);
    job->finite[r] = !any(nan) && largest - largest == 0.0f;
}

static void best_rows(const void *job, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++) best_of_row(job, r);
}

/* best: the largest logit's place, the lowest among equals; any place where the row holds NaN. finite: whether that logit is
 * finite and no other is NaN. logits: rows of `width` < 2^31 numbers, `row` apart. */
void batchrun_best(const bf16 *logits, int64_t row, int64_t rows, int64_t width, int64_t *best, uint8_t *finite, int32_t threads) {
    Best job = {logits, row, width, best, finite};
    share_rows(threads, rows, 1, best_rows, &job);
}

typedef struct {
    Floats largest, temperature, least, scale;
} Settings;

/* round(scale * e^((x - largest) / temperature)), 0 where that is below `least`. */
INLINE Floats weight_of(const Settings *s, const bf16 *from, int64_t count) {
    Floats gap = divide(subtract(s->largest, widen(load_halves(from, count))), s->temperature);
    Floats weight = round_to_even(multiply(exp_minus(gap), s->scale));
    return select(mask_and(first_lanes(count), at_least(weight, s->least)), weight, zero());
}

static int64_t draw_row(const Settings *settings, const bf16 *logits, int64_t width, double uniform) {
    /* Sums of whole numbers below 2^53 are exact, so that neither blocks nor lanes change the outcome. */
    double sums[MOST_BLOCKS], total = 0.0;
    int64_t block = (width + 64 * MOST_BLOCKS - 1) / (64 * MOST_BLOCKS) * 64, blocks = (width + block - 1) / block;
    for (int64_t b = 0; b < blocks; b++) {
        Doubles sum = {0};
        int64_t end = (b + 1) * block < width ? (b + 1) * block : width;
        for (int64_t at = b * block; at < end; at += 16) sum = add_to_doubles(sum, weight_of(settings, logits + at, end - at));
        sums[b] = sum_of_doubles(sum);
        total += sums[b];
    }
    double target = floor(uniform * total), before = 0.0; /* below the total: uniform is at most 1 - 2^-53 */
    int64_t b = 0;
    while (before + sums[b] <= target) before += sums[b++];
    for (int64_t at = b * block;; at += 16) {
        float weights[16];
        store_floats(weights, weight_of(settings, logits + at, width - at));
        for (int i = 0; i < 16; i++) {
            before += weights[i];
            if (before > target) return at + i;
        }
    }
}

typedef struct {
    const bf16 *logits;
    int64_t row, width;
    const int64_t *which, *best;
    const float *temperature, *least;
    const double *uniform;
    float scale;
    int64_t *token;
} Draw;

static void draw_token(const Draw *job, int64_t i) {
    const bf16 *from = job->logits + job->which[i] * job->row;
    Settings settings = {.largest = broadcast(float_of(from[job->best[i]])),
                         .temperature = broadcast(job->temperature[i]),
                         .least = broadcast(job->least[i]),
                         .scale = broadcast(job->scale)};
    job->token[i] = draw_row(&settings, from, job->width, job->uniform[i]);
}

static void draw_tokens(const void *job, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) draw_token(job, i);
}

/* token[i]: drawn from row which[i], whose largest logit lies at best[i]: the first place where the running sum of its weights
 * exceeds uniform[i] of their sum. `scale` keeps the sum of a row's weights below 2^53. */
void batchrun_draw(const bf16 *logits, int64_t row, int64_t width, const int64_t *which, const int64_t *best,
                   const float *temperature, const float *least, const double *uniform, float scale, int64_t count,
                   int64_t *token, int32_t threads) {
    Draw job = {logits, row, width, which, best, temperature, least, uniform, scale, token};
    share_rows(threads, count, 1, draw_tokens, &job);
}

/* Choosing tokens from rows of bfloat16 logits: the largest one, or one drawn from all of them. Each row is one thread's. */

#include <math.h>

#include "exp.h"

#define MOST_BLOCKS 1024

/* best: the largest logit's place, the lowest among equals; any place where the row holds NaN. finite: whether that logit is
 * finite and no other is NaN. logits: rows of `width` < 2^31 numbers, `row` apart. */
void batchrun_best(const bf16 *logits, int64_t row, int64_t rows, int64_t width, int64_t *best, uint8_t *finite, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *from = logits + r * row;
        __m512 most = _mm512_set1_ps(-INFINITY);
        __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512i where = lane;
        __mmask16 nan = 0;
        for (int64_t at = 0; at < width; at += 16) {
            __mmask16 lanes = lanes_of(width - at);
            __m512 value = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes, widen(load_lanes(from + at, lanes)));
            __mmask16 more = _mm512_cmp_ps_mask(value, most, _CMP_GT_OQ);
            nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
            most = _mm512_mask_mov_ps(most, more, value);
            where = _mm512_mask_add_epi32(where, more, lane, _mm512_set1_epi32((int32_t)at));
        }
        float largest = _mm512_reduce_max_ps(most);
        __mmask16 equal = _mm512_cmp_ps_mask(most, _mm512_set1_ps(largest), _CMP_EQ_OQ);
        best[r] = _mm512_mask_reduce_min_epi32(equal, where);
        finite[r] = !nan && largest - largest == 0.0f;
    }
}

typedef struct {
    __m512 largest, temperature, least, scale;
} Settings;

/* round(scale * e^((x - largest) / temperature)), 0 where that is below `least`. */
INLINE __m512 weight_of(const Settings *s, const bf16 *from, __mmask16 lanes) {
    __m512 gap = _mm512_div_ps(_mm512_sub_ps(s->largest, widen(load_lanes(from, lanes))), s->temperature);
    __m512 weight = _mm512_roundscale_ps(_mm512_mul_ps(exp_minus(gap), s->scale), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(lanes, weight, s->least, _CMP_GE_OQ), weight);
}

static int64_t draw_row(const Settings *settings, const bf16 *logits, int64_t width, double uniform) {
    /* Sums of whole numbers below 2^53 are exact, so that neither blocks nor lanes change the outcome. */
    double sums[MOST_BLOCKS], total = 0.0;
    int64_t block = (width + 64 * MOST_BLOCKS - 1) / (64 * MOST_BLOCKS) * 64, blocks = (width + block - 1) / block;
    for (int64_t b = 0; b < blocks; b++) {
        __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
        int64_t end = (b + 1) * block < width ? (b + 1) * block : width;
        for (int64_t at = b * block; at < end; at += 16) {
            __m512 weight = weight_of(settings, logits + at, lanes_of(end - at));
            low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(weight)));
            high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(weight, 1)));
        }
        sums[b] = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
        total += sums[b];
    }
    double target = floor(uniform * total), before = 0.0; /* below the total: uniform is at most 1 - 2^-53 */
    int64_t b = 0;
    while (before + sums[b] <= target) before += sums[b++];
    for (int64_t at = b * block;; at += 16) {
        float weights[16];
        _mm512_storeu_ps(weights, weight_of(settings, logits + at, lanes_of(width - at)));
        for (int i = 0; i < 16; i++) {
            before += weights[i];
            if (before > target) return at + i;
        }
    }
}

/* token[i]: drawn from row which[i], whose largest logit lies at best[i]: the first place where the running sum of its weights
 * exceeds uniform[i] of their sum. `scale` keeps the sum of a row's weights below 2^53. */
void batchrun_draw(const bf16 *logits, int64_t row, int64_t width, const int64_t *which, const int64_t *best,
                   const float *temperature, const float *least, const double *uniform, float scale, int64_t count,
                   int64_t *token, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && count > 1)
    for (int64_t i = 0; i < count; i++) {
        const bf16 *from = logits + which[i] * row;
        Settings settings = {.largest = widen(_mm256_set1_epi16((short)from[best[i]])),
                             .temperature = _mm512_set1_ps(temperature[i]),
                             .least = _mm512_set1_ps(least[i]),
                             .scale = _mm512_set1_ps(scale)};
        token[i] = draw_row(&settings, from, width, uniform[i]);
    }
}

/* The operations of simd.h by AVX-512 and its bfloat16 instructions: one instruction each, or close to it. */

#include <immintrin.h>

#define TILE_ROWS 6 /* 6 rows by 4 registers: 24 sums, 4 operands and a broadcast fill the 32 registers */
#define TILE_VECTORS 4

typedef __m512 Floats;
typedef __m256i Halves;
typedef __m512i Pairs, Ints;
typedef __mmask16 Mask;
typedef struct {
    __m512d low, high;
} Doubles;

/* The first `count` lanes, all from 16 on. */
INLINE Mask first_lanes(int64_t count) {
    return count >= LANES ? (Mask)0xffff : (Mask)((1u << count) - 1);
}

/* Lanes [low, high), none where low >= high. */
INLINE Mask lanes_between(int low, int high) {
    return high > low ? (Mask)((1u << high) - (1u << low)) : 0;
}

INLINE Mask mask_or(Mask a, Mask b) {
    return a | b;
}

INLINE Mask mask_and(Mask a, Mask b) {
    return a & b;
}

INLINE int any(Mask mask) {
    return mask != 0;
}

INLINE Mask equal(Floats a, Floats b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}

INLINE Mask greater(Floats a, Floats b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}

INLINE Mask at_least(Floats a, Floats b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}

INLINE Mask differs(Floats a, Floats b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ);
}

INLINE Floats select(Mask mask, Floats chosen, Floats otherwise) {
    return _mm512_mask_mov_ps(otherwise, mask, chosen);
}

INLINE Floats broadcast(float x) {
    return _mm512_set1_ps(x);
}

INLINE Floats load_floats(const float *from) {
    return _mm512_loadu_ps(from);
}

INLINE void store_floats(float *to, Floats x) {
    _mm512_storeu_ps(to, x);
}

/* The first `count` elements and zeros; nothing beyond them is read. */
INLINE Floats load_some_floats(const float *from, int count) {
    return _mm512_maskz_loadu_ps(first_lanes(count), from);
}

INLINE void store_some_floats(float *to, int count, Floats x) {
    _mm512_mask_storeu_ps(to, first_lanes(count), x);
}

INLINE Floats add(Floats a, Floats b) {
    return _mm512_add_ps(a, b);
}

INLINE Floats subtract(Floats a, Floats b) {
    return _mm512_sub_ps(a, b);
}

INLINE Floats multiply(Floats a, Floats b) {
    return _mm512_mul_ps(a, b);
}

INLINE Floats divide(Floats a, Floats b) {
    return _mm512_div_ps(a, b);
}

/* b where either is NaN. */
INLINE Floats maximum(Floats a, Floats b) {
    return _mm512_max_ps(a, b);
}

INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return _mm512_fmadd_ps(a, b, c);
}

INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) {
    return _mm512_fmsub_ps(a, b, c);
}

INLINE Floats round_to_even(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* The nearest whole number of one below 2^22; it may be anything of others. */
INLINE Floats round_small(Floats x) {
    return round_to_even(x);
}

/* Of numbers that an int32 holds; it may be anything of others. */
INLINE Floats round_down(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

/* x * 2^floor(n); 0 or infinite where that leaves float32, whatever x is. */
INLINE Floats times_power_of_two(Floats x, Floats n) {
    return _mm512_scalef_ps(x, n);
}

INLINE float sum_of(Floats x) {
    return _mm512_reduce_add_ps(x);
}

INLINE float largest_of(Floats x) {
    return _mm512_reduce_max_ps(x);
}

INLINE Floats widen(Halves x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

INLINE Halves narrow(Floats x) {
    return (Halves)_mm512_cvtneps_pbh(x);
}

/* The first `count` elements, all 16 if there are more, and zeros; nothing beyond them is read. */
INLINE Halves load_halves(const bf16 *from, int64_t count) {
    return count >= LANES ? _mm256_loadu_si256((const __m256i *)from) : _mm256_maskz_loadu_epi16(first_lanes(count), from);
}

INLINE void store_halves(bf16 *to, int64_t count, Halves x) {
    if (count >= LANES)
        _mm256_storeu_si256((__m256i *)to, x);
    else
        _mm256_mask_storeu_epi16(to, first_lanes(count), x);
}

/* One half of each of 16 pairs, the first or the second. Another thread may write the other one: its bytes are left alone. */
INLINE void store_half_of_pairs(bf16 *pairs, int second, Halves x) {
    __m512i wide = _mm512_cvtepu16_epi32(x);
    __mmask32 mine = second ? 0xaaaaaaaa : 0x55555555;
    _mm512_mask_storeu_epi16(pairs, mine, second ? _mm512_slli_epi32(wide, 16) : wide);
}

/* 16 int8. */
INLINE Floats load_bytes(const int8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

/* To the nearest whole number, the even one of two; of numbers that an int8 holds. */
INLINE void store_bytes(int8_t *to, Floats x) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(round_to_even(x))));
}

/* As store_bytes, one half of each of 16 pairs; the bytes of the other one are left alone. */
INLINE void store_half_of_byte_pairs(int8_t *pairs, int second, Floats x) {
    __m256i wide = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(round_to_even(x)));
    __mmask32 mine = second ? 0xaaaaaaaa : 0x55555555;
    _mm256_mask_storeu_epi8(pairs, mine, second ? _mm256_slli_epi16(wide, 8) : wide);
}

/* The first number in every other lane, the second one in those between. */
INLINE Floats alternate(const float *two) {
    double both;
    memcpy(&both, two, sizeof both);
    return _mm512_castpd_ps(_mm512_set1_pd(both));
}

INLINE Pairs load_pairs(const void *from) {
    return _mm512_loadu_si512(from);
}

/* A pair in every lane. */
INLINE Pairs broadcast_pair(const void *pair) {
    int32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
}

/* Per lane, sum + a0 b0 + a1 b1 of its pairs. */
INLINE Floats dot(Floats sum, Pairs a, Pairs b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* Stores a, then b, of which neighbours become pairs; returns the sum with both as stored added to it. */
INLINE Floats add_and_store_pairs(Floats sum, void *to, Floats a, Floats b) {
    Pairs all = (Pairs)_mm512_cvtne2ps_pbh(b, a);
    _mm512_storeu_si512(to, all);
    return dot(sum, all, _mm512_set1_epi32(0x3f803f80));
}

/* first, first + 1, ... */
INLINE Ints count_from(int32_t first) {
    return _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

INLINE Ints select_ints(Mask mask, Ints chosen, Ints otherwise) {
    return _mm512_mask_mov_epi32(otherwise, mask, chosen);
}

INLINE int32_t smallest_of(Mask mask, Ints x) {
    return _mm512_mask_reduce_min_epi32(mask, x);
}

INLINE Doubles add_to_doubles(Doubles sum, Floats x) {
    return (Doubles){_mm512_add_pd(sum.low, _mm512_cvtps_pd(_mm512_castps512_ps256(x))),
                     _mm512_add_pd(sum.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)))};
}

INLINE double sum_of_doubles(Doubles x) {
    return _mm512_reduce_add_pd(_mm512_add_pd(x.low, x.high));
}

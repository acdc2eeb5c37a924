/* The operations of simd.h in the vector extensions of GCC and Clang: for AVX-512 without bfloat16, AVX2, NEON, SSE2 and whatever
 * else they compile for. Sixteen numbers are as many registers as the processor needs for them; what is wider than a register
 * the compilers keep in memory. -ffp-contract=fast makes one instruction of a product and the sum that it goes into. */

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only little-endian processors are supported"
#endif

#if defined(__AVX512F__)
#define BYTES 64
#define TILE_ROWS 6
#define TILE_VECTORS 4
#elif defined(__AVX2__)
#define BYTES 32
#define TILE_ROWS 5 /* 10 of 16 registers are sums, 4 operands, 2 a broadcast pair */
#define TILE_VECTORS 1
#else
#define BYTES 16
#define TILE_ROWS 4 /* 16 sums */
#define TILE_VECTORS 1
#endif
#define PARTS (4 * LANES / BYTES)
#define EACH_PART UNROLL for (int i = 0; i < PARTS; i++)
#define LANE(x, i) (x).part[(i) / (BYTES / 4)][(i) % (BYTES / 4)]

typedef float FloatPart __attribute__((vector_size(BYTES)));
typedef int32_t IntPart __attribute__((vector_size(BYTES)));
typedef uint32_t BitPart __attribute__((vector_size(BYTES)));
typedef double DoublePart __attribute__((vector_size(BYTES)));
typedef int64_t LongPart __attribute__((vector_size(BYTES)));
typedef uint16_t HalfPart __attribute__((vector_size(BYTES / 2)));
typedef int16_t ShortPart __attribute__((vector_size(BYTES / 2)));
typedef int16_t AllShorts __attribute__((vector_size(2 * LANES)));
typedef int8_t AllBytes __attribute__((vector_size(LANES)));
typedef float FewFloats __attribute__((vector_size(BYTES / 2)));

typedef struct {
    FloatPart part[PARTS];
} Floats;
typedef struct {
    BitPart part[PARTS]; /* Halves: in the upper half of each lane, as in the float32 of the same value */
} Pairs, Halves;
typedef struct {
    IntPart part[PARTS]; /* Mask: all bits of a lane or none */
} Ints, Mask;
typedef struct {
    DoublePart part[2 * PARTS];
} Doubles;

static const int32_t COUNT[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* first, first + 1, ... */
INLINE Ints count_from(int32_t first) {
    Ints x;
    EACH_PART memcpy(&x.part[i], COUNT + i * BYTES / 4, BYTES);
    EACH_PART x.part[i] += first;
    return x;
}

/* Lanes [low, high), none where low >= high. */
INLINE Mask lanes_between(int low, int high) {
    Mask x = count_from(0);
    EACH_PART x.part[i] = (x.part[i] >= low) & (x.part[i] < high);
    return x;
}

#define EACH_LANE(TYPE, NAME, OPERATOR)                                       \
    INLINE TYPE NAME(TYPE a, TYPE b) {                                        \
        EACH_PART a.part[i] = a.part[i] OPERATOR b.part[i];                   \
        return a;                                                             \
    }
EACH_LANE(Mask, mask_or, |) EACH_LANE(Mask, mask_and, &)
EACH_LANE(Floats, add, +) EACH_LANE(Floats, subtract, -) EACH_LANE(Floats, multiply, *) EACH_LANE(Floats, divide, /)

/* The first `count` lanes, all from 16 on. */
INLINE Mask first_lanes(int64_t count) {
    return lanes_between(0, count < LANES ? (int)count : LANES);
}

INLINE int any(Mask mask) {
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= LANE(mask, i);
    return found != 0;
}

#define COMPARE(NAME, OPERATOR)                                               \
    INLINE Mask NAME(Floats a, Floats b) {                                    \
        Mask mask;                                                            \
        EACH_PART mask.part[i] = a.part[i] OPERATOR b.part[i];                \
        return mask;                                                          \
    }
COMPARE(equal, ==) COMPARE(differs, !=) COMPARE(greater, >) COMPARE(at_least, >=)

INLINE Ints select_ints(Mask mask, Ints chosen, Ints otherwise) {
    EACH_PART mask.part[i] = (mask.part[i] & chosen.part[i]) | (~mask.part[i] & otherwise.part[i]);
    return mask;
}

INLINE Floats select(Mask mask, Floats chosen, Floats otherwise) {
    EACH_PART chosen.part[i] =
        (FloatPart)((mask.part[i] & (IntPart)chosen.part[i]) | (~mask.part[i] & (IntPart)otherwise.part[i]));
    return chosen;
}

INLINE Floats broadcast(float x) {
    Floats all;
    EACH_PART all.part[i] = x - (FloatPart){0};
    return all;
}

INLINE Floats load_floats(const float *from) {
    Floats x;
    EACH_PART memcpy(&x.part[i], from + i * BYTES / 4, BYTES); /* all at once, GCC would copy it through memory */
    return x;
}

INLINE void store_floats(float *to, Floats x) {
    EACH_PART memcpy(to + i * BYTES / 4, &x.part[i], BYTES);
}

/* The first `count` elements and zeros; nothing beyond them is read. */
INLINE Floats load_some_floats(const float *from, int count) {
    float some[LANES] = {0};
    for (int i = 0; i < count; i++) some[i] = from[i];
    return load_floats(some);
}

INLINE void store_some_floats(float *to, int count, Floats x) {
    float all[LANES];
    store_floats(all, x);
    for (int i = 0; i < count; i++) to[i] = all[i];
}

/* b where either is NaN. */
INLINE Floats maximum(Floats a, Floats b) {
    return select(greater(a, b), a, b);
}

INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return add(multiply(a, b), c);
}

INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) {
    return subtract(multiply(a, b), c);
}

/* Added to a smaller number, 2^23 leaves no bits for its fraction; a larger one has none. */
INLINE Floats round_to_even(Floats x) {
    Floats rounded, size;
    EACH_PART {
        IntPart bits = (IntPart)x.part[i];
        FloatPart shift = (FloatPart)((bits & INT32_MIN) | 0x4b000000);
        rounded.part[i] = (x.part[i] + shift) - shift;
        size.part[i] = (FloatPart)(bits & INT32_MAX);
    }
    return select(greater(broadcast(0x1p23f), size), rounded, x);
}

/* The nearest whole number of one below 2^22; anything of others. */
INLINE Floats round_small(Floats x) {
    EACH_PART x.part[i] = (x.part[i] + 0x1.8p23f) - 0x1.8p23f;
    return x;
}

INLINE Ints floor_of(Floats x) {
    Ints whole;
    EACH_PART {
        whole.part[i] = __builtin_convertvector(x.part[i], IntPart);
        IntPart above = __builtin_convertvector(whole.part[i], FloatPart) > x.part[i]; /* -1 if so */
        whole.part[i] = (IntPart)((BitPart)whole.part[i] + (BitPart)above);
    }
    return whole;
}

/* Of numbers that an int32 holds; anything of others. */
INLINE Floats round_down(Floats x) {
    Ints whole = floor_of(x);
    EACH_PART x.part[i] = __builtin_convertvector(whole.part[i], FloatPart);
    return x;
}

/* x * 2^floor(n); 0 below 2^-125 and infinite beyond float32, whatever x is. */
INLINE Floats times_power_of_two(Floats x, Floats n) {
    Ints whole = floor_of(n);
    EACH_PART x.part[i] = (x.part[i] + x.part[i]) * (FloatPart)((BitPart)(whole.part[i] + 126) << 23); /* 2^128 is no float32 */
    x = select(greater(broadcast(-125.0f), n), broadcast(0.0f), x);
    return select(at_least(n, broadcast(129.0f)), broadcast(__builtin_inff()), x);
}

#define REDUCE(NAME, COMBINED)                                                 \
    INLINE float NAME(Floats x) {                                             \
        float a[LANES];                                                       \
        store_floats(a, x);                                                   \
        for (int size = LANES / 2; size; size /= 2)                           \
            for (int i = 0, j = size; i < size; i++, j++) a[i] = COMBINED;    \
        return a[0];                                                          \
    }
REDUCE(sum_of, a[i] + a[j]) REDUCE(largest_of, a[i] > a[j] ? a[i] : a[j])

INLINE int32_t smallest_of(Mask mask, Ints x) {
    int32_t least = INT32_MAX;
    for (int i = 0; i < LANES; i++)
        if (LANE(mask, i) && LANE(x, i) < least) least = LANE(x, i);
    return least;
}

INLINE Floats widen(Halves x) {
    Floats wide;
    EACH_PART wide.part[i] = (FloatPart)x.part[i];
    return wide;
}

/* To the nearest, to the even one of two; NaN stays NaN. */
INLINE Halves narrow(Floats x) {
    Halves result;
    EACH_PART {
        BitPart bits = (BitPart)x.part[i], nan = (BitPart)(x.part[i] != x.part[i]);
        BitPart up = bits + 0x7fff + ((bits >> 16) & 1);
        result.part[i] = ((nan & (bits | 0x400000)) | (~nan & up)) & 0xffff0000;
    }
    return result;
}

/* The first `count` elements, all 16 if there are more, and zeros; nothing beyond them is read. */
INLINE Halves load_halves(const bf16 *from, int64_t count) {
    bf16 some[LANES] = {0};
    if (count < LANES) {
        for (int i = 0; i < count; i++) some[i] = from[i];
        from = some;
    }
    Halves x;
    EACH_PART {
        HalfPart half;
        memcpy(&half, from + i * BYTES / 4, sizeof half);
        x.part[i] = __builtin_convertvector(half, BitPart) << 16;
    }
    return x;
}

INLINE void store_halves(bf16 *to, int64_t count, Halves x) {
    bf16 some[LANES], *all = count < LANES ? some : to;
    EACH_PART {
        HalfPart half = __builtin_convertvector(x.part[i] >> 16, HalfPart);
        memcpy(all + i * BYTES / 4, &half, sizeof half);
    }
    if (count < LANES)
        for (int i = 0; i < count; i++) to[i] = some[i];
}

INLINE void store_half_of_pairs(bf16 *pairs, int second, Halves x) {
    bf16 all[LANES];
    store_halves(all, LANES, x);
    for (int i = 0; i < LANES; i++) pairs[2 * i + second] = all[i];
}

/* In two steps: a vector of fewer than 16 bytes GCC converts one by one. */
INLINE Floats load_bytes(const int8_t *from) {
    AllBytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    AllShorts wide = __builtin_convertvector(bytes, AllShorts);
    Floats x;
    EACH_PART {
        ShortPart some;
        memcpy(&some, (const char *)&wide + i * BYTES / 2, sizeof some);
        x.part[i] = __builtin_convertvector(__builtin_convertvector(some, IntPart), FloatPart);
    }
    return x;
}

/* To the nearest whole number, the even one of two; of numbers that an int8 holds. */
INLINE void store_bytes(int8_t *to, Floats x) {
    float wide[LANES];
    store_floats(wide, round_small(x));
    for (int i = 0; i < LANES; i++) to[i] = (int8_t)wide[i];
}

INLINE void store_half_of_byte_pairs(int8_t *pairs, int second, Floats x) {
    int8_t all[LANES];
    store_bytes(all, x);
    for (int i = 0; i < LANES; i++) pairs[2 * i + second] = all[i];
}

INLINE Floats alternate(const float *two) {
    int64_t both;
    memcpy(&both, two, sizeof both);
    Floats x;
    EACH_PART x.part[i] = (FloatPart)((LongPart){0} + both);
    return x;
}

INLINE Pairs load_pairs(const void *from) {
    Pairs x;
    EACH_PART memcpy(&x.part[i], (const char *)from + i * BYTES, BYTES);
    return x;
}

/* A pair in every lane. */
INLINE Pairs broadcast_pair(const void *pair) {
    uint32_t bits;
    memcpy(&bits, pair, sizeof bits);
    Pairs all;
    EACH_PART all.part[i] = (BitPart){0} + bits;
    return all;
}

/* Stores a, then b, of which neighbours become pairs; returns the sum with both as stored added to it. */
INLINE Floats add_and_store_pairs(Floats sum, void *to, Floats a, Floats b) {
    Halves first = narrow(a), second = narrow(b);
    store_halves(to, LANES, first);
    store_halves((bf16 *)to + LANES, LANES, second);
    return add(add(sum, widen(first)), widen(second));
}

/* Per lane, sum + a0 b0 + a1 b1 of its pairs. */
INLINE Floats dot(Floats sum, Pairs a, Pairs b) {
    EACH_PART {
        sum.part[i] += (FloatPart)(a.part[i] << 16) * (FloatPart)(b.part[i] << 16);
        sum.part[i] += (FloatPart)(a.part[i] & 0xffff0000) * (FloatPart)(b.part[i] & 0xffff0000);
    }
    return sum;
}

INLINE Doubles add_to_doubles(Doubles sum, Floats x) {
    EACH_PART {
        FewFloats few[2];
        memcpy(few, &x.part[i], sizeof few);
        sum.part[2 * i] += __builtin_convertvector(few[0], DoublePart);
        sum.part[2 * i + 1] += __builtin_convertvector(few[1], DoublePart);
    }
    return sum;
}

INLINE double sum_of_doubles(Doubles x) {
    double sum = 0;
    UNROLL for (int i = 1; i < 2 * PARTS; i++) x.part[0] += x.part[i];
    for (int i = 0; i < BYTES / 8; i++) sum += x.part[0][i];
    return sum;
}

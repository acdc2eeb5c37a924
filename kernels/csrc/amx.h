/* Matrix tiles (Intel AMX): eight registers of up to 16 rows of up to 64 bytes, each thread's own. An operation takes a tile's
 * number, which must be a constant, and works on as many rows and bytes as the configuration gives that tile.
 *
 * With BATCHRUN_EMULATE_AMX the operations are plain C and behave as Intel's manual (SDM, volume 2) describes them, so that what
 * is built of them can be tested on any processor; what would be an exception there ends the process here.
 */

#ifndef BATCHRUN_AMX_H
#define BATCHRUN_AMX_H

#include <stdint.h>
#include <string.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} AmxConfig;

#if defined(BATCHRUN_EMULATE_AMX)

#include <float.h>
#include <math.h>
#include <stdlib.h>

typedef struct {
    int rows, row_bytes;
    uint8_t data[16][64];
} EmulatedTile;

static _Thread_local EmulatedTile emulated[8];
_Atomic int64_t batchrun_emulated_products; /* how many there were, for tests */
_Atomic int32_t batchrun_emulated_threads;  /* those with tiles configured */

static inline void require(int condition) {
    if (!condition) abort();
}

/* Numbers too small for full precision count as 0. */
static inline float flushed(float x) {
    return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x;
}

static inline float emulated_wide(const uint8_t *from) {
    uint16_t narrow;
    memcpy(&narrow, from, sizeof narrow);
    uint32_t bits = (uint32_t)narrow << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return flushed(x);
}

static inline void amx_configure(const AmxConfig *config) {
    require(config->palette == 1 && config->start_row == 0 && !emulated[0].rows);
    batchrun_emulated_threads++;
    for (int t = 0; t < 16; t++) {
        int rows = config->rows[t], row_bytes = config->row_bytes[t];
        require(t < 8 ? rows <= 16 && row_bytes <= 64 && !rows == !row_bytes : !rows && !row_bytes);
        if (t < 8) emulated[t] = (EmulatedTile){.rows = rows, .row_bytes = row_bytes};
    }
}

static inline void amx_release(void) {
    require(emulated[0].rows);
    batchrun_emulated_threads--;
    memset(emulated, 0, sizeof emulated);
}

static inline void amx_zero(int t) {
    require(emulated[t].rows);
    memset(emulated[t].data, 0, sizeof emulated[t].data);
}

static inline void amx_load(int t, const void *from, int64_t stride) {
    amx_zero(t);
    for (int r = 0; r < emulated[t].rows; r++)
        memcpy(emulated[t].data[r], (const char *)from + r * stride, (size_t)emulated[t].row_bytes);
}

static inline void amx_store(int t, void *to, int64_t stride) {
    require(emulated[t].rows);
    for (int r = 0; r < emulated[t].rows; r++)
        memcpy((char *)to + r * stride, emulated[t].data[r], (size_t)emulated[t].row_bytes);
}

/* Per float32 of `sum`: the products of first elements and those of second elements are added up apart, then both to it. */
static void amx_dot(int sum, int left, int right) {
    batchrun_emulated_products++;
    EmulatedTile *c = emulated + sum, *a = emulated + left, *b = emulated + right;
    require(sum != left && sum != right && left != right && c->rows && c->rows == a->rows);
    require(a->row_bytes % 4 == 0 && a->row_bytes / 4 == b->rows && b->row_bytes == c->row_bytes);
    float wide[16][2][16];
    int columns = c->row_bytes / 4;
    for (int k = 0; k < b->rows; k++)
        for (int n = 0; n < 2 * columns; n++) wide[k][n & 1][n >> 1] = emulated_wide(b->data[k] + 2 * n);
    for (int m = 0; m < c->rows; m++) {
        float first[16] = {0}, second[16] = {0}, out[16];
        for (int k = 0; k < b->rows; k++) {
            float x = emulated_wide(a->data[m] + 4 * k), y = emulated_wide(a->data[m] + 4 * k + 2);
            for (int n = 0; n < columns; n++) {
                first[n] = flushed(fmaf(x, wide[k][0][n], first[n]));
                second[n] = flushed(fmaf(y, wide[k][1][n], second[n]));
            }
        }
        memcpy(out, c->data[m], sizeof out);
        for (int n = 0; n < columns; n++) out[n] = flushed(flushed(out[n]) + flushed(first[n] + second[n]));
        memset(c->data[m], 0, sizeof out);
        memcpy(c->data[m], out, (size_t)c->row_bytes);
    }
    for (int m = c->rows; m < 16; m++) memset(c->data[m], 0, sizeof c->data[m]);
}

#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)

#include <immintrin.h>

/* gcc's intrinsics do not tell what memory they read: stores before a load may be moved behind it, and those of a configuration
 * dropped but for the first 8 bytes. */
#define AMX_BARRIER() __asm__ volatile("" ::: "memory")
#define amx_configure(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(config)))
#define amx_release() _tile_release()
#define amx_zero(t) _tile_zero(t)
#define amx_load(t, from, stride) (__extension__({ AMX_BARRIER(); _tile_loadd(t, from, stride); }))
#define amx_store(t, to, stride) _tile_stored(t, to, stride)
#define amx_dot(sum, left, right) _tile_dpbf16ps(sum, left, right)

#else

/* Compiled without the instructions: batchrun_allow_amx says so, and nothing here is reached. */
#define amx_configure(config) ((void)(config), __builtin_trap())
#define amx_release() __builtin_trap()
#define amx_zero(t) __builtin_trap()
#define amx_load(t, from, stride) ((void)(from), (void)(stride), __builtin_trap())
#define amx_store(t, to, stride) ((void)(to), (void)(stride), __builtin_trap())
#define amx_dot(sum, left, right) __builtin_trap()

#endif

#endif

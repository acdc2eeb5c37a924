/* Linear layers in bfloat16, sums in float32: y = x W^T, or silu(x Wg^T) * (x Wu^T).
 *
 * W is packed once into panels of 64 outputs, [panel][pair of inputs][64 outputs][2]: one register holds a pair of inputs of 16
 * outputs, a row's pair, broadcast, adds to 16 sums, and no sum over lanes is ever needed. A panel stays in the second-level cache
 * while a chunk of rows passes over it, and the next one is fetched from memory meanwhile: with few rows that is most of the time.
 * In a gated layer a panel has 32 outputs of the gate, then the same 32 of the other half.
 *
 * Each sum runs over the inputs in their order in one register, so a row's result has the same bits whatever rows are beside it.
 */

#include "exp.h"
#include "threads.h"

#define PANEL 64
#define VECTORS 4
#define COLUMNS(R) (TILE_VECTORS == 4 || R == 1 ? 4 : R == 2 ? 2 : TILE_VECTORS)
#define CHUNK_BYTES (1 << 18) /* of x: with a panel, within the second-level cache */
#define LINE 64

typedef struct {
    const bf16 *x;
    int64_t x_row, rows, inputs; /* inputs: even */
    const bf16 *panels;
    bf16 *out; /* dense rows of `outputs` */
    int64_t outputs;
    int32_t gated, threads;
} Linear;

/* What a tile works on, and the part of the next panel that it asks for. */
typedef struct {
    const bf16 *x, *panel;
    bf16 *out;
    int64_t x_row, out_row, left; /* left: outputs from the panel's first on */
    int pairs, gated, lines;
    const char *ahead;
} Tile;

INLINE void store_plain(const Tile *tile, int r, const Floats *sum) {
    for (int c = 0; c < VECTORS && 16 * c < tile->left; c++)
        store_halves(tile->out + r * tile->out_row + 16 * c, tile->left - 16 * c, narrow(sum[c]));
}

INLINE void store_gated(const Tile *tile, int r, const Floats *sum) {
    for (int c = 0; c < VECTORS / 2 && 16 * c < tile->left; c++) {
        Floats gated = silu_times(rounded(sum[c]), rounded(sum[c + VECTORS / 2]));
        store_halves(tile->out + r * tile->out_row + 16 * c, tile->left - 16 * c, narrow(gated));
    }
}

/* R rows, C registers of outputs at a time: as many sums as the processor has registers for. */
INLINE void multiply_tile(const int R, const int C, const Tile *tile) {
    Floats sum[MOST_TILE_ROWS][VECTORS];
    const bf16 *x = tile->x;
    int64_t x_row = tile->x_row;
    int lines = tile->lines;
    for (int first = 0; first < VECTORS; first += C, lines = 0) {
        const bf16 *panel = tile->panel + first * 32;
        Floats part[MOST_TILE_ROWS][VECTORS];
    UNROLL
        for (int r = 0; r < R; r++)
    UNROLL
            for (int c = 0; c < C; c++) part[r][c] = zero();
        for (int k = 0; k < tile->pairs; k++) {
            Pairs weight[VECTORS];
    UNROLL
            for (int c = 0; c < C; c++) weight[c] = load_pairs(panel + (k * VECTORS + c) * 32);
            if (k < lines) prefetch(tile->ahead + (int64_t)k * LINE);
    UNROLL
            for (int r = 0; r < R; r++) {
                Pairs input = broadcast_pair(x + r * x_row + 2 * k);
    UNROLL
                for (int c = 0; c < C; c++) part[r][c] = dot(part[r][c], weight[c], input);
            }
        }
    UNROLL
        for (int r = 0; r < R; r++)
    UNROLL
            for (int c = 0; c < C; c++) sum[r][first + c] = part[r][c];
    }
    UNROLL
    for (int r = 0; r < R; r++)
        if (tile->gated)
            store_gated(tile, r, sum[r]);
        else
            store_plain(tile, r, sum[r]);
}

typedef void MultiplyTile(const Tile *);
#define TILE(R) \
    static void multiply_tile_##R(const Tile *tile) { multiply_tile(R, COLUMNS(R), tile); }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static MultiplyTile *const TILES[MOST_TILE_ROWS] = {multiply_tile_1, multiply_tile_2, multiply_tile_3,
                                               multiply_tile_4, multiply_tile_5, multiply_tile_6};

/* Rows [low, high) on one panel; `part` of `parts` of another one, or of none (-1), is fetched meanwhile. */
static void multiply_panel(const Linear *job, int64_t panel, int64_t following, int64_t low, int64_t high, int64_t part,
                           int64_t parts) {
    int64_t size = job->inputs * PANEL, width = job->gated ? PANEL / 2 : PANEL, rows = high - low;
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, lines = size * (int64_t)sizeof(bf16) / LINE, each = 0, first = 0;
    if (following >= 0) {
        first = lines * part / parts;
        each = (lines / parts + tiles - 1) / tiles;
        if (each > job->inputs / 2) each = job->inputs / 2;
    }
    Tile tile = {.panel = job->panels + panel * size,
                 .x_row = job->x_row,
                 .out_row = job->outputs,
                 .left = job->outputs - panel * width,
                 .pairs = (int)(job->inputs / 2),
                 .gated = job->gated,
                 .lines = (int)each};
    for (int64_t i = 0; i < tiles; i++) {
        int64_t begin = low + rows * i / tiles, end = low + rows * (i + 1) / tiles;
        tile.x = job->x + begin * job->x_row;
        tile.out = job->out + begin * job->outputs + panel * width;
        tile.ahead = (const char *)(job->panels + following * size) + (first + i * each) * LINE;
        TILES[end - begin - 1](&tile);
    }
}

/* Tasks: a chunk of rows after the other; in it a panel after the other; of its rows a part after the other. */
typedef struct {
    const Linear *job;
    int64_t panels, chunks, parts;
} Cut;

static void linear_task(const void *argument, int64_t index, int64_t next, int thread) {
    (void)thread;
    const Cut *cut = argument;
    const Linear *job = cut->job;
    int64_t panels = cut->panels, parts = cut->parts, panel = index / parts % panels, part = index % parts, following = -1;
    if (next >= 0) {
        following = next / parts % panels;
        if (following == panel) following += next > index ? 1 : -1;
        if (following >= panels) following = -1;
    }
    int64_t at = index / (panels * parts), begin = job->rows * at / cut->chunks;
    int64_t size = job->rows * (at + 1) / cut->chunks - begin;
    multiply_panel(job, panel, following, begin + size * part / parts, begin + size * (part + 1) / parts, part, parts);
}

/* Every row of `out` is written. Where panels are too few to share them evenly between the threads, a chunk is cut into parts. */
void batchrun_linear(const Linear *job) {
    int64_t width = job->gated ? PANEL / 2 : PANEL, panels = (job->outputs + width - 1) / width, rows = job->rows;
    if (rows == 0) return;
    int64_t chunk = CHUNK_BYTES / (job->inputs * (int64_t)sizeof(bf16));
    if (chunk < 8 * TILE_ROWS) chunk = 8 * TILE_ROWS;
    int64_t chunks = (rows + chunk - 1) / chunk, parts = (16 * job->threads + panels - 1) / panels;
    if (parts > rows / chunks / (2 * TILE_ROWS)) parts = rows / chunks / (2 * TILE_ROWS);
    if (parts < 1 || job->threads == 1) parts = 1;
    Cut cut = {job, panels, chunks, parts};
    share_out(job->threads, chunks * panels * parts, linear_task, &cut);
}

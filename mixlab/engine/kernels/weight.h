/* The gradient of a weight: out (high x wide) = left^T right, summed over many rows, and the sums of left over its rows.

Some rows of both sides at a time are packed, left in tiles of TALL columns and right in panels of WIDE. A task has columns of
both for itself, as many as its cache holds; where these are few, several share the rows and are summed up behind. Rows come
slab by slab, so that the last cache holds them while columns take turns. */
#define ROWS_DEEP 192  /* rows at a time */
#define MOST_ACROSS 10 /* panels of a task */
#define MOST_DOWN 16   /* tiles of a task */
#define LEAST_ROWS 1024 /* of a share */
#define SLAB_NUMBERS (3 << 20) /* of both sides */
#define PITCH (LANES == 4 ? 8 : LANES) /* from a row of a tile to the next */
#define TILE_SIZE (ROWS_DEEP * PITCH + 16) /* so that tiles do not all want the same lines of the cache */

/* Which columns of `left` a tile has: as even as can be. */
INLINE int weight_top(const struct weight *at, int tile) { return (long)at->high * tile / pieces_of(at->high, TALL); }

/* Some tiles over some rows, with a pitch of PITCH numbers. Rows are read from end to end, which is how memory likes it; a
tile may end with numbers of the next. */
static void weight_pack(const struct weight *at, float *to, long row, int deep, int first, int last) {
    int tops[MOST_DOWN], whole = 0; /* tiles behind whose top there is a pitch of numbers */
    for (int tile = first; tile < last; tile++) {
        tops[tile - first] = weight_top(at, tile);
        if (tops[tile - first] + PITCH <= at->high) whole = tile - first + 1;
    }
    for (int k = 0; k < deep; k++) {
        const float *from = at->left + (row + k) * at->left_row;
        float *place = to + k * PITCH;
        int tile = 0;
        for (; tile < whole; tile++, place += TILE_SIZE)
            for (int part = 0; part < PITCH; part += LANES) store(place + part, load(from + tops[tile] + part));
        for (; tile < last - first; tile++, place += TILE_SIZE)
            for (int part = 0; part < PITCH; part += LANES)
                store(place + part, load_some(from + tops[tile] + part, at->high - tops[tile] - part));
    }
}

/* The sums of a tile's columns over some rows, four of which do not wait for each other. */
static void weight_add(float *sums, const float *tile, int deep, int columns, int begins) {
    for (int part = 0; part < columns; part += LANES) {
        vec totals[4] = {{0}, {0}, {0}, {0}};
        for (int k = 0; k < deep; k++) totals[k % 4] += load(tile + k * PITCH + part);
        vec total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
        store_some(sums + part, begins ? total : load_some(sums + part, columns - part) + total, columns - part);
    }
}

INLINE void weight_sums(int rows, float *out, ptrdiff_t out_row, const float *left, const float *right, int deep, int begins,
                        int valid) {
    vec sums[TALL * WIDE_PARTS];
    linear_start(rows, WIDE_PARTS, sums, out, out_row, NULL, begins, valid);
    accumulate(rows, WIDE_PARTS, sums, left, 1, PITCH, right, WIDE, deep);
    linear_end(rows, WIDE_PARTS, sums, out, out_row, 0, NOTHING, NULL, valid);
}

#define WEIGHT_TILE(rows) \
    case rows: \
        weight_sums(rows, out, out_row, left, right, deep, begins, valid); \
        break;

INLINE void weight_tile(int rows, float *out, ptrdiff_t out_row, const float *left, const float *right, int deep, int begins,
                        int valid) {
    switch (rows) {
        WEIGHT_TILE(1) WEIGHT_TILE(2) WEIGHT_TILE(3) WEIGHT_TILE(4) WEIGHT_TILE(5) WEIGHT_TILE(6)
#if TALL > 6
        WEIGHT_TILE(7) WEIGHT_TILE(8) WEIGHT_TILE(9) WEIGHT_TILE(10) WEIGHT_TILE(11) WEIGHT_TILE(12)
#endif
    }
}

/* Numbers of a share: the product and the sums. */
INLINE size_t weight_numbers(const struct weight *at) { return (size_t)at->high * (at->wide + 1); }

static int weight_task(void *about, long index) {
    const struct weight *at = about;
    long tiles = pieces_of(at->high, TALL), panels = pieces_of(at->wide, WIDE), rows = at->until - at->from;
    long across = index % at->across, down = index / at->across % at->down, share = index / at->across / at->down;
    int first = tiles * down / at->down, last = tiles * (down + 1) / at->down;
    int left = panels * across / at->across * WIDE, right = panels * (across + 1) / at->across * WIDE;
    if (right > at->wide) right = at->wide;
    long row = at->from + rows * share / at->shares, end = at->from + rows * (share + 1) / at->shares;
    float *out = at->out, *sums = at->sums;
    if (share) out = at->others + (share - 1) * weight_numbers(at), sums = sums ? out + (size_t)at->high * at->wide : NULL;
    float *packed = claim((size_t)(last - first) * TILE_SIZE + (size_t)ROWS_DEEP * MOST_ACROSS * WIDE);
    if (!packed) return 1;
    float *tiled = packed + (size_t)ROWS_DEEP * MOST_ACROSS * WIDE;
    for (int begins = !at->from && (share || !at->adds); row < end; row += ROWS_DEEP, begins = 0) {
        int deep = end - row < ROWS_DEEP ? end - row : ROWS_DEEP;
        struct linear sides = {.right = at->right + row * at->right_row, .right_row = at->right_row, .columns = at->wide, .depth = deep};
        for (int column = left; column < right; column += WIDE) pack(&sides, column, WIDE, packed + (size_t)(column - left) * ROWS_DEEP);
        weight_pack(at, tiled, row, deep, first, last);
        for (int tile = first; tile < last && sums && !left; tile++) {
            int top = weight_top(at, tile);
            weight_add(sums + top, tiled + (size_t)(tile - first) * TILE_SIZE, deep, weight_top(at, tile + 1) - top, begins);
        }
        for (int column = left; column < right; column += WIDE)
            for (int tile = first; tile < last; tile++) {
                int top = weight_top(at, tile), valid = right - column < WIDE ? right - column : WIDE;
                weight_tile(weight_top(at, tile + 1) - top, out + (ptrdiff_t)top * at->wide + column, at->wide,
                            tiled + (size_t)(tile - first) * TILE_SIZE, packed + (size_t)(column - left) * ROWS_DEEP, deep,
                            begins, valid);
            }
    }
    free(packed);
    return 0;
}

/* A row of the product, and its place in the sums. */
static int weight_join(void *about, long row) {
    const struct weight *at = about;
    for (int share = 1; share < at->shares; share++) {
        const float *from = at->others + (share - 1) * weight_numbers(at);
        float *to = at->out + row * at->wide;
        if (at->sums) at->sums[row] += from[(size_t)at->high * at->wide + row];
        from += row * at->wide;
        for (int c = 0; c < at->wide; c += LANES)
            store_some(to + c, load_some(to + c, at->wide - c) + load_some(from + c, at->wide - c), at->wide - c);
    }
    return 0;
}

static int run_weight(struct weight *at) {
    long tiles = pieces_of(at->high, TALL), panels = pieces_of(at->wide, WIDE), wanted = 6L * at->threads;
    at->across = pieces_of(panels, MOST_ACROSS), at->down = pieces_of(tiles, MOST_DOWN), at->shares = 1;
    while (at->down * at->across * at->shares < wanted && at->rows >= (at->shares + 1) * LEAST_ROWS) at->shares++;
    while (at->down * at->across * at->shares < wanted && 4 * at->down < tiles) at->down++;
    at->others = at->shares > 1 ? claim((at->shares - 1) * weight_numbers(at)) : NULL;
    if (at->shares > 1 && !at->others) return 1;
    long slabs = at->rows / (SLAB_NUMBERS / (at->high + at->wide) + 1), most = at->rows / (at->shares * ROWS_DEEP);
    if (slabs > most) slabs = most;
    int failed = 0;
    at->until = 0;
    for (long slab = 0; slab <= slabs && !failed; slab++) {
        at->from = at->until, at->until = at->rows * (slab + 1) / (slabs + 1);
        failed = share(weight_task, at, at->shares * at->down * at->across, at->threads);
    }
    if (at->shares > 1 && !failed) share(weight_join, at, at->high, at->threads);
    free(at->others);
    return failed;
}

/* Convolutions of every channel with a small kernel of its own, over maps with channels last.

A block of channels of the rows that a kernel sees is copied into a ring of lines: there it lies together, with zeros at
both ends, whatever the distance of the pixels. An output may be the product of two parts of a pixel's channels, and
normed over its channels while they are in the cache. */
#define BLOCK 16  /* channels: a line of the cache */
#define STRIDE 8  /* columns of outputs at once */
#define COLUMNS 64
#define STRIP 8   /* rows of a task, if there are enough tasks */

struct tile {
    long image;
    int top, bottom, left, right; /* of the outputs */
};

/* Outputs of STRIDE columns, of which `x` is the first that the kernel sees in each of `high` lines. */
INLINE void depthwise_columns(int wide, const float *const *lines, size_t x, int high, const float *weights, vec *sums) {
    for (int row = 0; row < high; row++) {
        if (!lines[row]) continue;
        const float *line = lines[row] + x, *own = weights + (size_t)row * wide * BLOCK;
        if (wide > 7) { /* any width: the outputs stay in registers, not the weights */
            for (int k = 0; k < wide; k++) {
                vec weight = load(own + (size_t)k * BLOCK);
                for (int t = 0; t < STRIDE; t++) sums[t] += load(line + (size_t)(t + k) * BLOCK) * weight;
            }
            continue;
        }
        vec taps[7];
#pragma GCC unroll 7
        for (int k = 0; k < wide; k++) taps[k] = load(own + k * BLOCK);
#pragma GCC unroll 14
        for (int j = 0; j < STRIDE + wide - 1; j++) {
            vec value = load(line + j * BLOCK);
#pragma GCC unroll 7
            for (int k = 0; k < wide; k++)
                if (j - k >= 0 && j - k < STRIDE) sums[j - k] += value * taps[k];
        }
    }
}

/* A row of outputs of a block. */
INLINE void depthwise_row(const struct depthwise *at, const struct tile *tile, int wide, const float *const *lines,
                          const float *weights, const float *bias, float *out, int channels, int times) {
    for (int column = tile->left; column < tile->right; column += STRIDE) {
        int count = tile->right - column < STRIDE ? tile->right - column : STRIDE;
        for (int lane = 0; lane < BLOCK && lane < channels; lane += LANES) {
            vec sums[STRIDE];
            for (int t = 0; t < STRIDE; t++) sums[t] = load(bias + lane);
            if (!lane) /* places that are written soon: rows are too far apart for the processor to see it coming */
                for (int t = 0; t < count; t++) __builtin_prefetch(out + (column + t) * at->out_row, 1);
            depthwise_columns(wide, lines, (size_t)(column - tile->left) * BLOCK + lane, at->high, weights + lane, sums);
            if (at->after == SILU)
                for (int t = 0; t < STRIDE; t++) sums[t] = activated(sums[t], SILU, NULL);
            else if (at->after != NOTHING)
                for (int t = 0; t < STRIDE; t++) sums[t] = activated(sums[t], at->after, (const float[]){1, 0});
            for (int t = 0; t < count; t++) {
                float *to = out + (column + t) * at->out_row + lane;
                if (times) sums[t] *= load_some(to, channels - lane);
                else if (at->adds) sums[t] += load_some(to, channels - lane);
                store_some(to, sums[t], channels - lane);
            }
        }
    }
}

/* The bias and the weights of a block of a part. */
INLINE const float *depthwise_packed(const struct depthwise *at, int part, int block) {
    return at->packed + ((size_t)part * pieces_of(at->channels, BLOCK) + block) * (at->high * at->wide + 1) * BLOCK;
}

/* Kernels of one row need no ring: all channels of some pixels, one pixel after the other as they lie. */
#define FEW_PIXELS 4
INLINE void depthwise_pixels(const struct depthwise *at, int wide, const float *const *seen, float *out, float *aside, int count) {
    for (int first = 0, block = 0; first < at->channels; first += BLOCK, block++)
        for (int place = first; place < first + BLOCK && place < at->channels; place += LANES)
            for (int part = 0; part < 3; part++) {
                if (at->part[part] < 0) continue;
                const float *packed = depthwise_packed(at, part, block) + place - first;
                int channels = at->channels - place;
                vec sums[FEW_PIXELS];
                for (int t = 0; t < FEW_PIXELS; t++) sums[t] = load(packed);
                for (int k = 0; k < wide; k++) {
                    vec weight = load(packed + (size_t)(k + 1) * BLOCK);
                    for (int t = 0; t < FEW_PIXELS; t++)
                        sums[t] += load_some(seen[t + k] + at->part[part] + place, channels) * weight;
                }
                for (int t = 0; t < count; t++) {
                    float *to = (part == 2 ? aside : out) + t * at->out_row + place;
                    vec result = activated(sums[t], at->after, (const float[]){1, 0});
                    if (part == 1) result *= load_some(to, channels);
                    else if (at->adds) result += load_some(to, channels);
                    store_some(to, result, channels);
                }
            }
}

static void depthwise_low(const struct depthwise *at, const struct tile *tile, const float *zeros) {
    int wide = at->wide, above = at->above;
    for (int row = tile->top; row < tile->bottom; row++) {
        int there = row - above >= 0 && row - above < at->height;
        const float *x = at->x + tile->image * at->image + (ptrdiff_t)(row - above) * at->width * at->row;
        ptrdiff_t place = tile->image * at->out_image + (ptrdiff_t)row * at->width * at->out_row;
        const float *seen[FEW_PIXELS + wide];
        for (int column = tile->left; column < tile->right; column += FEW_PIXELS) {
            int count = tile->right - column < FEW_PIXELS ? tile->right - column : FEW_PIXELS;
            for (int j = 0; j < FEW_PIXELS + wide - 1; j++) {
                int source = column + j - at->before;
                seen[j] = there && source >= 0 && source < at->width ? x + source * at->row : zeros;
            }
            float *out = at->out + place + column * at->out_row;
            float *aside = at->aside ? at->aside + place + column * at->out_row : NULL;
            if (wide == 3) depthwise_pixels(at, 3, seen, out, aside, count);
            else depthwise_pixels(at, wide, seen, out, aside, count);
        }
    }
}

/* The outputs of one block of one part of the channels. */
static void depthwise_part(const struct depthwise *at, const struct tile *tile, int part, int block, float *room) {
    int first = block * BLOCK, channels = at->channels - first < BLOCK ? at->channels - first : BLOCK;
    int high = at->high, wide = at->wide, above = at->above, start = tile->left - at->before;
    int count = tile->right - tile->left + wide - 1; /* columns that are seen */
    size_t line = (size_t)(COLUMNS + STRIDE + wide) * BLOCK;
    const float *packed = depthwise_packed(at, part, block);
    float *out = (part == 2 ? at->aside : at->out) + first;
    const float *lines[high];
    int from = start < 0 ? -start : 0, to = start + count > at->width ? at->width - start : count; /* that there are */
    for (int seen = tile->top - above; seen < tile->bottom - above + high - 1; seen++) {
        if (seen >= 0 && seen < at->height) {
            const float *x = at->x + tile->image * at->image + ((ptrdiff_t)seen * at->width + start) * at->row;
            float *place = room + (size_t)(seen % high) * line;
            x += at->part[part] + first;
            memset(place, 0, (size_t)from * BLOCK * sizeof(float));
            memset(place + (size_t)to * BLOCK, 0, (size_t)(count - to) * BLOCK * sizeof(float));
            for (int w = from; w < to; w++) __builtin_prefetch(x + w * at->row + BLOCK); /* the next block */
            for (int w = from; w < to; w++)
                for (int lane = 0; lane < BLOCK; lane += LANES)
                    store(place + w * BLOCK + lane, load_some(x + w * at->row + lane, channels - lane));
        }
        int row = seen + above - high + 1;
        if (row < tile->top) continue;
        for (int k = 0; k < high; k++) {
            int source = row - above + k;
            lines[k] = source >= 0 && source < at->height ? room + (size_t)(source % high) * line : NULL;
        }
        float *to_row = out + tile->image * at->out_image + (ptrdiff_t)row * at->width * at->out_row;
        const float *weights = packed + BLOCK;
        int times = part == 1;
        switch (wide) {
            case 3: depthwise_row(at, tile, 3, lines, weights, packed, to_row, channels, times); break;
            case 5: depthwise_row(at, tile, 5, lines, weights, packed, to_row, channels, times); break;
            case 7: depthwise_row(at, tile, 7, lines, weights, packed, to_row, channels, times); break;
            default: depthwise_row(at, tile, wide, lines, weights, packed, to_row, channels, times);
        }
    }
}

static void depthwise_tile(const struct depthwise *at, const struct tile *tile, float *room) {
    if (at->high == 1) depthwise_low(at, tile, room);
    for (int block = 0; block < pieces_of(at->channels, BLOCK) && at->high > 1; block++)
        for (int part = 0; part < 3; part++)
            if (at->part[part] >= 0) depthwise_part(at, tile, part, block, room);
    for (int h = tile->top; h < tile->bottom && at->norm; h++)
        for (int w = tile->left; w < tile->right; w++) {
            float *pixel = at->out + tile->image * at->out_image + ((ptrdiff_t)h * at->width + w) * at->out_row;
            norm_row(pixel, pixel, at->channels, at->norm, NULL, at->eps);
        }
}

static int depthwise_task(void *about, long index) {
    const struct depthwise *at = about;
    int across = pieces_of(at->width, COLUMNS), down = pieces_of(at->height, at->strip);
    struct tile tile = {index / ((long)across * down), 0, 0, 0, 0};
    int row = index / across % down, column = index % across;
    tile.top = row * at->strip, tile.bottom = tile.top + at->strip < at->height ? tile.top + at->strip : at->height;
    tile.left = column * COLUMNS, tile.right = tile.left + COLUMNS < at->width ? tile.left + COLUMNS : at->width;
    size_t ring = (size_t)at->high * (COLUMNS + STRIDE + at->wide) * BLOCK, pixel = 0;
    for (int part = 0; part < 3; part++)
        if (at->part[part] >= 0 && (size_t)(at->part[part] + at->channels) > pixel) pixel = at->part[part] + at->channels;
    size_t size = at->high == 1 ? pixel : ring;
    float *room = claim(size);
    if (!room) return 1;
    memset(room, 0, size * sizeof(float)); /* outputs that nobody wants are made of numbers, too */
    depthwise_tile(at, &tile, room);
    free(room);
    return 0;
}

/* The bias of a block, then its weights tap by tap. */
static int depthwise_pack(void *about, long index) {
    const struct depthwise *at = about;
    int blocks = pieces_of(at->channels, BLOCK), part = index / blocks, first = index % blocks * BLOCK;
    int taps = at->high * at->wide, channels = at->channels - first < BLOCK ? at->channels - first : BLOCK;
    if (at->part[part] < 0) return 0;
    float *to = at->packed + (size_t)index * (taps + 1) * BLOCK;
    const float *weight = at->weight + (size_t)(at->part[part] + first) * taps;
    if (channels < BLOCK) memset(to, 0, (size_t)(taps + 1) * BLOCK * sizeof(float));
    for (int c = 0; c < channels; c++) {
        to[c] = at->bias ? at->bias[at->part[part] + first + c] : 0;
        for (int k = 0; k < taps; k++) to[(size_t)(k + 1) * BLOCK + c] = weight[(size_t)c * taps + (at->turned ? taps - 1 - k : k)];
    }
    return 0;
}

static int run_depthwise(struct depthwise *at) {
    int blocks = pieces_of(at->channels, BLOCK), across = pieces_of(at->width, COLUMNS);
    at->packed = claim((size_t)3 * blocks * (at->high * at->wide + 1) * BLOCK);
    if (!at->packed) return 1;
    /* strips as even as can be: two of a map for each thread, if that leaves them some rows */
    long others = (long)at->images * across, wanted = 2L * at->threads;
    int down = pieces_of(at->height, STRIP);
    if (others * down < wanted) down = (wanted + others - 1) / others;
    if (down > 1 && pieces_of(at->height, down) < 4) down = others >= at->threads ? 1 : pieces_of(at->threads, others);
    at->strip = pieces_of(at->height, down < at->height ? down : at->height);
    int failed = share(depthwise_pack, at, 3L * blocks, at->threads);
    failed = failed || share(depthwise_task, at, others * pieces_of(at->height, at->strip), at->threads);
    free(at->packed);
    return failed;
}

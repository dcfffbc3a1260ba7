/* The gradient of small kernels over every channel: what each tap would have changed, summed over all pixels. */

#if LANES == 8
#define TAPS_PARTS 2 /* vectors of a block that are summed at once */
#else
#define TAPS_PARTS 1
#endif

/* sums (taps of a row x BLOCK) += the sum over `width` pixels of gradient times what each tap saw of `line`. */
INLINE void taps_row(int wide, const float *line, const float *gradient, int width, float *sums) {
    for (int lane = 0; lane < BLOCK; lane += TAPS_PARTS * LANES) {
        vec found[7][TAPS_PARTS];
        for (int j = 0; j < wide; j++)
            for (int p = 0; p < TAPS_PARTS; p++) found[j][p] = load(sums + j * BLOCK + lane + p * LANES);
        for (int w = 0; w < width; w++) {
            vec own[TAPS_PARTS];
            for (int p = 0; p < TAPS_PARTS; p++) own[p] = load(gradient + (size_t)w * BLOCK + lane + p * LANES);
#pragma GCC unroll 7
            for (int j = 0; j < wide; j++)
                for (int p = 0; p < TAPS_PARTS; p++)
                    found[j][p] += own[p] * load(line + (size_t)(w + j) * BLOCK + lane + p * LANES);
        }
        for (int j = 0; j < wide; j++)
            for (int p = 0; p < TAPS_PARTS; p++) store(sums + j * BLOCK + lane + p * LANES, found[j][p]);
    }
}

/* A block of channels of `width` pixels, one behind the other. */
INLINE void taps_line(float *to, const float *from, ptrdiff_t row, int width, int channels) {
    for (int w = 0; w < width; w++)
        for (int lane = 0; lane < BLOCK; lane += LANES)
            store(to + (size_t)w * BLOCK + lane, load_some(from + w * row + lane, channels - lane));
}

INLINE void taps_bias(const float *gradient, int width, float *sums) {
    for (int lane = 0; lane < BLOCK; lane += LANES) {
        vec found = load(sums + lane);
        for (int w = 0; w < width; w++) found += load(gradient + (size_t)w * BLOCK + lane);
        store(sums + lane, found);
    }
}

static void taps_image(const struct taps *at, long image, int first, float *lines, float *gradient, float *sums) {
    int channels = at->channels - first < BLOCK ? at->channels - first : BLOCK, high = at->high, wide = at->wide;
    size_t line = (size_t)(at->width + wide - 1) * BLOCK;
    for (int row = 0, seen = 0; row < at->height; row++) {
        for (; seen < at->height && seen <= row - at->above + high - 1; seen++) {
            const float *x = at->x + image * at->x_image + (ptrdiff_t)seen * at->width * at->x_row + first;
            taps_line(lines + (size_t)(seen % high) * line + (size_t)at->before * BLOCK, x, at->x_row, at->width, channels);
        }
        const float *own = at->gradient + image * at->gradient_image + (ptrdiff_t)row * at->width * at->gradient_row + first;
        taps_line(gradient, own, at->gradient_row, at->width, channels);
        if (at->bias) taps_bias(gradient, at->width, sums + (size_t)high * wide * BLOCK);
        for (int k = 0; k < high; k++) {
            int source = row - at->above + k;
            if (source < 0 || source >= at->height) continue;
            const float *from = lines + (size_t)(source % high) * line;
            float *to = sums + (size_t)k * wide * BLOCK;
            if (wide == 7) taps_row(7, from, gradient, at->width, to);
            else if (wide == 5) taps_row(5, from, gradient, at->width, to);
            else taps_row(3, from, gradient, at->width, to);
        }
    }
}

static int taps_task(void *about, long index) {
    const struct taps *at = about;
    int blocks = pieces_of(at->channels, BLOCK), block = index % blocks, share = index / blocks;
    size_t line = (size_t)(at->width + at->wide - 1) * BLOCK, all_lines = line * at->high;
    size_t sums = (size_t)(at->high * at->wide + 1) * BLOCK; /* behind the taps the bias */
    float *room = claim(all_lines + (size_t)at->width * BLOCK);
    if (!room) return 1;
    memset(room, 0, all_lines * sizeof(float)); /* both ends of a line stay zeros */
    float *to = at->sums + (size_t)index * sums;
    memset(to, 0, sums * sizeof(float));
    for (long image = (long)at->images * share / at->shares; image < (long)at->images * (share + 1) / at->shares; image++)
        taps_image(at, image, block * BLOCK, room, room + all_lines, to);
    free(room);
    return 0;
}

static int run_taps(struct taps *at) {
    if (at->wide != 3 && at->wide != 5 && at->wide != 7) return 1;
    int blocks = pieces_of(at->channels, BLOCK), taps = at->high * at->wide;
    at->shares = pieces_of(8 * at->threads, blocks);
    if (at->shares > at->images) at->shares = at->images;
    at->sums = claim((size_t)at->shares * blocks * (taps + 1) * BLOCK);
    if (!at->sums) return 1;
    int failed = share(taps_task, at, (long)at->shares * blocks, at->threads);
    for (int c = 0; c < at->channels && !failed; c++)
        for (int k = 0; k <= taps; k++) {
            float total = 0;
            for (int i = 0; i < at->shares; i++)
                total += at->sums[(((size_t)i * blocks + c / BLOCK) * (taps + 1) + k) * BLOCK + c % BLOCK];
            if (k < taps) at->out[(size_t)c * taps + k] = total;
            else if (at->bias) at->bias[c] = total;
        }
    free(at->sums);
    return failed;
}

/* What lies between blocks: patches of maps as rows for a product, copies and sums of tokens, and their mean. */
#define PUT_ROWS 32
#define MEAN_CHANNELS 64
#define MEAN_TOKENS 64 /* that are summed before their sum joins the others */

INLINE int clipped(int place, int least, int most) { return place < least ? least : place > most ? most : place; }

/* One row of a kernel of one patch with its channels side by side: what lies outside of the map is zero. */
INLINE void patch_row(const struct patches *at, float *to, const float *line, int left) {
    int channels = at->channels, wide = at->wide, from = clipped(-left, 0, wide), until = clipped(at->width - left, from, wide);
    memset(to, 0, (size_t)from * channels * sizeof(float));
    memset(to + (ptrdiff_t)until * channels, 0, (size_t)(wide - until) * channels * sizeof(float));
    if (at->x_channel == 1 && at->x_column == channels) {
        memcpy(to + (ptrdiff_t)from * channels, line + (ptrdiff_t)(left + from) * channels,
               (size_t)(until - from) * channels * sizeof(float));
        return;
    }
    for (int j = from; j < until; j++)
        for (int c = 0; c < channels; c++) to[j * channels + c] = line[(left + j) * at->x_column + c * at->x_channel];
}

/* The same for one channel alone. */
INLINE void patch_line(const struct patches *at, float *to, const float *line, int left) {
    int wide = at->wide, from = clipped(-left, 0, wide), until = clipped(at->width - left, from, wide);
    for (int j = 0; j < from; j++) to[j] = 0;
    for (int j = from; j < until; j++) to[j] = line[(left + j) * at->x_column];
    for (int j = until; j < wide; j++) to[j] = 0;
}

static int patches_task(void *about, long index) {
    const struct patches *at = about;
    int row = index % at->out_height, size = at->high * at->wide * at->channels, line = at->wide * at->channels;
    const float *image = at->x + index / at->out_height * at->x_image;
    float *to = at->out + index * at->out_width * size;
    for (int column = 0; column < at->out_width; column++, to += size) {
        int top = row * at->stride - at->above, left = column * at->stride - at->before;
        for (int i = 0; i < at->high; i++) {
            int there = top + i >= 0 && top + i < at->height;
            const float *from = image + (top + i) * at->x_row;
            if (!at->channels_first) {
                if (there) patch_row(at, to + i * line, from, left);
                else memset(to + i * line, 0, line * sizeof(float));
                continue;
            }
            for (int c = 0; c < at->channels; c++) {
                float *place = to + (c * at->high + i) * at->wide;
                if (there) patch_line(at, place, from + c * at->x_channel, left);
                else memset(place, 0, at->wide * sizeof(float));
            }
        }
    }
    return 0;
}

static int run_patches(struct patches *at) {
    return share(patches_task, at, (long)at->images * at->out_height, at->threads);
}

static int put_task(void *about, long index) {
    const struct put *at = about;
    long blocks = (at->rows + PUT_ROWS - 1) / PUT_ROWS, image = index / blocks, first = index % blocks * PUT_ROWS;
    long end = first + PUT_ROWS < at->rows ? first + PUT_ROWS : at->rows;
    for (long row = first; row < end; row++) {
        const float *x = at->x + image * at->x_image + row * at->x_row;
        const float *y = at->y ? at->y + image * at->y_image + row * at->y_row : NULL;
        float *out = at->out + image * at->out_image + row * at->out_row;
        for (int c = 0; c < at->width; c += LANES) {
            int some = at->width - c;
            vec sum = load_some(x + c, some);
            store_some(out + c, y ? sum + load_some(y + c, some) : sum, some);
        }
    }
    return 0;
}

static int run_put(struct put *at) {
    return share(put_task, at, at->images * ((at->rows + PUT_ROWS - 1) / PUT_ROWS), at->threads);
}

static int mean_task(void *about, long index) {
    const struct mean *at = about;
    int blocks = pieces_of(at->width, MEAN_CHANNELS), first = index % blocks * MEAN_CHANNELS;
    long image = index / blocks;
    int end = first + MEAN_CHANNELS < at->width ? first + MEAN_CHANNELS : at->width;
    const float *x = at->x + image * at->x_image;
    for (int c = first; c < end; c += LANES) {
        vec total = {0};
        for (long start = 0; start < at->tokens; start += MEAN_TOKENS) {
            vec sum = {0};
            for (long t = start; t < at->tokens && t < start + MEAN_TOKENS; t++) sum += load_some(x + t * at->x_row + c, end - c);
            total += sum;
        }
        store_some(at->out + image * at->out_row + c, total / (float)at->tokens, end - c);
    }
    return 0;
}

static int run_mean(struct mean *at) { return share(mean_task, at, (long)at->images * pieces_of(at->width, MEAN_CHANNELS), at->threads); }

/* The mean over a window minus the middle, and a norm over a whole image: what PoolFormer's blocks are made of. */

INLINE int window_start(int place, int around) { return place > around ? place - around : 0; }
INLINE int window_end(int place, int around, int size) { return place + around < size ? place + around + 1 : size; }
INLINE int window_size(int place, int around, int size) {
    return window_end(place, around, size) - window_start(place, around);
}

/* A row of an image. The share of a pixel in a mean is decided where the mean is, or on the way back where the pixel is. */
static int pool_task(void *about, long index) {
    const struct pool *at = about;
    int height = at->height, width = at->width, channels = at->channels, around = at->size / 2, row = index % height;
    ptrdiff_t wide = (ptrdiff_t)width * channels, place = index * wide;
    const float *x = at->x + (index - row) * wide;
    float *line = claim(wide + LANES);
    if (!line) return 1;
    int top = window_start(row, around), bottom = window_end(row, around, height);
    for (ptrdiff_t c = 0; c < wide; c += LANES) {
        vec sum = {0};
        int some = wide - c < LANES ? (int)(wide - c) : LANES;
        for (int h = top; h < bottom; h++) {
            vec own = load_some(x + h * wide + c, some);
            sum += at->back ? own * (1.0f / window_size(h, around, height)) : own;
        }
        store(line + c, sum);
    }
    for (int w = 0; w < width; w++, place += channels) {
        int left = window_start(w, around), right = window_end(w, around, width);
        float share = at->back ? 1 : 1.0f / ((bottom - top) * (right - left));
        for (int c = 0; c < channels; c += LANES) {
            vec sum = {0};
            int some = channels - c;
            for (int k = left; k < right; k++) {
                vec own = load(line + (ptrdiff_t)k * channels + c);
                sum += at->back ? own * (1.0f / window_size(k, around, width)) : own;
            }
            vec found = sum * share - load_some(at->x + place + c, some);
            if (at->branch) found *= load_some(at->branch + c, some);
            if (at->stream) {
                vec stream = load_some(at->stream + place + c, some);
                found += at->residual ? stream * load_some(at->residual + c, some) : stream;
            }
            store_some(at->out + place + c, found, some);
        }
    }
    free(line);
    return 0;
}

static int run_pool(struct pool *at) { return share(pool_task, at, (long)at->images * at->height, at->threads); }

#define WHOLE_ROWS 64

/* The mean of some rows of an image and their squares around it. */
static int whole_part(void *about, long index) {
    const struct whole_norm *at = about;
    long parts = pieces_of(at->rows, WHOLE_ROWS), image = index / parts, first = index % parts * WHOLE_ROWS;
    long rows = at->rows - first < WHOLE_ROWS ? at->rows - first : WHOLE_ROWS, count = rows * at->width;
    const float *x = at->x + (image * at->rows + first) * at->width;
    float mean = norm_sum(x, count, 0, 1) / count;
    at->sums[2 * index] = mean, at->sums[2 * index + 1] = norm_sum(x, count, mean, 2);
    return 0;
}

/* From the parts of an image its mean, and what deviations from that are multiplied with: in place of the first part's. */
static void whole_join(const struct whole_norm *at, long image) {
    long parts = pieces_of(at->rows, WHOLE_ROWS);
    float *sums = at->sums + 2 * image * parts;
    double mean = 0, squares = 0, all_numbers = (double)at->rows * at->width;
    for (int pass = 0; pass < 2; pass++)
        for (long part = 0; part < parts; part++) {
            long left = at->rows - part * WHOLE_ROWS, rows = left < WHOLE_ROWS ? left : WHOLE_ROWS;
            double numbers = (double)rows * at->width, apart = sums[2 * part] - mean;
            if (!pass) mean += sums[2 * part] * (numbers / all_numbers);
            else squares += sums[2 * part + 1] + numbers * apart * apart;
        }
    sums[0] = (float)mean, sums[1] = (float)(1 / __builtin_sqrt(squares / all_numbers + at->eps) + 0 * squares);
}

static int whole_apply(void *about, long index) {
    const struct whole_norm *at = about;
    long parts = pieces_of(at->rows, WHOLE_ROWS), image = index / parts, first = index % parts * WHOLE_ROWS;
    float middle = at->sums[2 * image * parts], over = at->sums[2 * image * parts + 1];
    long end = first + WHOLE_ROWS < at->rows ? first + WHOLE_ROWS : at->rows;
    for (long row = image * at->rows + first; row < image * at->rows + end; row++)
        for (int c = 0; c < at->width; c += LANES) {
            int some = at->width - c;
            vec x = (load_some(at->x + row * at->width + c, some) - middle) * over * load_some(at->weight + c, some);
            store_some(at->out + row * at->width + c, at->bias ? x + load_some(at->bias + c, some) : x, some);
        }
    return 0;
}

static int run_whole_norm(struct whole_norm *at) {
    long tasks = (long)at->images * pieces_of(at->rows, WHOLE_ROWS);
    at->sums = claim((size_t)2 * tasks);
    if (!at->sums) return 1;
    int failed = share(whole_part, at, tasks, at->threads);
    for (long image = 0; image < at->images; image++) whole_join(at, image);
    failed = failed || share(whole_apply, at, tasks, at->threads);
    free(at->sums);
    return failed;
}

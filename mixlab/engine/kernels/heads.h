/* Blocks of 4 x 4 weights along the channels, between tokens with all heads side by side and heads one behind the other,
and what these weights would change. */

#define HEADS_ROWS 64

static int heads_task(void *about, long index) {
    const struct heads *at = about;
    long first = index * HEADS_ROWS, end = first + HEADS_ROWS < at->rows ? first + HEADS_ROWS : at->rows;
    ptrdiff_t channels = (ptrdiff_t)at->heads * at->width;
    for (int head = 0; head < at->heads; head++)
        for (int c = 0; c < at->width; c += LANES) {
            struct blocks blocks = blocks_at(at->weights, at->bias, channels, 0, (ptrdiff_t)head * at->width + c);
            const float *x = at->x + head * at->x_head + c;
            float *out = at->out + head * at->out_head + c;
            for (long row = first; row < end; row++) {
                vec turns[4];
                turns_of(load(x + row * at->x_row), turns);
                store(out + row * at->out_row, project(&blocks, turns));
            }
        }
    return 0;
}

static int run_heads(struct heads *at) {
    return share(heads_task, at, pieces_of(at->rows, HEADS_ROWS), at->threads);
}

/* For a share of the rows the sums of gradient times every turn of x, and of the gradient. */
static int blocks_task(void *about, long index) {
    const struct blocks_gradient *at = about;
    long first = at->rows * index / at->shares, end = at->rows * (index + 1) / at->shares;
    ptrdiff_t channels = (ptrdiff_t)at->heads * at->width;
    float *sums = at->sums + 5 * channels * index;
    for (int head = 0; head < at->heads; head++)
        for (int c = 0; c < at->width; c += LANES) {
            const float *x = at->x + head * at->x_head + c, *gradient = at->gradient + head * at->gradient_head + c;
            vec found[5] = {{0}, {0}, {0}, {0}, {0}};
            for (long row = first; row < end; row++) {
                vec own = load(gradient + row * at->gradient_row), turns[4];
                turns_of(load(x + row * at->x_row), turns);
#pragma GCC unroll 4
                for (int by = 0; by < 4; by++) found[by] += own * turns[by];
                found[4] += own;
            }
            for (int k = 0; k < 5; k++) store(sums + k * channels + (ptrdiff_t)head * at->width + c, found[k]);
        }
    return 0;
}

static int run_blocks_gradient(struct blocks_gradient *at) {
    ptrdiff_t numbers = 5 * (ptrdiff_t)at->heads * at->width;
    at->shares = 8 * at->threads < at->rows ? 8 * at->threads : (int)at->rows;
    at->sums = claim((size_t)numbers * at->shares);
    if (!at->sums) return 1;
    int failed = share(blocks_task, at, at->shares, at->threads);
    for (ptrdiff_t i = 0; i < numbers && !failed; i++) {
        float total = 0;
        for (int s = 0; s < at->shares; s++) total += at->sums[s * numbers + i];
        at->out[i] = total;
    }
    free(at->sums);
    return failed;
}

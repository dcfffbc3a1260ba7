/* Layer norm over the last axis, of the product of two where there are two. */
#define NORM_ROWS 32

INLINE vec norm_input(const struct norm *at, const float *one, const float *other, int c) {
    vec x = load(one + c);
    return at->other ? x * load(other + c) : x;
}

static int norm_task(void *about, long index) {
    const struct norm *at = about;
    long first = index * NORM_ROWS, end = first + NORM_ROWS < at->rows ? first + NORM_ROWS : at->rows;
    int width = at->width;
    for (long row = first; row < end; row++) {
        const float *one = at->one + row * at->one_row, *other = at->other ? at->other + row * at->other_row : NULL;
        float *out = at->out + row * width;
        vec total = {0}, squares = {0};
        for (int c = 0; c < width; c += LANES) {
            vec x = norm_input(at, one, other, c);
            store(out + c, x);
            total += x;
        }
        if (!at->weight) continue;
        float mean = sum(total) / width;
        for (int c = 0; c < width; c += LANES) {
            vec x = load(out + c) - mean;
            squares += x * x;
        }
        float over = 1.0f / __builtin_sqrtf(sum(squares) / width + at->eps);
        for (int c = 0; c < width; c += LANES) {
            vec x = (load(out + c) - mean) * over * load(at->weight + c);
            store(out + c, at->bias ? x + load(at->bias + c) : x);
        }
    }
    return 0;
}

static int run_norm(const struct norm *at) {
    return share(norm_task, (void *)at, (at->rows + NORM_ROWS - 1) / NORM_ROWS, at->threads);
}

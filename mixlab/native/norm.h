/* Layer norm over the last axis, of the product of two where there are two. */
#define NORM_ROWS 32

INLINE vec norm_input(const struct norm *at, const float *one, const float *other, int c) {
    vec x = load(one + c);
    return at->other ? x * load(other + c) : x;
}

/* A row in place. */
INLINE void norm_row(float *row, int width, const float *weight, const float *bias, float eps) {
    vec total = {0}, squares = {0};
    for (int c = 0; c < width; c += LANES) total += load(row + c);
    float mean = sum(total) / width;
    for (int c = 0; c < width; c += LANES) {
        vec x = load(row + c) - mean;
        squares += x * x;
    }
    float over = 1.0f / __builtin_sqrtf(sum(squares) / width + eps);
    for (int c = 0; c < width; c += LANES) {
        vec x = (load(row + c) - mean) * over * load(weight + c);
        store(row + c, bias ? x + load(bias + c) : x);
    }
}

static int norm_task(void *about, long index) {
    const struct norm *at = about;
    long first = index * NORM_ROWS, end = first + NORM_ROWS < at->rows ? first + NORM_ROWS : at->rows;
    int width = at->width;
    for (long row = first; row < end; row++) {
        const float *one = at->one + row * at->one_row, *other = at->other ? at->other + row * at->other_row : NULL;
        float *out = at->out + row * width;
        for (int c = 0; c < width; c += LANES) store(out + c, norm_input(at, one, other, c));
        if (at->weight) norm_row(out, width, at->weight, at->bias, at->eps);
    }
    return 0;
}

static int run_norm(const struct norm *at) {
    return share(norm_task, (void *)at, (at->rows + NORM_ROWS - 1) / NORM_ROWS, at->threads);
}

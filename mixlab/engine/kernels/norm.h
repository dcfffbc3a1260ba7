/* Layer norm over the last axis, of the product of two where there are two. */
#define NORM_ROWS 32

INLINE vec norm_input(const struct norm *at, const float *one, const float *other, int c) {
    int some = at->width - c;
    vec x = load_some(one + c, some);
    return at->other ? x * load_some(other + c, some) : x;
}

/* The sum of (x - mean)^power over a row, in four sums that do not wait for each other. */
INLINE float norm_sum(const float *row, int width, float mean, int power) {
    vec sums[4] = {{0}, {0}, {0}, {0}};
    int c = 0;
    for (; c + 4 * LANES <= width; c += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            vec x = load(row + c + i * LANES) - mean;
            sums[i] += power == 1 ? x : x * x;
        }
    for (; c < width; c += LANES) {
        vec x = first_of(load_some(row + c, width - c) - mean, width - c);
        sums[0] += power == 1 ? x : x * x;
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* What deviations are multiplied with; not a number if their squares were too large for one, as in PyTorch, where that depends
on the width. */
INLINE float over_root(float variance, float eps) { return 1.0f / __builtin_sqrtf(variance + eps) + 0.0f * variance; }

/* A row, which may take the place of its input. */
INLINE void norm_row(float *out, const float *row, int width, const float *weight, const float *bias, float eps) {
    float mean = norm_sum(row, width, 0, 1) / width;
    float over = over_root(norm_sum(row, width, mean, 2) / width, eps);
    for (int c = 0; c < width; c += LANES) {
        int some = width - c;
        vec x = (load_some(row + c, some) - mean) * over * load_some(weight + c, some);
        store_some(out + c, bias ? x + load_some(bias + c, some) : x, some);
    }
}

static int norm_task(void *about, long index) {
    const struct norm *at = about;
    long first = index * NORM_ROWS, end = first + NORM_ROWS < at->rows ? first + NORM_ROWS : at->rows;
    int width = at->width;
    for (long row = first; row < end; row++) {
        const float *one = at->one + row * at->one_row, *other = at->other ? at->other + row * at->other_row : NULL;
        float *out = at->out + row * width;
        for (int c = 0; c < width && (other || !at->weight); c += LANES)
            store_some(out + c, norm_input(at, one, other, c), width - c);
        if (at->weight) norm_row(out, other ? out : one, width, at->weight, at->bias, at->eps);
    }
    return 0;
}

static int run_norm(struct norm *at) {
    return share(norm_task, at, (at->rows + NORM_ROWS - 1) / NORM_ROWS, at->threads);
}

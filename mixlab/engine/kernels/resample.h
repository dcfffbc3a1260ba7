/* Tokens of one grid on another: every row and column of the target is a weighted sum of some of the source's. */

static int resample_task(void *about, long index) {
    const struct resample *at = about;
    long image = index / at->height;
    int row = index % at->height, channels = at->channels;
    ptrdiff_t wide = (ptrdiff_t)at->source_width * channels, first = (ptrdiff_t)at->prefix * channels;
    const float *x = at->x + image * (first + at->source_height * wide);
    float *out = at->out + image * (first + (ptrdiff_t)at->height * at->width * channels), *line = claim(wide + LANES);
    if (!line) return 1;
    for (ptrdiff_t c = 0; c < first && !row; c++) out[c] = at->adds ? out[c] + x[c] : x[c]; /* class tokens stay */
    for (ptrdiff_t c = 0; c < wide; c += LANES) {
        vec sum = {0};
        for (int k = at->row_starts[row]; k < at->row_starts[row + 1]; k++)
            sum += at->row_weights[k] * load_some(x + first + at->rows[k] * wide + c, wide - c < LANES ? wide - c : LANES);
        store(line + c, sum);
    }
    out += first + (ptrdiff_t)row * at->width * channels;
    for (int column = 0; column < at->width; column++, out += channels)
        for (int c = 0; c < channels; c += LANES) {
            vec sum = at->adds ? load_some(out + c, channels - c) : (vec){0};
            for (int k = at->column_starts[column]; k < at->column_starts[column + 1]; k++)
                sum += at->column_weights[k] * load(line + (ptrdiff_t)at->columns[k] * channels + c);
            store_some(out + c, sum, channels - c);
        }
    free(line);
    return 0;
}

static int run_resample(struct resample *at) {
    return share(resample_task, at, (long)at->images * at->height, at->threads);
}

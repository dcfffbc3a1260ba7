/* Factorised attention (CoaT, Eq. 3): queries times softmax(keys)^T values, head by head where they lie. */
#define FACTOR_STEPS 48
#define FACTOR_AHEAD 12 /* tokens */

INLINE int padded_to(int size, int multiple) { return (size + multiple - 1) / multiple * multiple; }

/* A row from `place` on, of which anything follows behind its end: there may be nothing to read. */
INLINE vec within(const float *row, int place, int channels) {
    if (place + LANES <= channels) return load(row + place);
    if (channels < LANES) return load_some(row + place, channels - place);
    ivec order;
    for (int i = 0; i < LANES; i++) order[i] = i + place + LANES - channels;
    return __builtin_shuffle(load(row + channels - LANES), order);
}

INLINE vec first_of(vec x, int count) { /* zeros behind them */
    if (count >= LANES) return x;
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return choose(lane < count, x, (vec){0});
}

/* What a head's keys and values of an image leave for its queries: width x width, rows padded to 16. */
static int factor_context(void *about, long index) {
    const struct factor *at = about;
    int width = at->width, padded = padded_to(width, PANEL), channels = at->heads * width;
    int first = index % at->heads * width;
    long image = index / at->heads;
    const float *keys = at->key + image * at->tokens * at->key_row, *values = at->value + image * at->tokens * at->value_row;
    float *room = claim((size_t)(2 + 2 * FACTOR_STEPS) * padded), *context = at->contexts + (size_t)index * width * padded;
    if (!room) return 1;
    float *peak = room, *total = room + padded, *weight = total + padded, *value = weight + FACTOR_STEPS * padded;
    for (int c = 0; c < padded; c += LANES) store(peak + c, all(-3e38f)), store(total + c, (vec){0});
    for (long t = 0; t < at->tokens; t++) {
        if (t + FACTOR_AHEAD < at->tokens) ask_for(keys + (t + FACTOR_AHEAD) * at->key_row + first, width);
        for (int c = 0; c < width; c += LANES) {
            vec key = within(keys + t * at->key_row, first + c, channels), most = load(peak + c);
            store(peak + c, choose(key > most, key, most));
        }
    }
    memset(weight, 0, (size_t)2 * FACTOR_STEPS * padded * sizeof(float));
    for (long start = 0; start < at->tokens; start += FACTOR_STEPS) {
        int count = at->tokens - start < FACTOR_STEPS ? at->tokens - start : FACTOR_STEPS;
        for (int t = 0; t < count; t++) {
            const float *key = keys + (start + t) * at->key_row, *given = values + (start + t) * at->value_row;
            if (start + t + FACTOR_AHEAD < at->tokens) {
                ask_for(key + FACTOR_AHEAD * at->key_row + first, width);
                ask_for(given + FACTOR_AHEAD * at->value_row + first, width);
            }
            for (int c = 0; c < width; c += LANES) {
                vec own = first_of(exponential(within(key, first + c, channels) - load(peak + c)), width - c);
                store(total + c, load(total + c) + own);
                store(weight + t * padded + c, own);
                store(value + t * padded + c, first_of(within(given, first + c, channels), width - c));
            }
        }
        multiply(context, padded, weight, 1, padded, value, padded, width, padded, count, start ? 1 : 0);
    }
    for (int i = 0; i < width; i++)
        for (int c = 0; c < padded; c += LANES) {
            float *place = context + (size_t)i * padded + c;
            store(place, load(place) * (at->scale / total[i]));
        }
    free(room);
    return 0;
}

/* The outputs of some tokens of an image. A head may write into the next one's place, which comes behind it. */
static int factor_read(void *about, long index) {
    const struct factor *at = about;
    int width = at->width, padded = padded_to(width, PANEL), channels = at->heads * width;
    long blocks = (at->tokens + FACTOR_STEPS - 1) / FACTOR_STEPS, image = index / blocks, start = index % blocks * FACTOR_STEPS;
    int count = at->tokens - start < FACTOR_STEPS ? at->tokens - start : FACTOR_STEPS;
    const float *queries = at->query + (image * at->tokens + start) * at->query_row;
    float *out = at->out + (image * at->tokens + start) * channels, *room = claim((size_t)FACTOR_STEPS * padded);
    if (!room) return 1;
    for (int t = 0; t < count; t++) {
        ask_for(queries + t * at->query_row, channels);
        if (at->near && start + t >= at->prefix)
            ask_for(at->near + (image * (at->tokens - at->prefix) + start + t - at->prefix) * channels, channels);
    }
    for (int head = 0; head < at->heads; head++) {
        const float *context = at->contexts + ((size_t)image * at->heads + head) * width * padded;
        int first = head * width;
        multiply(room, padded, queries + first, at->query_row, 1, context, padded, count, padded, width, 0);
        for (int t = 0; t < count; t++) {
            long place = start + t - at->prefix; /* in the image */
            const float *query = queries + t * at->query_row;
            const float *near = at->near && place >= 0 ? at->near + (image * (at->tokens - at->prefix) + place) * channels : NULL;
            for (int c = 0; c < width; c += LANES) {
                vec x = load(room + t * padded + c);
                if (near) x += within(query, first + c, channels) * within(near, first + c, channels);
                store_some(out + (size_t)t * channels + first + c, x, channels - first - c);
            }
        }
    }
    free(room);
    return 0;
}

static int run_factor(struct factor *at) {
    long heads = (long)at->images * at->heads, blocks = (at->tokens + FACTOR_STEPS - 1) / FACTOR_STEPS;
    at->contexts = claim((size_t)heads * at->width * padded_to(at->width, PANEL));
    if (!at->contexts) return 1;
    int failed = share(factor_context, at, heads, at->threads);
    failed = failed || share(factor_read, at, at->images * blocks, at->threads);
    free(at->contexts);
    return failed;
}

/* Factorised attention (CoaT, Eq. 3): queries times softmax(keys)^T values, head by head where they lie. */
#define FACTOR_STEPS 48
#define FACTOR_FEW 12

/* A row from `place` on, of which anything follows behind its end: there may be nothing to read. */
INLINE vec within(const float *row, int place, int channels) {
    if (place + LANES <= channels) return load(row + place);
    if (channels < LANES) return load_some(row + place, channels - place);
    ivec order;
    for (int i = 0; i < LANES; i++) order[i] = i + place + LANES - channels;
    return __builtin_shuffle(load(row + channels - LANES), order);
}

/* Numbers that a head of an image leaves behind: width rows of its context, its peaks and sums, padded to 16 each. */
INLINE size_t factor_kept(int width) { return (size_t)(width + 2) * padded_to(width, PANEL); }

/* The largest keys of some more tokens; what was summed up against lower ones is lowered. */
INLINE void factor_rise(const float *keys, ptrdiff_t row, int first, int channels, int width, int count, float *context,
                        float *peak) {
    int padded = padded_to(width, PANEL);
    for (int c = 0; c < width; c += LANES) {
        vec most = load(peak + c), before = most;
        for (int t = 0; t < count; t++) most = larger_of(within(keys + t * row, first + c, channels), most);
        store(peak + c, most);
        vec left = exponential(before - most);
        store(peak + padded + c, load(peak + padded + c) * left); /* the sums */
        for (int i = 0; i < LANES && c + i < width && context; i++)
            for (int j = 0; j < padded && left[i] != 1; j += LANES) {
                float *place = context + (size_t)(c + i) * padded + j;
                store(place, load(place) * left[i]);
            }
    }
}

/* What a head's keys and values of an image leave for its queries: width x width, rows padded to 16. */
static int factor_context(void *about, long index) {
    const struct factor *at = about;
    int width = at->width, padded = padded_to(width, PANEL), channels = at->heads * width;
    int first = index % at->heads * width;
    long image = index / at->heads;
    const float *keys = at->key + image * at->tokens * at->key_row, *values = at->value + image * at->tokens * at->value_row;
    float *room = claim((size_t)2 * FACTOR_STEPS * padded), *context = at->contexts + index * factor_kept(width);
    if (!room) return 1;
    float *peak = context + (size_t)width * padded, *total = peak + padded;
    float *weight = room, *value = weight + FACTOR_STEPS * padded;
    for (int c = 0; c < padded; c += LANES) store(peak + c, all(-3e38f)), store(total + c, (vec){0});
    memset(weight, 0, (size_t)2 * FACTOR_STEPS * padded * sizeof(float));
    for (long start = 0; start < at->tokens; start += FACTOR_STEPS) {
        int count = at->tokens - start < FACTOR_STEPS ? at->tokens - start : FACTOR_STEPS;
        factor_rise(keys + start * at->key_row, at->key_row, first, channels, width, count, start ? context : NULL, peak);
        for (int t = 0; t < count; t++) {
            const float *key = keys + (start + t) * at->key_row, *given = values + (start + t) * at->value_row;
            if (start + t + FACTOR_STEPS < at->tokens) {
                ask_for(key + FACTOR_STEPS * at->key_row + first, width);
                ask_for(given + FACTOR_STEPS * at->value_row + first, width);
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
        const float *context = at->contexts + (image * at->heads + head) * factor_kept(width);
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
    int failed = share(factor_context, at, heads, at->threads);
    return failed || share(factor_read, at, at->images * blocks, at->threads);
}

/* -- back through it -- */

/* The matrices that tokens of a head are multiplied with, and two vectors; rows padded to 16. */
struct factor_matrices {
    float *change;        /* of the context: scale queries^T gradient */
    float *turned_change; /* the same turned, as is the context */
    float *turned_context;
    float *shift, *share; /* of every key's channel: the sum of weight times its change, and 1 / the sum of exponentials */
};

INLINE size_t factor_matrices_size(int width) { return (size_t)(3 * width + 2) * padded_to(width, PANEL); }

INLINE struct factor_matrices factor_matrices_of(const struct factor_gradient *at, long index) {
    size_t size = (size_t)at->width * padded_to(at->width, PANEL);
    float *first = at->matrices + index * factor_matrices_size(at->width), *last = first + 3 * size;
    return (struct factor_matrices){first, first + size, first + 2 * size, last, last + padded_to(at->width, PANEL)};
}

static int factor_change(void *about, long index) {
    const struct factor_gradient *at = about;
    int width = at->width, padded = padded_to(width, PANEL), channels = at->heads * width;
    int first = index % at->heads * width;
    long image = index / at->heads;
    const float *queries = at->query + image * at->tokens * at->query_row;
    const float *gradients = at->gradient + image * at->tokens * channels;
    const float *context = at->contexts + index * factor_kept(width), *total = context + (size_t)(width + 1) * padded;
    struct factor_matrices to = factor_matrices_of(at, index);
    float *room = claim((size_t)FACTOR_STEPS * padded);
    if (!room) return 1;
    memset(to.change, 0, factor_matrices_size(width) * sizeof(float));
    memset(room, 0, (size_t)FACTOR_STEPS * padded * sizeof(float));
    for (long start = 0; start < at->tokens; start += FACTOR_STEPS) {
        int count = at->tokens - start < FACTOR_STEPS ? at->tokens - start : FACTOR_STEPS;
        for (int t = 0; t < count; t++) {
            const float *gradient = gradients + (start + t) * channels;
            if (start + t + FACTOR_STEPS < at->tokens) {
                ask_for(queries + (start + t + FACTOR_STEPS) * at->query_row + first, width);
                ask_for(gradient + FACTOR_STEPS * (ptrdiff_t)channels + first, width);
            }
            for (int c = 0; c < width; c += LANES)
                store(room + t * padded + c, first_of(within(gradient, first + c, channels), width - c));
        }
        const float *query = queries + start * at->query_row + first;
        multiply(to.change, padded, query, 1, at->query_row, room, padded, width, padded, count, start ? 1 : 0);
    }
    for (int i = 0; i < width; i++) {
        float *change = to.change + (size_t)i * padded;
        vec shift = {0};
        for (int c = 0; c < padded; c += LANES) {
            shift += load(change + c) * load(context + (size_t)i * padded + c);
            store(change + c, load(change + c) * at->scale);
        }
        to.shift[i] = sum(shift);
        to.share[i] = 1 / total[i];
        for (int j = 0; j < width; j++) {
            to.turned_change[(size_t)j * padded + i] = change[j];
            to.turned_context[(size_t)j * padded + i] = context[(size_t)i * padded + j];
        }
    }
    free(room);
    return 0;
}

/* A head of some tokens; as in `factor_read`, what is behind its end is overwritten by the next head. */
INLINE void factor_head_back(const struct factor_gradient *at, long image, long start, int count, int head, float *room) {
    int width = at->width, padded = padded_to(width, PANEL), channels = at->heads * width, first = head * width;
    long index = image * at->heads + head, token = image * at->tokens + start;
    struct factor_matrices by = factor_matrices_of(at, index);
    const float *peak = at->contexts + index * factor_kept(width) + (size_t)width * padded;
    float *weight = room, *change = weight + FACTOR_FEW * padded;
    for (int t = 0; t < count; t++)
        for (int c = 0; c < width; c += LANES) {
            vec key = within(at->key + (token + t) * at->key_row, first + c, channels);
            store(weight + t * padded + c, exponential(key - load(peak + c)) * load(by.share + c));
        }
    multiply(change, padded, weight, padded, 1, by.change, padded, count, padded, width, 0);
    for (int t = 0; t < count; t++)
        for (int c = 0; c < width; c += LANES)
            store_some(at->to_value + (token + t) * at->to_row + first + c, load(change + t * padded + c), channels - first - c);
    multiply(change, padded, at->value + token * at->value_row + first, at->value_row, 1, by.turned_change, padded, count, padded,
             width, 0);
    for (int t = 0; t < count; t++)
        for (int c = 0; c < width; c += LANES) {
            vec found = load(weight + t * padded + c) * (load(change + t * padded + c) - load(by.shift + c));
            store_some(at->to_key + (token + t) * at->to_row + first + c, found, channels - first - c);
        }
    const float *gradients = at->gradient + token * channels;
    multiply(change, padded, gradients + first, channels, 1, by.turned_context, padded, count, padded, width, 0);
    for (int t = 0; t < count; t++) {
        ptrdiff_t place = (image * (at->tokens - at->prefix) + start + t - at->prefix) * channels;
        int is_near = at->near && start + t >= at->prefix;
        for (int c = 0; c < width; c += LANES) {
            vec found = load(change + t * padded + c);
            if (is_near) {
                vec gradient = within(gradients + t * (ptrdiff_t)channels, first + c, channels);
                found += gradient * within(at->near + place, first + c, channels);
                gradient *= within(at->query + (token + t) * at->query_row, first + c, channels);
                store_some(at->to_near + place + first + c, gradient, channels - first - c);
            }
            store_some(at->to_query + (token + t) * at->to_row + first + c, found, channels - first - c);
        }
    }
}

/* What that head will want of the tokens behind these. */
INLINE void factor_ask_back(const struct factor_gradient *at, long image, long start, int count, int head) {
    int width = at->width, channels = at->heads * width, first = head * width;
    for (long t = start; t < start + count && t < at->tokens; t++) {
        long token = image * at->tokens + t;
        ask_for(at->key + token * at->key_row + first, width), ask_for(at->value + token * at->value_row + first, width);
        ask_for(at->query + token * at->query_row + first, width), ask_for(at->gradient + token * channels + first, width);
        if (at->near && t >= at->prefix)
            ask_for(at->near + (token - (image + 1) * at->prefix) * channels + first, width);
    }
}

static int factor_back(void *about, long index) {
    const struct factor_gradient *at = about;
    long blocks = (at->tokens + FACTOR_STEPS - 1) / FACTOR_STEPS, image = index / blocks, start = index % blocks * FACTOR_STEPS;
    long end = start + FACTOR_STEPS < at->tokens ? start + FACTOR_STEPS : at->tokens;
    float *room = claim((size_t)2 * FACTOR_FEW * padded_to(at->width, PANEL));
    if (!room) return 1;
    for (; start < end; start += FACTOR_FEW)
        for (int head = 0; head < at->heads; head++) {
            int count = end - start < FACTOR_FEW ? end - start : FACTOR_FEW;
            factor_ask_back(at, image, start + count, count, head);
            factor_head_back(at, image, start, count, head, room);
        }
    free(room);
    return 0;
}

static int run_factor_gradient(struct factor_gradient *at) {
    long heads = (long)at->images * at->heads, blocks = (at->tokens + FACTOR_STEPS - 1) / FACTOR_STEPS;
    at->matrices = claim(heads * factor_matrices_size(at->width));
    if (!at->matrices) return 1;
    int failed = share(factor_change, at, heads, at->threads);
    failed = failed || share(factor_back, at, at->images * blocks, at->threads);
    free(at->matrices);
    return failed;
}

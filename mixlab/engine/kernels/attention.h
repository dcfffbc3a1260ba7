/* Softmax attention, head by head where queries, keys and values lie, and its gradient.

Blocks of queries meet blocks of keys: scores stay in the second cache, and memory is linear in the number of tokens. Keys
lie in panels of 16 for scores, values in rows for their weighted sum. Queries are scaled so that exponents are those of 2. */
#define QUERIES 72 /* at once: a multiple of TALL */
#define KEYS 512
#define MOST_QUERIES 768 /* of a task */
#define TOKENS_AHEAD 12
#define LOG2_E 1.44269504088896341f
#define LN_2 0.693147180559945309f

/* 2^x for x up to 1, within 2 units in the last place; nothing below 2^-125. */
INLINE vec power_of_two(vec x) {
    ivec none = x < -125.0f;
    x = at_least(x, -125.0f);
    const vec magic = all(12582912.0f); /* as in `exponential` */
    vec shifted = x + magic, whole = shifted - magic, rest = x - whole, result = all(1.326472731307149e-3f);
    result = result * rest + 9.671512991189957e-3f;
    result = result * rest + 5.550733581185341e-2f;
    result = result * rest + 2.4022242426872253e-1f;
    result = result * rest + 6.931470036506653e-1f;
    result = result * rest + 1.0f;
    return scaled_by_power(result, whole, (ivec)shifted - (ivec)magic, none);
}

INLINE int at_most_of(long left, int most) { return left < most ? (int)left : most; }

/* The size of pieces up to `most`, all alike but the last. */
INLINE int piece_of(long size, int most, int multiple) {
    long pieces = (size + most - 1) / most;
    return padded_to((int)((size + pieces - 1) / pieces), multiple);
}

INLINE float *take(float **room, size_t floats) {
    float *taken = *room;
    *room += (floats + PANEL - 1) / PANEL * PANEL;
    return taken;
}

/* Rows side by side, times a factor, with zeros behind each of them. */
static void gather(float *to, int padded, const float *from, ptrdiff_t row, int count, int width, float factor) {
    for (int i = 0; i < count; i++, from += row, to += padded) {
        if (i + TOKENS_AHEAD < count) ask_for(from + TOKENS_AHEAD * row, width);
        for (int c = 0; c < padded; c += LANES) store(to + c, load_some(from + c, width - c) * factor);
    }
}

/* The way back. */
static void scatter(float *to, ptrdiff_t row, const float *from, int padded, int count, int width, float factor) {
    for (int i = 0; i < count; i++, from += padded, to += row)
        for (int c = 0; c < width; c += LANES) store_some(to + c, load(from + c) * factor, width - c);
}

/* Rows turned, in panels of 16. */
static void gather_panels(float *to, const float *from, ptrdiff_t row, int count, int width) {
    struct linear rows = {.right = from, .right_row = row, .columns = count, .depth = width, .right_turned = 1};
    for (int first = 0; first < count; first += PANEL) {
        for (int i = first + PANEL; i < count && i < first + 2 * PANEL; i++) ask_for(from + i * row, width);
        pack(&rows, first, PANEL, to + (ptrdiff_t)first * width);
    }
}

/* Some rows times all columns in panels. */
static void scores_of(float *out, int out_row, const float *left, int left_row, const float *panels, int rows, int columns,
                      int depth) {
    for (int column = 0; column < columns; column += PANEL)
        multiply(out + column, out_row, left, left_row, 1, panels + (ptrdiff_t)column * depth, PANEL, rows, PANEL, depth, 0);
}

/* From a row of scores to the next: an odd number of cache lines, so that a column of them is spread over the cache. */
INLINE int scores_row(int keys) { return padded_to(keys, 2 * PANEL) + PANEL; }

/* The largest of a vector, in all places. */
INLINE vec largest_of(vec x) {
    for (int half = LANES / 2; half; half /= 2) {
        ivec order;
        for (int lane = 0; lane < LANES; lane++) order[lane] = lane ^ half;
        x = larger_of(x, __builtin_shuffle(x, order));
    }
    return x;
}

/* The largest score of a row, or any number where one of them is none: then the sum is none either. Scores behind the last
become what changes no sum. */
INLINE float peak_of(float *scores, int count) {
    int last = (count - 1) / LANES * LANES;
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vec most = choose(lane < count - last, load(scores + last), all(-__builtin_inff()));
    store(scores + last, most);
    for (int k = 0; k < last; k += LANES) most = larger_of(load(scores + k), most);
    return largest_of(most)[0];
}

/* A row of scores becomes 2 to the power of what they lack of a peak. Returns the sum, through which spreads what is not a
number. */
INLINE float soften(float *scores, int count, float peak) {
    int last = (count - 1) / LANES * LANES;
    vec sums = {0};
    for (int k = 0; k < last; k += LANES) {
        vec x = power_of_two(load(scores + k) - peak);
        store(scores + k, x);
        sums += x;
    }
    vec end = power_of_two(load(scores + last) - peak);
    store(scores + last, end);
    return sum(sums + first_of(end, count - last));
}

/* Where the first token of a head begins, heads counted through all images. */
INLINE const float *head_at(const float *from, ptrdiff_t image, int heads, int width, long index) {
    return from + index / heads * image + index % heads * width;
}

/* Tokens of the head that probably comes next, into the second cache while this one is at work. */
INLINE void ask_ahead(const float *tokens, ptrdiff_t row, int count, int width, int parts, int channels) {
    for (int i = 0; i < count; i++, tokens += row)
        for (int part = 0; part < parts; part++)
            for (int c = 0; c < width; c += 16) __builtin_prefetch(tokens + part * channels + c, 0, 2);
}

struct attention_room {
    float *keys, *values, *query, *scores, *sums, *peak, *total;
};

/* Some queries of a head meet some keys. */
static void attend(const struct attention *at, const struct attention_room *room, const float *query, int queries, int keys,
                   int begins, int row) {
    int width = at->width, padded = padded_to(width, PANEL);
    gather(room->query, padded, query, at->row, queries, width, at->scale * LOG2_E);
    scores_of(room->scores, row, room->query, padded, room->keys, queries, keys, width);
    for (int i = 0; i < queries; i++) {
        float before = room->peak[i], now = peak_of(room->scores + i * row, keys), *sums = room->sums + i * padded;
        room->peak[i] = begins || now > before ? now : before;
        if (begins) room->total[i] = 0;
        else {
            float left = power_of_two(all(before - room->peak[i]))[0];
            room->total[i] *= left;
            for (int c = 0; c < padded; c += LANES) store(sums + c, load(sums + c) * left);
        }
    }
    for (int i = 0; i < queries; i++) room->total[i] += soften(room->scores + i * row, keys, room->peak[i]);
    multiply(room->sums, padded, room->scores, row, 1, room->values, padded, queries, padded, keys, !begins);
}

static void write_attended(const struct attention *at, const struct attention_room *room, long image, int head, long query,
                           int queries) {
    int width = at->width, padded = padded_to(width, PANEL), channels = at->heads * width;
    float *out = at->out + (image * at->tokens + query) * channels + head * width;
    float *logs = at->logs ? at->logs + (image * at->heads + head) * at->tokens + query : NULL;
    for (int i = 0; i < queries; i++) {
        scatter(out + (ptrdiff_t)i * channels, channels, room->sums + i * padded, padded, 1, width, 1 / room->total[i]);
        if (logs) logs[i] = room->peak[i] + __builtin_log2f(room->total[i]);
    }
}

/* A part of the queries of a head. */
static int attention_task(void *about, long index) {
    const struct attention *at = about;
    int width = at->width, padded = padded_to(width, PANEL), channels = at->heads * width;
    int head = index / at->parts % at->heads;
    long part = index % at->parts, image = index / at->parts / at->heads;
    long first = at->tokens * part / at->parts, queries = at->tokens * (part + 1) / at->parts - first;
    int most = piece_of(queries, QUERIES, TALL), keys = piece_of(at->tokens, KEYS, PANEL), row = scores_row(keys);
    float *all_room = claim((size_t)keys * (width + padded) + (size_t)most * (padded + row) + (queries + PANEL) * (padded + 2));
    if (!all_room) return 1;
    float *rest = all_room;
    struct attention_room room = {take(&rest, (size_t)keys * width), take(&rest, (size_t)keys * padded),
                                  take(&rest, (size_t)most * padded), take(&rest, (size_t)most * row),
                                  take(&rest, queries * padded), take(&rest, queries), take(&rest, queries)};
    long next = index / at->parts + at->threads;
    int follows = at->parts == 1 && next < (long)at->images * at->heads;
    const float *tokens = head_at(at->qkv, at->image, at->heads, width, index / at->parts);
    const float *ahead = follows ? head_at(at->qkv, at->image, at->heads, width, next) : NULL;
    for (long key = 0; key < at->tokens; key += keys) {
        int some = at_most_of(at->tokens - key, keys);
        const float *from = tokens + key * at->row + channels;
        gather_panels(room.keys, from, at->row, some, width);
        gather(room.values, padded, from + channels, at->row, some, width, 1);
        struct attention_room here = room;
        for (long query = 0; query < queries; query += most) {
            int count = at_most_of(queries - query, most);
            if (ahead && !key) ask_ahead(ahead + query * at->row, at->row, count, width, 3, channels);
            attend(at, &here, tokens + (first + query) * at->row, count, some, !key, row);
            if (key + some == at->tokens) write_attended(at, &here, image, head, first + query, count);
            here.sums += (ptrdiff_t)count * padded, here.peak += count, here.total += count;
        }
    }
    free(all_room);
    return 0;
}

static int run_attention(struct attention *at) {
    long heads = (long)at->images * at->heads, least = (at->tokens + MOST_QUERIES - 1) / MOST_QUERIES;
    at->parts = least;
    while (heads * at->parts < 4 * at->threads && at->parts * 2 * QUERIES < at->tokens) at->parts++;
    return share(attention_task, at, heads * at->parts, at->threads);
}

/* The way back: with weights P and D the sums of gradient times output of each query, the gradients are P^T gradient for
values, S = P (gradient values^T - D) times keys for queries, and S^T queries for keys, the last two times the scale. */
struct back_room {
    float *key_panels, *value_panels, *keys, *query, *gradient, *weights, *slopes, *to_key, *to_value, *to_query, *fall;
};

/* Scores become weights, what weights would change becomes what scores would. */
INLINE void sloping(float *weights, float *slopes, int count, float log_total, float fall) {
    for (int k = 0; k < count; k += LANES) {
        vec weight = power_of_two(load(weights + k) - log_total);
        store(weights + k, weight);
        store(slopes + k, weight * (load(slopes + k) - fall));
    }
}

/* Some queries of a head meet some keys. */
static void attend_back(const struct attention_gradient *at, const struct back_room *room, const float *query,
                        const float *gradient, const float *logs, int queries, int keys, int row, int first_queries,
                        int first_keys) {
    int width = at->width, padded = padded_to(width, PANEL);
    gather(room->query, padded, query, at->row, queries, width, at->scale * LOG2_E);
    gather(room->gradient, padded, gradient, at->gradient_row, queries, width, 1);
    scores_of(room->weights, row, room->query, padded, room->key_panels, queries, keys, width);
    scores_of(room->slopes, row, room->gradient, padded, room->value_panels, queries, keys, width);
    for (int i = 0; i < queries; i++) sloping(room->weights + i * row, room->slopes + i * row, keys, logs[i], room->fall[i]);
    multiply(room->to_value, padded, room->weights, 1, row, room->gradient, padded, keys, padded, queries, !first_queries);
    multiply(room->to_key, padded, room->slopes, 1, row, room->query, padded, keys, padded, queries, !first_queries);
    multiply(room->to_query, padded, room->slopes, row, 1, room->keys, padded, queries, padded, keys, !first_keys);
}

static void falls_of(const struct attention_gradient *at, float *fall, const float *out, const float *gradient) {
    int channels = at->heads * at->width;
    for (long i = 0; i < at->tokens; i++, out += channels, gradient += at->gradient_row) {
        vec total = {0};
        if (i + TOKENS_AHEAD < at->tokens) {
            ask_for(out + TOKENS_AHEAD * channels, at->width);
            ask_for(gradient + TOKENS_AHEAD * at->gradient_row, at->width);
        }
        for (int c = 0; c < at->width; c += LANES)
            total += load_some(out + c, at->width - c) * load_some(gradient + c, at->width - c);
        fall[i] = sum(total);
    }
}

static int attention_back_task(void *about, long index) {
    const struct attention_gradient *at = about;
    int width = at->width, padded = padded_to(width, PANEL), channels = at->heads * width, head = index % at->heads;
    long image = index / at->heads;
    int most = piece_of(at->tokens, QUERIES, TALL), keys = piece_of(at->tokens, KEYS, PANEL), row = scores_row(keys);
    float *all_room = claim((size_t)keys * (2 * width + 3 * padded) + (size_t)2 * most * (padded + row) +
                            (size_t)(at->tokens + PANEL) * (padded + 1));
    if (!all_room) return 1;
    float *rest = all_room;
    struct back_room room = {take(&rest, (size_t)keys * width), take(&rest, (size_t)keys * width),
                             take(&rest, (size_t)keys * padded), take(&rest, (size_t)most * padded),
                             take(&rest, (size_t)most * padded), take(&rest, (size_t)most * row),
                             take(&rest, (size_t)most * row), take(&rest, (size_t)keys * padded),
                             take(&rest, (size_t)keys * padded), take(&rest, at->tokens * padded), take(&rest, at->tokens)};
    long next = index + at->threads < (long)at->images * at->heads ? index + at->threads : index;
    const float *tokens = head_at(at->qkv, at->image, at->heads, width, index), *logs = at->logs + index * at->tokens;
    const float *gradient = head_at(at->gradient, at->gradient_image, at->heads, width, index);
    const float *ahead = head_at(at->qkv, at->image, at->heads, width, next);
    const float *gradient_ahead = head_at(at->gradient, at->gradient_image, at->heads, width, next);
    float *to = at->to_qkv + image * at->tokens * 3 * channels + head * width;
    falls_of(at, room.fall, head_at(at->out, at->tokens * channels, at->heads, width, index), gradient);
    for (long key = 0; key < at->tokens; key += keys) {
        int some = at_most_of(at->tokens - key, keys);
        const float *from = tokens + key * at->row + channels;
        gather_panels(room.key_panels, from, at->row, some, width);
        gather_panels(room.value_panels, from + channels, at->row, some, width);
        gather(room.keys, padded, from, at->row, some, width, 1);
        struct back_room here = room;
        for (long query = 0; query < at->tokens; query += most) {
            int count = at_most_of(at->tokens - query, most);
            if (next > index && !key) {
                ask_ahead(ahead + query * at->row, at->row, count, width, 3, channels);
                ask_ahead(gradient_ahead + query * at->gradient_row, at->gradient_row, count, width, 1, 0);
            }
            attend_back(at, &here, tokens + query * at->row, gradient + query * at->gradient_row, logs + query, count, some, row,
                        !query, !key);
            here.to_query += (ptrdiff_t)count * padded, here.fall += count;
        }
        scatter(to + key * 3 * channels + channels, 3 * channels, room.to_key, padded, some, width, LN_2);
        scatter(to + key * 3 * channels + 2 * channels, 3 * channels, room.to_value, padded, some, width, 1);
    }
    scatter(to, 3 * channels, room.to_query, padded, at->tokens, width, at->scale);
    free(all_room);
    return 0;
}

static int run_attention_gradient(struct attention_gradient *at) {
    return share(attention_back_task, at, (long)at->images * at->heads, at->threads);
}

/* The mLSTM cell (Vision-LSTM, Eqs. 1-12), chunk by chunk, one head of one image a task, from what the convolution leaves
to what the last linear layer takes: projections, gates, memory, norm, skip and output gate in one walk.

Exponents are sums over many steps and taken in double precision; only what is left of them becomes a float. */

struct mlstm_room {
    float *query, *value;                /* chunk x width */
    float *turned, *written;             /* keys times their weights, width x chunk, and their sum */
    float *scores, *output;              /* chunk x chunk, chunk x width */
    float *memory, *normaliser;          /* width x width, width */
    double *gain, *decay, *peak;         /* chunk: log input - decay; sum of log forget; largest gain so far */
    float *weights;                      /* chunk */
    float *gates[2], *carried, *least;   /* chunk: pre-activations; the state's share; the smallest divisor */
    float *shares, *lacks;               /* chunk: what readings are multiplied with; what scores lack of their weights */
};

#define NARROW 40.0 /* how much the largest gain may grow within a chunk for its decay to be split in two factors */

INLINE vec turn(vec x, int by) { /* channels of a block of 4, turned by so many places */
    ivec order;
    for (int i = 0; i < LANES; i++) order[i] = i / 4 * 4 + (i + by) % 4;
    return __builtin_shuffle(x, order);
}

/* Blocks of 4 x 4 weights for LANES channels, and their bias. */
struct blocks {
    vec weight[4], bias;
};

INLINE struct blocks blocks_at(const float *weights, const float *biases, ptrdiff_t channels, int part, ptrdiff_t place) {
    struct blocks at = {.bias = biases ? load(biases + part * channels + place) : (vec){0}};
    for (int by = 0; by < 4; by++) at.weight[by] = load(weights + (4 * part + by) * channels + place);
    return at;
}

/* What LANES channels of a token give, of which all turns are given. */
INLINE vec project(const struct blocks *at, const vec *turns) {
    vec result = at->bias;
#pragma GCC unroll 4
    for (int by = 0; by < 4; by++) result += at->weight[by] * turns[by];
    return result;
}

INLINE void turns_of(vec x, vec *turns) {
#pragma GCC unroll 4
    for (int by = 0; by < 4; by++) turns[by] = turn(x, by);
}

INLINE float dot(const float *one, const float *other, int width) {
    vec total[2] = {{0}, {0}};
    int c = 0;
    for (; c + 2 * LANES <= width; c += 2 * LANES) {
        total[0] += load(one + c) * load(other + c);
        total[1] += load(one + c + LANES) * load(other + c + LANES);
    }
    if (c < width) total[0] += load(one + c) * load(other + c);
    return sum(total[0] + total[1]);
}

/* Both gates of a head for some tokens: what they share is read once. */
INLINE void mlstm_gates(int tokens, const struct mlstm *at, ptrdiff_t step, int head) {
    ptrdiff_t channels = (ptrdiff_t)at->heads * at->width, all_steps = (ptrdiff_t)at->images * at->steps;
    const float *weights = at->gate_weights + head * 4 * channels;
    vec sums[4][2];
    for (int i = 0; i < tokens; i++) sums[i][0] = sums[i][1] = (vec){0};
    for (int of_values = 0; of_values < 2; of_values++) {
        const float *x = of_values ? at->values + step * at->values_row : at->source + step * at->source_row;
        ptrdiff_t row = of_values ? at->values_row : at->source_row;
        for (ptrdiff_t c = 0; c < channels; c += LANES) {
            vec input = load(weights + of_values * channels + c), forget = load(weights + (2 + of_values) * channels + c);
            for (int i = 0; i < tokens; i++) {
                vec from = load(x + i * row + c);
                sums[i][0] += from * input, sums[i][1] += from * forget;
            }
        }
    }
    for (int i = 0; i < tokens; i++)
        for (int g = 0; g < 2; g++)
            at->gates[(head * 2 + g) * all_steps + step + i] = sum(sums[i][g]) + at->gate_biases[head * 2 + g];
}

#define GATE_STEPS 32

/* The gates of all heads for some tokens: every head wants all channels, which are in the cache here. */
static int mlstm_gates_task(void *about, long index) {
    const struct mlstm *at = about;
    long all_steps = (long)at->images * at->steps, step = index * GATE_STEPS;
    long end = step + GATE_STEPS < all_steps ? step + GATE_STEPS : all_steps;
    for (; step < end; step += 4)
        for (int head = 0; head < at->heads; head++) {
            if (step + 4 <= end) mlstm_gates(4, at, step, head);
            else
                for (long one = step; one < end; one++) mlstm_gates(1, at, one, head);
        }
    return 0;
}

/* e^x, nothing where a sum would not notice it; what is not a number stays so. */
static float left_of(double x) { return x <= -60 ? 0 : (float)__builtin_exp(x > 80 ? 80 : x); }

/* Sums of log forget gates and the largest gain so far, of a chunk. */
static void mlstm_sums(const struct mlstm *at, const struct mlstm_room *room, long image, int head, int first, int count) {
    ptrdiff_t all_steps = (ptrdiff_t)at->images * at->steps, step = (ptrdiff_t)image * at->steps + first;
    for (int g = 0; g < 2; g++)
        memcpy(room->gates[g], at->gates + (head * 2 + g) * all_steps + step, count * sizeof(float));
    for (int t = 0; t < count; t += LANES) store(room->gates[1] + t, log_sigmoid(load(room->gates[1] + t)));
    double decay = 0, peak = -1e300;
    for (int t = 0; t < count; t++) {
        decay += room->gates[1][t];
        double gain = room->gates[0][t] - decay;
        if (!(gain <= peak)) peak = gain; /* what is not a number spreads */
        room->decay[t] = decay, room->gain[t] = gain, room->peak[t] = peak;
    }
}

/* Queries, values and turned keys of up to LANES steps; keys times their weights. */
INLINE void mlstm_some(const struct mlstm *at, const struct mlstm_room *room, ptrdiff_t step, int head, int first, int tokens,
                       int stride) {
    ptrdiff_t channels = (ptrdiff_t)at->heads * at->width, place = (ptrdiff_t)head * at->width, width = at->width;
    const float *source = at->source + step * at->source_row + place, *values = at->values + step * at->values_row + place;
    for (ptrdiff_t c = 0; c < width; c += LANES) {
        vec keys[LANES], turns[4], total = load(room->written + c);
        struct blocks to_query = blocks_at(at->projections, at->biases, channels, 0, place + c);
        struct blocks to_key = blocks_at(at->projections, at->biases, channels, 1, place + c);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) {
            keys[t] = (vec){0};
            if (t >= tokens) continue;
            turns_of(load(source + t * at->source_row + c), turns);
            store(room->query + (first + t) * width + c, project(&to_query, turns));
            keys[t] = project(&to_key, turns) * room->weights[first + t];
            total += keys[t];
        }
        store(room->written + c, total);
        exchange(keys);
        for (int i = 0; i < LANES; i++) store(room->turned + (c + i) * stride + first, keys[i]);
        struct blocks to_value = blocks_at(at->projections, at->biases, channels, 2, place + c);
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) {
            if (t >= tokens) continue;
            turns_of(load(values + t * at->values_row + c), turns);
            store(room->value + (first + t) * width + c, project(&to_value, turns));
        }
    }
}

/* Queries, keys and values of a chunk. */
static void mlstm_inputs(const struct mlstm *at, const struct mlstm_room *room, long image, int head, int first, int count,
                         int stride) {
    ptrdiff_t place = (ptrdiff_t)head * at->width;
    memset(room->written, 0, at->width * sizeof(float));
    for (int t = 0; t < count; t += LANES) {
        ptrdiff_t step = (ptrdiff_t)image * at->steps + first + t;
        for (int ahead = LANES; ahead < 2 * LANES && first + t + ahead < at->steps; ahead++) {
            ask_for(at->source + (step + ahead) * at->source_row + place, at->width);
            ask_for(at->values + (step + ahead) * at->values_row + place, at->width);
        }
        int tokens = count - t < LANES ? count - t : LANES;
        for (int i = 0; i < tokens; i++) ask_for(at->gate + (step + i) * at->gate_row + place, at->width);
        if (tokens == LANES) mlstm_some(at, room, step, head, t, LANES, stride);
        else mlstm_some(at, room, step, head, t, tokens, stride);
    }
}

/* exp(x), nothing where that is less than a sum would notice; in place. */
INLINE void decays(float *x, int count) {
    for (int j = 0; j < count; j += LANES) {
        vec exponent = load(x + j);
        store(x + j, choose(exponent < -60.0f, (vec){0}, exponential(at_most(exponent, 80.0f))));
    }
}

/* exp(gain_j - peak) for the steps up to t, zeros up to a multiple of LANES. */
INLINE void mlstm_weights(const struct mlstm_room *room, double peak, int count, int padded) {
    for (int j = 0; j < count; j++) room->weights[j] = (float)(room->gain[j] - peak);
    for (int j = count; j < padded; j++) room->weights[j] = -1000.0f;
    decays(room->weights, padded);
}

/* The stabiliser of every step, which is at least the state's, and the divisor that it gives. */
INLINE void mlstm_levels(const struct mlstm_room *room, int count, double level, int begun) {
    int padded = padded_to(count, LANES);
    for (int t = 0; t < count; t++) {
        if (begun && level > room->peak[t]) room->peak[t] = level;
        room->least[t] = (float)-(room->decay[t] + room->peak[t]);
    }
    for (int t = count; t < padded; t++) room->least[t] = 0;
    for (int t = 0; t < padded; t += LANES) store(room->least + t, exponential(at_most(load(room->least + t), 80.0f)));
}

/* The weighted scores of a row, 0 for later steps, and their sum. Without weights the keys have theirs already. */
INLINE float mlstm_row(float *scores, const float *weights, int own, int seen) {
    vec total = {0};
    for (int j = 0; j < seen; j += LANES) {
        vec score = load(scores + j);
        if (weights) score *= load(weights + j);
        score = first_of(score, own - j); /* own: steps up to the row's */
        store(scores + j, score);
        total += score;
    }
    return sum(total);
}

/* Some rows of 16 channels: what they read from the state, of which `carried` is left, and from their chunk, divided. */
INLINE void mlstm_read(int rows, float *out, const float *query, const float *memory, ptrdiff_t width, const float *carried,
                       const float *scores, ptrdiff_t stride, const float *value, int seen, const float *shares) {
    vec sums[TALL * PARTS];
    for (int i = 0; i < rows * PARTS; i++) sums[i] = (vec){0};
    if (carried) {
        accumulate(rows, PARTS, sums, query, width, 1, memory, width, width);
        for (int i = 0; i < rows * PARTS; i++) sums[i] *= carried[i / PARTS];
    }
    accumulate(rows, PARTS, sums, scores, stride, 1, value, width, seen);
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < PARTS; p++) store(out + i * width + p * LANES, sums[i * PARTS + p] * shares[i]);
}

#define READ(rows) \
    case rows: \
        mlstm_read(rows, out, query, memory, width, carried, scores, stride, value, seen, shares); \
        break;

static __attribute__((noinline)) void mlstm_read_some(int rows, float *out, const float *query, const float *memory,
                                                      ptrdiff_t width, const float *carried, const float *scores,
                                                      ptrdiff_t stride, const float *value, int seen, const float *shares) {
    switch (rows) {
        READ(1) READ(2) READ(3) READ(4) READ(5) READ(6)
#if TALL > 6
        READ(7) READ(8) READ(9) READ(10) READ(11) READ(12)
#endif
    }
}

/* What a step gives: its reading, normed over the head, with the skip and behind the output gate. */
INLINE void mlstm_finish(const struct mlstm *at, const float *reading, ptrdiff_t step, int head) {
    int width = at->width;
    ptrdiff_t place = (ptrdiff_t)head * width;
    float mean = norm_sum(reading, width, 0, 1) / width;
    float over = over_root(norm_sum(reading, width, mean, 2) / width, at->norm_eps);
    const float *source = at->source + step * at->source_row + place, *gate = at->gate + step * at->gate_row + place;
    float *out = at->out + step * at->out_row + place;
    for (int c = 0; c < width; c += LANES) {
        vec x = (load(reading + c) - mean) * over * load(at->norm + place + c);
        if (at->norm_bias) x += load(at->norm_bias + place + c);
        x += load(source + c) * load(at->skip + place + c);
        vec z = load(gate + c);
        store(out + c, at->gated ? x * z : x * z * sigmoid(z));
    }
}

/* Keys without weights, and their sum, get them: exp(gain - peak). */
static void mlstm_weigh(const struct mlstm_room *room, int width, int count, int stride, double peak) {
    int padded = padded_to(count, LANES);
    mlstm_weights(room, peak, count, padded);
    for (int c = 0; c < width; c++) {
        vec total = {0};
        for (int t = 0; t < padded; t += LANES) {
            float *keys = room->turned + (ptrdiff_t)c * stride + t;
            vec weighted = load(keys) * load(room->weights + t);
            store(keys, weighted);
            total += weighted;
        }
        room->written[c] = sum(total);
    }
}

/* What a head has seen: its exponents so far are at most `level`, and the memory is in units of exp(unit). */
struct mlstm_past {
    double level, unit;
    int begun;
};

static void mlstm_chunk(const struct mlstm *at, const struct mlstm_room *room, long image, int head, int first, int count,
                        struct mlstm_past *past, int goes_on) {
    int width = at->width, stride = padded_to(at->chunk, PANEL), begun = past->begun;
    int padded = padded_to(count, LANES);
    float scale = 1.0f / __builtin_sqrtf((float)width);
    mlstm_sums(at, room, image, head, first, count);
    mlstm_levels(room, count, past->level, begun);
    double last = room->peak[count - 1], middle = (room->peak[0] + last) / 2;
    int narrow = last - room->peak[0] < NARROW; /* exp(gain - peak) = exp(gain - middle) exp(middle - peak) */
    double unit = narrow ? middle : last;
    float kept = begun ? left_of(past->unit - unit) : 0;
    mlstm_weights(room, unit, count, padded);
    for (int t = 0; t < padded; t += LANES) store(room->weights + t, scale * (narrow ? load(room->weights + t) : all(1)));
    mlstm_inputs(at, room, image, head, first, count, stride);
    for (int t = 0; t < count; t++) room->lacks[t] = narrow ? (float)(middle - room->peak[t]) : 0;
    for (int t = 0; t < padded; t += LANES) store(room->lacks + t, exponential(load(room->lacks + t)));
    for (int row = 0; row < count; row += TALL) {
        int rows = count - row < TALL ? count - row : TALL;
        int seen = padded_to(row + rows, PANEL); /* steps up to the last of these rows */
        float *scores = room->scores + (ptrdiff_t)row * stride, *query = room->query + (ptrdiff_t)row * width;
        multiply(scores, stride, query, width, 1, room->turned, stride, rows, seen, width, 0);
        for (int t = row; t < row + rows; t++) {
            if (!narrow) mlstm_weights(room, room->peak[t], t + 1, seen);
            float *own = room->scores + (ptrdiff_t)t * stride, lacks = room->lacks[t], least = room->least[t];
            float size = mlstm_row(own, narrow ? NULL : room->weights, t + 1, seen);
            if (begun) { /* the state's share, as large as the scores' */
                room->carried[t] = narrow ? kept : left_of(past->unit - room->peak[t]);
                size += room->carried[t] * dot(room->query + (ptrdiff_t)t * width, room->normaliser, width);
            }
            size = (size < 0 ? -size : size) * lacks;
            room->shares[t] = lacks / ((size > least || size != size ? size : least) + at->eps);
        }
    }
    for (int column = 0; column < width; column += PANEL)
        for (int row = 0; row < count; row += TALL) {
            int rows = count - row < TALL ? count - row : TALL;
            mlstm_read_some(rows, room->output + (ptrdiff_t)row * width + column, room->query + (ptrdiff_t)row * width,
                            room->memory + column, width, begun ? room->carried + row : NULL,
                            room->scores + (ptrdiff_t)row * stride, stride, room->value + column, row + rows, room->shares + row);
        }
    for (int t = 0; t < count; t++)
        mlstm_finish(at, room->output + (ptrdiff_t)t * width, (ptrdiff_t)image * at->steps + first + t, head);
    if (!goes_on) return;
    if (!narrow) mlstm_weigh(room, width, count, stride, last);
    for (int c = 0; c < width; c += LANES)
        store(room->normaliser + c, load(room->normaliser + c) * kept + load(room->written + c));
    multiply(room->memory, width, room->turned, stride, 1, room->value, width, width, width, count, kept);
    double decay = room->decay[count - 1];
    *past = (struct mlstm_past){.level = decay + last, .unit = decay + unit, .begun = 1};
}

static int mlstm_task(void *about, long index) {
    const struct mlstm *at = about;
    int head = index % at->heads, width = at->width, chunk = at->chunk;
    size_t stride = padded_to(chunk, PANEL), rows = (size_t)chunk * width;
    size_t floats = (6 + 7 + chunk) * stride + 3 * rows + (stride + width + 2) * width;
    float *all_room = claim(floats);
    if (!all_room) return 1;
    memset(all_room, 0, floats * sizeof(float));
    struct mlstm_room room = {.gain = (double *)all_room};
    room.decay = room.gain + stride, room.peak = room.decay + stride;
    float *next = all_room + 6 * stride, **of_chunk[] = {&room.weights, &room.gates[0], &room.gates[1], &room.carried,
                                                         &room.least, &room.shares, &room.lacks};
    for (int i = 0; i < 7; i++, next += stride) *of_chunk[i] = next;
    float **of_rows[] = {&room.query, &room.value, &room.output};
    for (int i = 0; i < 3; i++, next += rows) *of_rows[i] = next;
    room.turned = next, room.scores = room.turned + stride * width, room.memory = room.scores + chunk * stride;
    room.normaliser = room.memory + (size_t)width * width, room.written = room.normaliser + width;
    struct mlstm_past past = {0};
    for (int first = 0; first < at->steps; first += chunk) {
        int count = at->steps - first < chunk ? at->steps - first : chunk;
        mlstm_chunk(at, &room, index / at->heads, head, first, count, &past, first + count < at->steps);
    }
    free(all_room);
    return 0;
}

static int run_mlstm(struct mlstm *at) {
    long steps = (long)at->images * at->steps;
    at->gates = claim((size_t)2 * at->heads * steps);
    if (!at->gates) return 1;
    int failed = share(mlstm_gates_task, at, (steps + GATE_STEPS - 1) / GATE_STEPS, at->threads);
    failed = failed || share(mlstm_task, at, (long)at->images * at->heads, at->threads);
    free(at->gates);
    return failed;
}

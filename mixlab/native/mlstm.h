/* The mLSTM cell (Vision-LSTM, Eqs. 1-12), chunk by chunk, one head of one image a task, from what the convolution leaves
to what the last linear layer takes: projections, gates, memory, norm, skip and output gate in one walk.

Exponents are sums over many steps and taken in double precision; only what is left of them becomes a float. */

struct mlstm_room {
    float *query, *key, *turned, *value; /* chunk x width; turned: width x chunk */
    float *scores, *output;              /* chunk x chunk, chunk x width */
    float *memory, *normaliser;          /* width x width, width */
    double *gain, *decay, *peak;         /* chunk: log input - decay; sum of log forget; largest gain so far */
    float *weights;                      /* chunk */
    float *gates[2], *carried, *least;   /* chunk: pre-activations; the state's share; the smallest divisor */
};

#define NARROW 40.0 /* how much the largest gain may grow within a chunk for its decay to be split in two factors */

INLINE vec turn(vec x, int by) { /* channels of a block of 4, turned by so many places */
    ivec order;
    for (int i = 0; i < LANES; i++) order[i] = i / 4 * 4 + (i + by) % 4;
    return __builtin_shuffle(x, order);
}

/* out = blocks of 4 x 4 weights times x, for one token and `width` channels. */
INLINE void project(float *out, const float *x, const float *weights, ptrdiff_t channels, const float *bias, int width,
                    float scale) {
    for (int c = 0; c < width; c += LANES) {
        vec from = load(x + c), result = bias ? load(bias + c) : (vec){0};
#pragma GCC unroll 4
        for (int by = 0; by < 4; by++) result += load(weights + by * channels + c) * turn(from, by);
        store(out + c, result * scale);
    }
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

static float bounded_exp(double x) { return (float)__builtin_exp(x > 80 ? 80 : x); }

/* Numbers that are wanted soon are asked for: a head's share of a row is too short for the processor to see it coming. */
INLINE void ask_for(const float *from, ptrdiff_t count) {
    for (ptrdiff_t c = 0; c < count; c += 16) __builtin_prefetch(from + c);
}

#define AHEAD 4 /* tokens */

/* Queries, keys, values and gates of a chunk. */
static void mlstm_inputs(const struct mlstm *at, const struct mlstm_room *room, long image, int head, int first, int count) {
    ptrdiff_t channels = (ptrdiff_t)at->heads * at->width, place = (ptrdiff_t)head * at->width;
    float scale = 1.0f / __builtin_sqrtf((float)at->width);
    for (int t = 0; t < count; t++) {
        ptrdiff_t step = (ptrdiff_t)image * at->steps + first + t;
        const float *source = at->source + step * at->source_row, *values = at->values + step * at->values_row;
        if (first + t + AHEAD < at->steps) {
            ask_for(source + AHEAD * at->source_row + place, at->width);
            ask_for(values + AHEAD * at->values_row + place, at->width);
        }
        ask_for(at->gate + step * at->gate_row + place, at->width);
        for (int part = 0; part < 3; part++) {
            float *to = part == 0 ? room->query : part == 1 ? room->key : room->value;
            project(to + t * at->width, (part < 2 ? source : values) + place,
                    at->projections + part * 4 * channels + place, channels,
                    at->biases ? at->biases + part * channels + place : NULL, at->width, part == 1 ? scale : 1.0f);
        }
    }
    ptrdiff_t step = (ptrdiff_t)image * at->steps + first;
    int t;
    for (int g = 0; g < 2; g++)
        memcpy(room->gates[g], at->gates + (head * 2 + g) * (ptrdiff_t)at->images * at->steps + step, count * sizeof(float));
    for (t = 0; t < count; t += LANES) store(room->gates[1] + t, log_sigmoid(load(room->gates[1] + t)));
    double decay = 0, peak = -1e300;
    for (t = 0; t < count; t++) {
        decay += room->gates[1][t];
        double gain = room->gates[0][t] - decay;
        if (!(gain <= peak)) peak = gain; /* what is not a number spreads */
        room->decay[t] = decay, room->gain[t] = gain, room->peak[t] = peak;
    }
}

/* Room for rows of a multiple of 16 steps: those behind the last count nothing. */
static void mlstm_turn_keys(const struct mlstm *at, const struct mlstm_room *room, int count, int stride) {
    int padded = (count + PANEL - 1) / PANEL * PANEL;
    memset(room->key + (ptrdiff_t)count * at->width, 0, (size_t)(padded - count) * at->width * sizeof(float));
    for (int t = 0; t < padded; t += LANES)
        for (int c = 0; c < at->width; c += LANES) {
            vec rows[LANES];
            for (int i = 0; i < LANES; i++) rows[i] = load(room->key + (ptrdiff_t)(t + i) * at->width + c);
            exchange(rows);
            for (int i = 0; i < LANES; i++) store(room->turned + (ptrdiff_t)(c + i) * stride + t, rows[i]);
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

/* For every step: what is left of the state, and the divisor that it has at least. The state's level may be the peak. */
INLINE void mlstm_levels(const struct mlstm_room *room, int count, double level, int begun) {
    int padded = (count + LANES - 1) / LANES * LANES;
    for (int t = 0; t < count; t++) {
        if (begun && level > room->peak[t]) room->peak[t] = level;
        room->carried[t] = begun ? (float)(level - room->peak[t]) : -1000.0f;
        room->least[t] = (float)-(room->decay[t] + room->peak[t]);
    }
    for (int t = count; t < padded; t++) room->carried[t] = room->least[t] = 0;
    decays(room->carried, padded);
    for (int t = 0; t < padded; t += LANES) store(room->least + t, exponential(at_most(load(room->least + t), 80.0f)));
}

/* The weighted scores of a row, 0 for later steps, and their sum. Without weights the keys have theirs already. */
INLINE float mlstm_row(float *scores, const float *weights, int own, int seen) {
    vec total = {0};
    for (int j = 0; j < seen; j += LANES) {
        vec score = load(scores + j);
        if (weights) score *= load(weights + j);
        if (j + LANES > own) { /* own: steps up to the row's */
            ivec place;
            for (int lane = 0; lane < LANES; lane++) place[lane] = lane;
            score = choose(place < own - j, score, (vec){0});
        }
        store(scores + j, score);
        total += score;
    }
    return sum(total);
}

/* What a step gives: its reading, divided, normed over the head, with the skip and behind the output gate. */
INLINE void mlstm_finish(const struct mlstm *at, float *reading, float share_of_it, ptrdiff_t step, int head) {
    int width = at->width;
    ptrdiff_t place = (ptrdiff_t)head * width;
    for (int c = 0; c < width; c += LANES) store(reading + c, load(reading + c) * share_of_it);
    float mean = norm_sum(reading, width, 0, 1) / width;
    float over = 1.0f / __builtin_sqrtf(norm_sum(reading, width, mean, 2) / width + at->norm_eps);
    const float *source = at->source + step * at->source_row + place, *gate = at->gate + step * at->gate_row + place;
    float *out = at->out + step * at->out_row + place;
    for (int c = 0; c < width; c += LANES) {
        vec x = (load(reading + c) - mean) * over * load(at->norm + place + c);
        if (at->norm_bias) x += load(at->norm_bias + place + c);
        x += load(source + c) * load(at->skip + place + c);
        vec z = load(gate + c);
        store(out + c, x * z * sigmoid(z));
    }
}

static void mlstm_chunk(const struct mlstm *at, const struct mlstm_room *room, long image, int head, int first, int count,
                        double *level, int begun, int goes_on) {
    int width = at->width, stride = (at->chunk + PANEL - 1) / PANEL * PANEL;
    mlstm_inputs(at, room, image, head, first, count);
    mlstm_turn_keys(at, room, count, stride);
    mlstm_levels(room, count, *level, begun);
    double middle = (room->peak[0] + room->peak[count - 1]) / 2;
    int narrow = room->peak[count - 1] - room->peak[0] < NARROW; /* exp(gain - peak) = exp(gain - middle) exp(middle - peak) */
    if (narrow) {
        int padded = (count + PANEL - 1) / PANEL * PANEL;
        mlstm_weights(room, middle, count, padded);
        for (int c = 0; c < width; c++)
            for (int t = 0; t < padded; t += LANES) {
                float *keys = room->turned + (ptrdiff_t)c * stride + t;
                store(keys, load(keys) * load(room->weights + t));
            }
        for (int t = 0; t < padded; t++) room->gates[0][t] = t < count ? (float)(middle - room->peak[t]) : 0;
        for (int t = 0; t < padded; t += LANES) store(room->gates[0] + t, exponential(load(room->gates[0] + t)));
    }
    for (int row = 0; row < count; row += 4 * TALL) {
        int rows = count - row < 4 * TALL ? count - row : 4 * TALL;
        int seen = (row + rows + PANEL - 1) / PANEL * PANEL; /* steps up to the last of these rows */
        float *scores = room->scores + (ptrdiff_t)row * stride, *query = room->query + (ptrdiff_t)row * width;
        float shares[4 * TALL];
        multiply(scores, stride, query, width, 1, room->turned, stride, rows, seen, width, 0);
        for (int t = 0; t < rows; t++) {
            int own = row + t + 1;
            float lacks = narrow ? room->gates[0][row + t] : 1.0f, carried = room->carried[row + t] / lacks;
            if (!narrow) mlstm_weights(room, room->peak[row + t], own, seen);
            float size = mlstm_row(scores + t * stride, narrow ? NULL : room->weights, own, seen);
            if (begun) { /* the state's share, as large as the scores' */
                size += carried * dot(query + t * width, room->normaliser, width);
                for (int c = 0; c < width; c += LANES) store(query + t * width + c, load(query + t * width + c) * carried);
            }
            float least = room->least[row + t];
            size = (size < 0 ? -size : size) * lacks;
            shares[t] = lacks / ((size > least || size != size ? size : least) + at->eps);
        }
        float *output = room->output + (ptrdiff_t)row * width;
        multiply(output, width, scores, stride, 1, room->value, width, rows, width, row + rows, 0);
        if (begun) multiply(output, width, query, width, 1, room->memory, width, rows, width, width, 1);
        for (int t = 0; t < rows; t++)
            mlstm_finish(at, output + t * width, shares[t], (ptrdiff_t)image * at->steps + first + row + t, head);
    }
    if (!goes_on) return;
    double peak = room->peak[count - 1], decay = room->decay[count - 1];
    int padded = (count + LANES - 1) / LANES * LANES;
    mlstm_weights(room, peak, count, padded);
    float kept = begun && *level - peak > -60 ? bounded_exp(*level - peak) : 0;
    for (ptrdiff_t c = 0; c < (ptrdiff_t)width * width; c += LANES) store(room->memory + c, load(room->memory + c) * kept);
    for (int c = 0; c < width; c += LANES) store(room->normaliser + c, load(room->normaliser + c) * kept);
    for (int t = 0; t < count; t++)
        for (int c = 0; c < width; c += LANES) {
            vec key = load(room->key + (ptrdiff_t)t * width + c) * room->weights[t];
            store(room->key + (ptrdiff_t)t * width + c, key);
            store(room->normaliser + c, load(room->normaliser + c) + key);
        }
    multiply(room->memory, width, room->key, 1, width, room->value, width, width, width, count, 1);
    *level = decay + peak;
}

static int mlstm_task(void *about, long index) {
    const struct mlstm *at = about;
    int head = index % at->heads, width = at->width, chunk = at->chunk;
    size_t stride = (chunk + PANEL - 1) / PANEL * PANEL, rows = (size_t)chunk * width;
    size_t floats = 6 * stride + 5 * stride * width + chunk * stride + (size_t)width * width + width + 5 * stride;
    float *all_room = claim(floats);
    if (!all_room) return 1;
    memset(all_room, 0, floats * sizeof(float));
    struct mlstm_room room = {.gain = (double *)all_room};
    room.decay = room.gain + stride, room.peak = room.decay + stride;
    room.query = all_room + 6 * stride;
    room.key = room.query + rows, room.value = room.key + stride * width, room.output = room.value + rows;
    room.turned = room.output + rows, room.scores = room.turned + stride * width;
    room.memory = room.scores + chunk * stride, room.normaliser = room.memory + (size_t)width * width;
    room.weights = room.normaliser + width, room.gates[0] = room.weights + stride, room.gates[1] = room.gates[0] + stride;
    room.carried = room.gates[1] + stride, room.least = room.carried + stride;
    double level = 0;
    for (int first = 0; first < at->steps; first += chunk) {
        int count = at->steps - first < chunk ? at->steps - first : chunk;
        mlstm_chunk(at, &room, index / at->heads, head, first, count, &level, first > 0, first + count < at->steps);
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

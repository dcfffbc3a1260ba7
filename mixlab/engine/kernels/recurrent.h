/* LSTM over the columns and rows of maps. The share of the inputs is there; steps add that of the last output.

Units are taken in blocks of 16 with all four gates, so that a step goes from sums to outputs in registers. */
#define BLOCK 16
#define MANY 24 /* sequences of a task */
#if LANES == 16
#define HIGH 6
#else
#define HIGH 3
#endif

struct lstm_step {
    const float *inputs[HIGH]; /* of every sequence, at this block; the gates lie `units` apart */
    float *out[HIGH];
    const float *weights, *bias;
    const float *before; /* outputs of the last step, rows of `row` */
    float *after, *memory;
    ptrdiff_t row;
    int units, valid; /* valid: units of this block that are none of the padding */
};

INLINE void lstm_tile(int sequences, const struct lstm_step *at) {
    for (int part = 0; part < BLOCK; part += LANES) {
        vec gates[HIGH][4];
        for (int s = 0; s < sequences; s++)
            for (int g = 0; g < 4; g++)
                gates[s][g] = load_some(at->inputs[s] + g * at->units + part, at->valid - part) +
                              load_some(at->bias + g * at->units + part, at->valid - part);
        for (int k = 0; k < at->units; k++) {
            const float *weights = at->weights + k * 4 * BLOCK + part;
            vec state[HIGH];
            for (int s = 0; s < sequences; s++) state[s] = all(at->before[s * at->row + k]);
            for (int g = 0; g < 4; g++) {
                vec weight = load(weights + g * BLOCK);
                for (int s = 0; s < sequences; s++) gates[s][g] += state[s] * weight;
            }
        }
        for (int s = 0; s < sequences; s++) {
            float *memory = at->memory + s * at->row + part;
            vec kept = sigmoid(gates[s][1]) * load(memory) + sigmoid(gates[s][0]) * hyperbolic_tangent(gates[s][2]);
            vec result = sigmoid(gates[s][3]) * hyperbolic_tangent(kept);
            store(memory, kept);
            store(at->after + s * at->row + part, result);
            store_some(at->out[s] + part, result, at->valid - part);
        }
    }
}

static void lstm_tiles(int sequences, const struct lstm_step *at) {
    switch (sequences) {
    case 1: lstm_tile(1, at); break;
    case 2: lstm_tile(2, at); break;
    case 3: lstm_tile(3, at); break;
#if HIGH > 3
    case 4: lstm_tile(4, at); break;
    case 5: lstm_tile(5, at); break;
    case 6: lstm_tile(6, at); break;
#endif
    }
}

/* Some sequences of one image from their first step to their last. */
static int lstm_sequences(const struct lstm *layer, long image, int first, int count) {
    int length = layer->vertical ? layer->height : layer->width;
    int blocks = (layer->units + BLOCK - 1) / BLOCK, tiles = (count + HIGH - 1) / HIGH;
    ptrdiff_t row = blocks * BLOCK;
    float *states = claim(3 * count * row); /* memory, and outputs of two steps */
    if (!states) return 1;
    memset(states, 0, 3 * count * row * sizeof(float));
    for (int step = 0; step < length; step++) {
        int place = layer->backwards ? length - 1 - step : step;
        float *before = states + (1 + step % 2) * count * row, *after = states + (1 + (step + 1) % 2) * count * row;
        for (int block = 0; block < blocks; block++)
            for (int tile = 0; tile < tiles; tile++) {
                int from = tile * count / tiles, sequences = (tile + 1) * count / tiles - from;
                int valid = layer->units - block * BLOCK;
                struct lstm_step at = {
                    .weights = layer->packed + (ptrdiff_t)block * layer->units * 4 * BLOCK,
                    .bias = layer->bias + block * BLOCK,
                    .before = before + from * row, .after = after + from * row + block * BLOCK,
                    .memory = states + from * row + block * BLOCK,
                    .row = row, .units = layer->units, .valid = valid < BLOCK ? valid : BLOCK,
                };
                for (int s = 0; s < sequences; s++) {
                    int sequence = first + from + s;
                    ptrdiff_t pixel = layer->vertical ? (ptrdiff_t)place * layer->width + sequence
                                                      : (ptrdiff_t)sequence * layer->width + place;
                    pixel += (ptrdiff_t)image * layer->height * layer->width;
                    at.inputs[s] = layer->inputs + pixel * 4 * layer->units + block * BLOCK;
                    at.out[s] = layer->out + pixel * layer->out_row + block * BLOCK;
                }
                lstm_tiles(sequences, &at);
            }
    }
    free(states);
    return 0;
}

static int sequences_of(const struct lstm *layer) { return layer->vertical ? layer->width : layer->height; }
static long groups_of(const struct lstm *layer, int many) { return (sequences_of(layer) + many - 1) / many; }

static int lstm_task(void *about, long index) {
    const struct lstms *all_layers = about;
    for (int i = 0; i < all_layers->count; i++) {
        const struct lstm *layer = all_layers->each + i;
        long groups = groups_of(layer, all_layers->many), tasks = groups * all_layers->images;
        if (index < tasks) {
            long group = index % groups, sequences = sequences_of(layer);
            int first = group * sequences / groups, end = (group + 1) * sequences / groups;
            return lstm_sequences(layer, index / groups, first, end - first);
        }
        index -= tasks;
    }
    return 0;
}

static int lstm_pack(void *about, long index) {
    const struct lstms *layers = about;
    for (int i = 0; i < layers->count; i++) {
        const struct lstm *layer = layers->each + i;
        int units = layer->units, blocks = (units + BLOCK - 1) / BLOCK;
        if (index < blocks) {
            float *to = layer->packed + (ptrdiff_t)index * units * 4 * BLOCK;
            for (int g = 0; g < 4; g++)
                for (int u = 0; u < BLOCK; u++) {
                    int unit = index * BLOCK + u;
                    const float *from = layer->weight + ((ptrdiff_t)g * units + unit) * units;
                    for (int k = 0; k < units; k++) to[k * 4 * BLOCK + g * BLOCK + u] = unit < units ? from[k] : 0;
                }
            return 0;
        }
        index -= blocks;
    }
    return 0;
}

static long count_lstm_tasks(const struct lstms *layers) {
    long tasks = 0;
    for (int i = 0; i < layers->count; i++) tasks += groups_of(layers->each + i, layers->many) * layers->images;
    return tasks;
}

static int run_lstm(struct lstms *layers) {
    long blocks = 0;
    if (layers->count > (int)(sizeof(layers->each) / sizeof(*layers->each))) return 1;
    for (int i = 0; i < layers->count; i++) blocks += (layers->each[i].units + BLOCK - 1) / BLOCK;
    if (layers->packs) share(lstm_pack, layers, blocks, layers->threads);
    layers->many = MANY; /* weights are read once for so many; less of them where there is not enough to share out */
    while (layers->many > HIGH && count_lstm_tasks(layers) < 4 * layers->threads) layers->many /= 2;
    return share(lstm_task, layers, count_lstm_tasks(layers), layers->threads);
}

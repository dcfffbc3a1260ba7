/* Products of large matrices: out (m x n) = f(left (m x k) right (k x n) + bias), right packed into panels of WIDE columns.

A panel's part of DEEP rows stays in the first cache while it meets the rows of a task, whose part of `left` stays in the
second. */
#define DEEP (LANES == 16 ? 256 : 384)
#define ROWS_AT_ONCE (16 * TALL)

/* What an activation needs: a factor and a summand behind the squared ReLU, what lies beside, factors of the residual sum. */
struct after {
    const float *then, *beside, *residual, *branch;
    float *aside;
};

/* erf as a quotient of polynomials, within 2 units in the last place of 1. */
INLINE vec error_function(vec x) {
    x = at_most(at_least(x, -4.0f), 4.0f);
    vec square = x * x, over = all(-2.72614225801306e-10f), under = all(-1.45660718464996e-05f);
    over = over * square + 2.77068142495902e-08f;
    over = over * square - 2.10102402082508e-06f;
    over = over * square - 5.69250639462346e-05f;
    over = over * square - 7.34990630326855e-04f;
    over = over * square - 2.95459980854025e-03f;
    over = over * square - 1.60960333262415e-02f;
    under = under * square - 2.13374055278905e-04f;
    under = under * square - 1.68282697438203e-03f;
    under = under * square - 7.37332916720468e-03f;
    under = under * square - 1.42647390514189e-02f;
    return x * over / under;
}

INLINE vec activated(vec x, int after, const float *then) {
    if (after == GELU) return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
    if (after == RELU) return at_least(x, 0.0f);
    if (after == SQUARED_RELU) {
        x = at_least(x, 0.0f);
        return x * x * then[0] + then[1];
    }
    return after == SILU ? x * sigmoid(x) : x;
}

/* GELU, and its slope. */
INLINE vec gelu_and_slope(vec x, vec *slope) {
    vec share = 0.5f + 0.5f * error_function(x * 0.70710678118654752f);
    *slope = share + x * exponential(-0.5f * x * x) * 0.39894228040143268f;
    return x * share;
}

/* Of four numbers each: a0 b0 a1 b1 or a2 b2 a3 b3, in pairs a0 a1 b0 b1 or a2 a3 b2 b3. */
INLINE vec interleaved(vec one, vec other, int second, int pairs) {
    ivec order;
    for (int lane = 0; lane < LANES; lane++) {
        int start = lane / 4 * 4 + 2 * second, place = lane % 4;
        order[lane] = pairs ? start + place % 2 + (place >= 2 ? LANES : 0) : start + place / 2 + (place % 2 ? LANES : 0);
    }
    return __builtin_shuffle(one, other, order);
}

INLINE vec from_far(vec one, vec other, int far, int second) {
    ivec order;
    for (int lane = 0; lane < LANES; lane++) order[lane] = (lane & far ? LANES + lane - far : lane) + second * far;
    return __builtin_shuffle(one, other, order);
}

INLINE void exchange_far(vec *rows, int far) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & far)) {
            vec one = from_far(rows[i], rows[i + far], far, 0);
            rows[i + far] = from_far(rows[i], rows[i + far], far, 1);
            rows[i] = one;
        }
}

/* LANES x LANES numbers with rows and columns exchanged: within fours, then between them. */
INLINE void exchange(vec *rows) {
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        vec near[4];
        for (int half = 0; half < 2; half++)
            for (int pair = 0; pair < 2; pair++)
                near[2 * half + pair] = interleaved(rows[i + 2 * half], rows[i + 2 * half + 1], pair, 0);
        for (int pair = 0; pair < 2; pair++)
            for (int side = 0; side < 2; side++)
                rows[i + 2 * pair + side] = interleaved(near[pair], near[2 + pair], side, 1);
    }
#if LANES > 4
    exchange_far(rows, 4);
#endif
#if LANES > 8
    exchange_far(rows, 8);
#endif
}

/* Columns from `first` on as a panel. */
static void pack(const struct linear *at, long first, int wide, float *to) {
    int valid = at->columns - first < wide ? at->columns - first : wide;
    if (!at->right_turned) {
        const float *from = at->right + first;
        for (int k = 0; k < at->depth; k++, from += at->right_row, to += wide)
            if (valid == wide)
                for (int part = 0; part < wide; part += LANES) store(to + part, load(from + part));
            else
                for (int part = 0; part < wide; part += LANES) store(to + part, load_some(from + part, valid - part));
        return;
    }
    const float *from = at->right + first * at->right_row;
    for (int part = 0; part < wide; part += LANES) {
        int k = 0;
        if (valid - part >= LANES)
            for (; k + LANES <= at->depth; k += LANES) {
                vec rows[LANES];
                for (int i = 0; i < LANES; i++) rows[i] = load(from + (part + i) * at->right_row + k);
                exchange(rows);
                for (int i = 0; i < LANES; i++) store(to + (k + i) * wide + part, rows[i]);
            }
        for (; k < at->depth; k++)
            for (int i = 0; i < LANES; i++) to[k * wide + part + i] = part + i < valid ? from[(part + i) * at->right_row + k] : 0;
    }
}

INLINE void linear_start(int rows, int parts, vec *sums, const float *out, ptrdiff_t out_row, const float *bias, int begins,
                         int valid) {
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < parts; p++) {
            const float *from = begins ? bias : out + i * out_row;
            sums[i * parts + p] = from ? load_some(from + p * LANES, valid - p * LANES) : (vec){0};
        }
}

INLINE void linear_end(int rows, int parts, vec *sums, float *out, ptrdiff_t out_row, int ends, int kind,
                       const struct after *after, int valid) {
    for (int p = 0; p < parts && ends && kind != NOTHING; p++) {
        int place = p * LANES, some = valid - place;
        vec residual = kind == ONTO && after->residual ? load_some(after->residual + place, some) : all(1);
        vec branch = kind == ONTO && after->branch ? load_some(after->branch + place, some) : all(1);
        for (int i = 0; i < rows; i++) {
            vec beside = kind == ONTO || kind == TIMES_ROOT || kind == GELU_SLOPE ? load_some(after->beside + i * out_row + place, some)
                                                                                : (vec){0};
            vec *x = sums + i * parts + p, slope, active;
            if (kind == ONTO) *x = *x * branch + beside * residual;
            else if (kind == TIMES_ROOT) *x *= square_root(beside);
            else if (kind == AND_GELU || kind == GELU_SLOPE) {
                active = kind == AND_GELU ? activated(*x, GELU, NULL) : gelu_and_slope(beside, &slope);
                store_some(after->aside + i * out_row + place, active, some);
                if (kind == GELU_SLOPE) *x *= slope;
            } else if (kind == AND_RELU) {
                store_some(after->aside + i * out_row + place, at_least(*x, 0.0f), some);
                *x = activated(*x, SQUARED_RELU, after->then);
            } else *x = activated(*x, kind, after->then);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < parts; p++) store_some(out + i * out_row + p * LANES, sums[i * parts + p], valid - p * LANES);
}

/* As `tile`, from the bias on where it begins and through the activation where it ends. */
INLINE void linear_tile(float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row, ptrdiff_t left_column,
                        const float *panel, int depth, const float *bias, int begins, int ends, int kind,
                        const struct after *after) {
    vec sums[TALL * WIDE_PARTS];
    linear_start(TALL, WIDE_PARTS, sums, out, out_row, bias, begins, WIDE);
    if (ends && (kind == ONTO || kind == TIMES_ROOT || kind == GELU_SLOPE))
        for (int i = 0; i < TALL; i++) __builtin_prefetch(after->beside + i * out_row);
    accumulate(TALL, WIDE_PARTS, sums, left, left_row, left_column, panel, WIDE, depth);
    linear_end(TALL, WIDE_PARTS, sums, out, out_row, ends, kind, after, WIDE);
}

#define EDGE(rows) \
    case rows: \
        accumulate(rows, parts, sums, left, left_row, left_column, panel, WIDE, depth); \
        break;

INLINE void linear_fewer(int rows, int parts, float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row,
                         ptrdiff_t left_column, const float *panel, int depth, const float *bias, int begins, int ends, int kind,
                         const struct after *after, int valid) {
    vec sums[TALL * WIDE_PARTS];
    linear_start(rows, parts, sums, out, out_row, bias, begins, valid);
    switch (rows) {
        EDGE(1) EDGE(2) EDGE(3) EDGE(4) EDGE(5) EDGE(6)
#if TALL > 6
        EDGE(7) EDGE(8) EDGE(9) EDGE(10) EDGE(11) EDGE(12)
#endif
    }
    linear_end(rows, parts, sums, out, out_row, ends, kind, after, valid);
}

/* The same where there are fewer rows or columns: once for all that may follow, which would be much to compile. */
static __attribute__((noinline)) void linear_edge(int rows, float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row,
                                                  ptrdiff_t left_column, const float *panel, int depth, const float *bias,
                                                  int begins, int ends, int kind, const struct after *after, int valid) {
    if (LANES == 16 && valid <= PANEL)
        linear_fewer(rows, PARTS, out, out_row, left, left_row, left_column, panel, depth, bias, begins, ends, kind, after, valid);
    else
        linear_fewer(rows, WIDE_PARTS, out, out_row, left, left_row, left_column, panel, depth, bias, begins, ends, kind, after,
                     valid);
}

/* Some rows of the product times some panels. */
INLINE void linear_part(float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row, ptrdiff_t left_column,
                        const float *packed, int depth, const float *bias, int kind, const struct after *after, int rows,
                        int columns) {
    for (int from = 0; from < depth; from += DEEP) {
        int deep = depth - from < DEEP ? depth - from : DEEP, ends = from + deep == depth;
        for (int column = 0; column < columns; column += WIDE) {
            const float *panel = packed + (size_t)column * depth + (size_t)from * WIDE;
            int valid = columns - column < WIDE ? columns - column : WIDE;
            for (int row = 0, some; row < rows; row += some) {
                some = next_rows(rows - row);
                const float *part = left + row * left_row + from * left_column;
                float *place = out + row * out_row + column;
                const float *start = bias ? bias + column : NULL;
                struct after here = *after;
                if (kind >= ONTO) {
                    if (here.beside) here.beside += row * out_row + column;
                    if (here.aside) here.aside += row * out_row + column;
                    if (here.residual) here.residual += column;
                    if (here.branch) here.branch += column;
                }
                if (some == TALL && valid == WIDE)
                    linear_tile(place, out_row, part, left_row, left_column, panel, deep, start, !from, ends, kind, &here);
                else
                    linear_edge(some, place, out_row, part, left_row, left_column, panel, deep, start, !from, ends, kind, &here,
                                valid);
            }
        }
    }
}

#define AFTER(kind) \
    case kind: \
        linear_part(out, at->out_row, left, left_row, left_column, packed, at->depth, bias, kind, &after, rows, columns); \
        break;

/* Some rows from `row` on and some columns from `column` on. */
static void linear_after(const struct linear *at, long row, long column, const float *left, ptrdiff_t left_row,
                         ptrdiff_t left_column, const float *packed, int rows, int columns, float *out) {
    const float *bias = at->bias ? at->bias + column : NULL;
    struct after after = {at->then, at->beside ? at->beside + row * at->out_row + column : NULL,
                          at->residual ? at->residual + column : NULL, at->branch ? at->branch + column : NULL,
                          at->aside ? at->aside + row * at->out_row + column : NULL};
    switch (at->after) {
        AFTER(NOTHING) AFTER(GELU) AFTER(RELU) AFTER(SQUARED_RELU) AFTER(SILU)
        AFTER(ONTO) AFTER(TIMES_ROOT) AFTER(AND_GELU) AFTER(GELU_SLOPE) AFTER(AND_RELU)
    }
}

/* Some rows of `left`, behind the norm if there is one: then in memory of their own, which is to be freed. */
struct left {
    const float *rows;
    ptrdiff_t row, column;
    float *own;
};

static struct left linear_left(const struct linear *at, long row, long rows) {
    const float *from = at->left + row * at->left_row;
    if (!at->norm) return (struct left){from, at->left_row, at->left_column, NULL};
    float *own = claim((size_t)rows * at->depth);
    for (long i = 0; i < rows && own; i++)
        norm_row(own + i * at->depth, from + i * at->left_row, at->depth, at->norm, at->norm_bias, at->eps);
    return (struct left){own, at->depth, 1, own};
}

static int linear_task(void *about, long index) {
    const struct linear *at = about;
    long group = index % at->groups, block = index / at->groups;
    long panels = pieces_of(at->columns, WIDE), first = panels * group / at->groups * WIDE;
    long end = panels * (group + 1) / at->groups * WIDE, row = block * ROWS_AT_ONCE;
    if (end > at->columns) end = at->columns;
    int rows = at->rows - row < ROWS_AT_ONCE ? at->rows - row : ROWS_AT_ONCE;
    struct left left = linear_left(at, row, rows);
    if (!left.rows) return 1;
    linear_after(at, row, first, left.rows, left.row, left.column, at->packed + (size_t)first * at->depth, rows, end - first,
                 at->out + row * at->out_row + first);
    free(left.own);
    return 0;
}

static int pack_task(void *about, long panel) {
    const struct linear *at = about;
    pack(at, panel * WIDE, WIDE, at->packed + (size_t)panel * at->depth * WIDE);
    return 0;
}

/* Few rows: panels are packed by the thread that uses them, and never leave its cache. */
static int linear_panels_task(void *about, long index) {
    const struct linear *at = about;
    long panels = pieces_of(at->columns, WIDE), panel = panels * index / at->groups, end = panels * (index + 1) / at->groups;
    float *packed = claim((size_t)(end - panel) * at->depth * WIDE);
    if (!packed) return 1;
    for (long i = panel; i < end; i++) pack(at, i * WIDE, WIDE, packed + (size_t)(i - panel) * at->depth * WIDE);
    int first = panel * WIDE, columns = end * WIDE < at->columns ? (end - panel) * WIDE : at->columns - first;
    linear_after(at, 0, first, at->left, at->left_row, at->left_column, packed, at->rows, columns, at->out + first);
    free(packed);
    return 0;
}

/* Very few rows: every column is a row of the weight as it lies, which is read once and not packed. */
#define VERY_FEW 4
#define DOTS_AT_ONCE 32 /* columns of a task */
#define DOTS 4          /* columns that do not wait for each other */

INLINE void linear_dots(const struct linear *at, const float *left, long column, long end, float *found) {
    const float *right[DOTS];
    vec sums[DOTS];
    for (int j = 0; j < DOTS; j++)
        right[j] = at->right + (column + j < end ? column + j : end - 1) * at->right_row, sums[j] = (vec){0};
    for (int k = 0; k < at->depth; k += LANES) {
        vec x = load_some(left + k, at->depth - k);
        for (int j = 0; j < DOTS; j++) sums[j] += x * load_some(right[j] + k, at->depth - k);
    }
    for (int j = 0; j < DOTS; j++) found[j] = sum(sums[j]);
}

static int linear_dots_task(void *about, long index) {
    const struct linear *at = about;
    long first = index * DOTS_AT_ONCE, end = first + DOTS_AT_ONCE < at->columns ? first + DOTS_AT_ONCE : at->columns;
    for (long row = 0; row < at->rows; row++)
        for (long column = first; column < end; column += LANES) {
            float found[LANES];
            int some = end - column < LANES ? (int)(end - column) : LANES;
            for (int j = 0; j < LANES; j += DOTS) linear_dots(at, at->left + row * at->left_row, column + j, end, found + j);
            vec x = load(found);
            if (at->bias) x += load_some(at->bias + column, some);
            store_some(at->out + row * at->out_row + column, activated(x, at->after, at->then), some);
        }
    return 0;
}

static int may_dot(const struct linear *at) {
    return at->rows < VERY_FEW && !at->packed && at->right_turned && at->left_column == 1 && at->after <= SILU && !at->norm;
}

static int run_linear(struct linear *given) {
    struct linear at = *given;
    if (may_dot(&at)) return share(linear_dots_task, &at, pieces_of(at.columns, DOTS_AT_ONCE), at.threads);
    long panels = pieces_of(at.columns, WIDE), blocks = (at.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    if (!at.packed) {
        if (at.norm) return 1; /* every task would do all of it */
        at.groups = panels >= 32 * at.threads / 2 ? panels / 4 : panels >= 8 * at.threads ? panels / 2 : panels;
        return share(linear_panels_task, &at, at.groups, at.threads);
    }
    if (!at.ready) share(pack_task, &at, panels, at.threads);
    at.groups = 1; /* of panels, so that there is work for every thread */
    while (blocks * at.groups < 6 * at.threads && at.groups < panels) at.groups++;
    return share(linear_task, &at, blocks * at.groups, at.threads);
}

/* Two layers and what lies between them: as many rows a task as leave the hidden layer in the second cache. It is kept where
`out` of the first says so. */
#define HIDDEN_AT_ONCE 98304

static int mlp_pack_task(void *about, long panel) {
    struct mlp *at = about;
    long first = pieces_of(at->first.columns, WIDE);
    return panel < first ? pack_task(&at->first, panel) : pack_task(&at->second, panel - first);
}

static int mlp_task(void *about, long index) {
    const struct mlp *at = about;
    struct linear first = at->first;
    const struct linear *second = &at->second;
    long tiles = (first.rows + TALL - 1) / TALL, row = tiles * index / at->tasks * TALL, end = tiles * (index + 1) / at->tasks * TALL;
    long rows = (end < first.rows ? end : first.rows) - row;
    int keeps = first.out != NULL, aside = first.after == AND_GELU; /* the second layer takes what lies aside */
    if (!keeps) first.out_row = pieces_of(first.columns, WIDE) * WIDE;
    float *room = !keeps || aside ? claim((size_t)rows * first.out_row) : NULL;
    if (!room && (!keeps || aside)) return 1;
    float *out = keeps ? first.out + row * first.out_row : room;
    if (first.beside) first.beside += row * first.out_row;
    if (aside) first.aside = room;
    else if (first.aside) first.aside += row * first.out_row;
    struct left left = linear_left(&at->first, row, rows);
    if (!left.rows) {
        free(room);
        return 1;
    }
    linear_after(&first, 0, 0, left.rows, left.row, left.column, first.packed, rows, first.columns, out);
    free(left.own);
    linear_after(second, row, 0, room ? room : out, first.out_row, 1, second->packed, rows, second->columns,
                 second->out + row * second->out_row);
    free(room);
    return 0;
}

static int run_mlp(struct mlp *at) {
    long panels = pieces_of(at->first.columns, WIDE) + pieces_of(at->second.columns, WIDE);
    long rows = HIDDEN_AT_ONCE / at->first.columns / TALL * TALL;
    rows = rows < 4 * TALL ? 4 * TALL : rows > ROWS_AT_ONCE ? ROWS_AT_ONCE : rows;
    at->tasks = (at->first.rows + rows - 1) / rows;
    if (!at->first.ready || !at->second.ready) share(mlp_pack_task, at, panels, at->first.threads);
    return share(mlp_task, at, at->tasks, at->first.threads);
}

static int star_task(void *about, long index) {
    const struct star *at = about;
    long first = index * STAR_AT_ONCE, end = first + STAR_AT_ONCE < at->count ? first + STAR_AT_ONCE : at->count;
    double *sums = at->sums + 2 * index;
    sums[0] = sums[1] = 0;
    for (long part = first; part < end; part += 2048) { /* in single precision only so far */
        vec squares = {0}, plain = {0};
        long last = part + 2048 < end ? part + 2048 : end;
        for (long i = part; i < last; i += LANES) {
            vec gradient = load_some(at->gradient + i, last - i), kept = load_some(at->kept + i, last - i);
            vec product = gradient * kept;
            store_some(at->out + i, product * at->slope, last - i);
            squares += product * kept, plain += gradient;
        }
        sums[0] += sum(squares), sums[1] += sum(plain);
    }
    return 0;
}

static int run_star(struct star *at) { return share(star_task, at, at->tasks, at->threads); }

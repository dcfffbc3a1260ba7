/* Convolutions of every channel with a kernel as large as the map, through the Fourier transform.

A lane is a channel: LANES of them as real parts and the next LANES as imaginary ones, so that transforms need neither
shuffles nor a real variant. With Z the transform of a + ib, and P, M half the sum and difference of the two kernels'
transforms, that of (a * kernel) + i (b * other kernel) is P(k) Z(k) + M(k) conj(Z(-k)). */

typedef struct { vec re, im; } cvec;

INLINE cvec get(const float *from) { return (cvec){load(from), load(from + LANES)}; }
INLINE void put(float *to, cvec x) { store(to, x.re), store(to + LANES, x.im); }
INLINE cvec plus(cvec a, cvec b) { return (cvec){a.re + b.re, a.im + b.im}; }
INLINE cvec minus(cvec a, cvec b) { return (cvec){a.re - b.re, a.im - b.im}; }
INLINE cvec times(cvec a, float re, float im) { return (cvec){a.re * re - a.im * im, a.re * im + a.im * re}; }
INLINE cvec times_i(cvec a, float sign) { return (cvec){a.im * -sign, a.re * sign}; } /* a times i or -i */
INLINE cvec scaled(cvec a, float by) { return (cvec){a.re * by, a.im * by}; }

#define CELL (2 * LANES) /* floats of a complex vector */

/* The sum over j of a_j e^(sign 2 pi i j k / radix) for every k. */
INLINE void small_transform(int radix, float sign, cvec *a) {
    if (radix == 2) {
        cvec difference = minus(a[0], a[1]);
        a[0] = plus(a[0], a[1]), a[1] = difference;
    } else if (radix == 4) {
        cvec even = plus(a[0], a[2]), odd = plus(a[1], a[3]);
        cvec less = minus(a[0], a[2]), turned = times_i(minus(a[1], a[3]), sign);
        a[0] = plus(even, odd), a[2] = minus(even, odd), a[1] = plus(less, turned), a[3] = minus(less, turned);
    } else { /* 3, 5, 7: pairs of j and -j */
        static const float cosines[8][4] = {[3] = {0, -0.5f}, [5] = {0, 0.309016994374947f, -0.809016994374947f},
            [7] = {0, 0.623489801858733f, -0.222520933956314f, -0.900968867902419f}};
        static const float sines[8][4] = {[3] = {0, 0.866025403784439f}, [5] = {0, 0.951056516295154f, 0.587785252292473f},
            [7] = {0, 0.781831482468030f, 0.974927912181824f, 0.433883739117558f}};
        int half = radix / 2;
        cvec sums[4], differences[4], first = a[0];
        for (int j = 1; j <= half; j++) {
            sums[j] = plus(a[j], a[radix - j]), differences[j] = minus(a[j], a[radix - j]);
            a[0] = plus(a[0], sums[j]);
        }
        for (int k = 1; k <= half; k++) {
            cvec real = first, turned = {{0}, {0}};
            for (int j = 1; j <= half; j++) {
                int angle = j * k % radix;
                float side = angle > half ? -sign : sign;
                angle = angle > half ? radix - angle : angle;
                real = plus(real, scaled(sums[j], cosines[radix][angle]));
                turned = plus(turned, scaled(differences[j], side * sines[radix][angle]));
            }
            a[k] = plus(real, times_i(turned, 1)), a[radix - k] = minus(real, times_i(turned, 1));
        }
    }
}

/* Where the places of a transform lie: floats from one to the next. */
struct lane {
    float *at;
    size_t step;
};

/* One step of a transform: `apart` groups of radix * groups places become groups of their own. Of the radix places that
meet only the first `live` are not zero, and only the first `wanted` are written. */
INLINE void pass(int radix, int live, int wanted, float sign, struct lane from, struct lane to, int groups, int apart,
                 const float *turns) {
    for (int p = 0; p < groups; p++)
        for (int q = 0; q < apart; q++) {
            cvec a[7];
            for (int i = 0; i < radix; i++)
                a[i] = i < live ? get(from.at + from.step * (q + apart * (p + groups * i))) : (cvec){{0}, {0}};
            if (radix == 4 && live == 2) { /* without what is added to zeros */
                cvec one = a[0], other = a[1], turned = times_i(other, sign);
                a[0] = plus(one, other), a[1] = plus(one, turned), a[2] = minus(one, other), a[3] = minus(one, turned);
            } else if (radix == 2 && live == 1) {
                a[1] = a[0];
            } else {
                small_transform(radix, sign, a);
            }
            put(to.at + to.step * (q + apart * radix * p), a[0]);
            for (int i = 1; i < wanted; i++) {
                const float *turn_by = turns + 2 * (size_t)apart * p * i; /* of the whole circle's steps */
                cvec result = groups == 1 ? a[i] : times(a[i], turn_by[0], sign * turn_by[1]);
                put(to.at + to.step * (q + apart * (radix * p + i)), result);
            }
        }
}

#define PASS(radix) \
    case radix: \
        if (backwards) pass(radix, radix, radix, 1.0f, from, to, groups, apart, turns); \
        else pass(radix, radix, radix, -1.0f, from, to, groups, apart, turns); \
        break;

/* Forwards fours come first and backwards last: there half of the places are zeros or not wanted. */
INLINE int radix_of(int left, int backwards) {
    if (!backwards) return left % 4 == 0 ? 4 : left % 2 == 0 ? 2 : left % 3 == 0 ? 3 : left % 5 == 0 ? 5 : 7;
    return left % 7 == 0 ? 7 : left % 5 == 0 ? 5 : left % 3 == 0 ? 3 : left % 4 == 0 ? 4 : 2;
}

/* How many places are read, or backwards written, of lines that fill so many: what lies between is zero, or nothing. */
INLINE int places_touched(int size, int filled) { return size % 2 == 0 && filled <= size / 2 ? size / 2 : size; }

/* The transform of `size` places; `touched` of them are not zero or, backwards, wanted. `room` is for two lines. */
static void fourier(struct lane from, struct lane to, float *room, int size, int touched, const float *turns, int backwards) {
    struct lane last = to, spare[2] = {{room, CELL}, {room + (size_t)size * CELL, CELL}};
    if (size == 1) put(to.at, get(from.at));
    for (int left = size, apart = 1, step = 0; left > 1; step++) {
        int radix = radix_of(left, backwards), groups = left / radix, half = touched < size;
        to = groups == 1 ? last : spare[step % 2];
        if (half && !backwards && apart == 1 && radix == 4) pass(4, 2, 4, -1.0f, from, to, groups, apart, turns);
        else if (half && !backwards && apart == 1 && radix == 2) pass(2, 1, 2, -1.0f, from, to, groups, apart, turns);
        else if (half && backwards && groups == 1 && radix == 4) pass(4, 4, 2, 1.0f, from, to, groups, apart, turns);
        else if (half && backwards && groups == 1 && radix == 2) pass(2, 2, 1, 1.0f, from, to, groups, apart, turns);
        else
            switch (radix) { PASS(2) PASS(3) PASS(4) PASS(5) PASS(7) }
        left = groups, apart *= radix, from = to;
    }
}

/* P Z + M conj(Z') and its partner at -k, in place. */
INLINE void meet(float *here, float *there, const float *spectrum) {
    cvec z = get(here), w = get(there), p = get(spectrum), m = get(spectrum + CELL);
    cvec out = {p.re * z.re - p.im * z.im + m.re * w.re + m.im * w.im, p.re * z.im + p.im * z.re + m.im * w.re - m.re * w.im};
    cvec partner = {p.re * w.re + p.im * w.im + m.re * z.re - m.im * z.im,
                    p.re * w.im - p.im * w.re - m.im * z.re - m.re * z.im};
    put(here, out), put(there, partner);
}

/* A column there and back: its transform, the kernel's, and the inverse. With a partner, both. */
static void columns_task(const struct longconv *at, float *spectra, const float *kernel, float *room, int column, int tall) {
    int partner = (at->columns - column) % at->columns, rows = at->rows, both = partner != column;
    int touched = places_touched(rows, at->height);
    size_t size = (size_t)rows * CELL;
    float *found[2] = {room, room + size};
    struct lane places[2] = {{spectra + (size_t)column * tall * CELL, CELL}, {spectra + (size_t)partner * tall * CELL, CELL}};
    for (int i = 0; i <= both; i++)
        fourier(places[i], (struct lane){found[i], CELL}, room + 2 * size, rows, touched, at->row_turns, 0);
    if (both) {
        meet(found[0], found[1], kernel);
        for (int k = 1; k < rows; k++)
            meet(found[0] + (size_t)k * CELL, found[1] + (size_t)(rows - k) * CELL, kernel + (size_t)k * 2 * CELL);
    } else {
        for (int k = 0; k <= rows / 2; k++)
            meet(found[0] + (size_t)k * CELL, found[0] + (size_t)((rows - k) % rows) * CELL, kernel + (size_t)k * 2 * CELL);
    }
    for (int i = 0; i <= both; i++)
        fourier((struct lane){found[i], CELL}, places[i], room + 2 * size, rows, touched, at->row_turns, 1);
}

/* Which channels a block holds. */
struct lanes {
    int first, real, imaginary;
};

INLINE struct lanes lanes_of(const struct longconv *at, long block) {
    int first = block * CELL, here = at->channels - first;
    int imaginary = here - LANES < 0 ? 0 : here - LANES < LANES ? here - LANES : LANES;
    return (struct lanes){first, here < LANES ? here : LANES, imaginary};
}

/* The two channels of a lane travel together, so that rounding errors of the larger would swamp the smaller: both are
brought to numbers near 1 first, by powers of two. A channel that is not all numbers becomes zeros, so that its partner is
left alone, and its power, and through that every output, is not a number. */
struct scale {
    vec re, im;
};

INLINE vec power_below(vec largest) { /* the power of two in it; 1 where there is none */
    ivec power = (ivec)largest & 0x7f800000;
    vec found = choose((power == 0) | (power == 0x7f000000), all(1.0f), (vec)power);
    return choose(power == 0x7f800000, all(__builtin_nanf("")), found);
}

/* x over its power, zeros where that is not a number. */
INLINE vec without_power(vec x, vec inverse, vec power) { return choose(power == power, x * inverse, (vec){0}); }

INLINE vec inverse_power(vec power) { return (vec)(0x7f000000 - (ivec)power); }

INLINE vec larger(vec largest, vec x) {
    x = (vec)((ivec)x & 0x7fffffff);
    return choose((ivec)x > (ivec)largest, x, largest); /* what is not a number is larger than all */
}

/* The powers of the channels of a block over `count` pixels. */
static struct scale scale_of(const struct longconv *at, const struct lanes *lanes, const float *from, size_t count) {
    struct scale found = {{0}, {0}};
    for (size_t i = 0; i < count; i++) {
        const float *x = from + i * at->channels + lanes->first;
        found.re = larger(found.re, load_some(x, lanes->real));
        found.im = larger(found.im, load_some(x + LANES, lanes->imaginary));
    }
    return (struct scale){power_below(found.re), power_below(found.im)};
}

/* The transform of a line of `count` places from `from` on, into column k's place `row` of `spectra`, for every k; `line`
is for three. */
INLINE void line_task(const struct longconv *at, const struct lanes *lanes, const struct scale *scale, const float *from,
                      int count, int start, float *line, float *spectra, int tall, int row) {
    int columns = at->columns, touched = start ? columns : places_touched(columns, count);
    vec re = inverse_power(scale->re), im = inverse_power(scale->im);
    if (touched > count) memset(line, 0, (size_t)touched * CELL * sizeof(float));
    for (int w = 0; w < count; w++) {
        const float *x = from + (size_t)w * at->channels + lanes->first;
        put(line + (size_t)((start + w + columns) % columns) * CELL,
            (cvec){without_power(load_some(x, lanes->real), re, scale->re),
                   without_power(load_some(x + LANES, lanes->imaginary), im, scale->im)});
    }
    struct lane to = {spectra + (size_t)row * CELL, (size_t)tall * CELL};
    fourier((struct lane){line, CELL}, to, line + (size_t)columns * CELL, columns, touched, at->column_turns, 0);
}

/* Half the sum and difference of the kernels' transforms, from those of a + ib at k and -k. */
INLINE void part(float *to, const float *here, const float *there, float scale) {
    cvec z = get(here), w = get(there);
    cvec a = {(z.re + w.re) * scale, (z.im - w.im) * scale}, b = {(z.im + w.im) * scale, (w.re - z.re) * scale};
    put(to, (cvec){(a.re + b.re) * 0.5f, (a.im + b.im) * 0.5f});
    put(to + CELL, (cvec){(a.re - b.re) * 0.5f, (a.im - b.im) * 0.5f});
}

INLINE size_t spectrum_size(const struct longconv *at) { return ((size_t)(at->columns / 2 + 1) * at->rows * 2 + 1) * CELL; }

/* The spectrum of one block, and behind it the powers of two that it lacks. */
static int spectrum_of(const struct longconv *at, long block, float *to) {
    int columns = at->columns, rows = at->rows, tall = at->high | 1;
    struct lanes lanes = lanes_of(at, block);
    size_t size = (size_t)rows * CELL, work = 5 * size, lines = 3 * (size_t)columns * CELL;
    float *room = claim((size_t)columns * tall * CELL + (work > lines ? work : lines)), scale = 0.5f / ((float)rows * columns);
    if (!room) return 1;
    float *spectra = room, *line = room + (size_t)columns * tall * CELL;
    struct scale powers = scale_of(at, &lanes, at->taps, (size_t)at->high * at->wide);
    put(to + spectrum_size(at) - CELL, (cvec){powers.re, powers.im});
    for (int h = 0; h < at->high; h++)
        line_task(at, &lanes, &powers, at->taps + (size_t)h * at->wide * at->channels, at->wide, -at->before, line, spectra, tall, h);
    for (int column = 0; column <= columns / 2; column++) {
        int partner = (columns - column) % columns;
        float *found[2] = {line, line + size};
        for (int i = 0; i < 2; i++) {
            float *x = line + 2 * size, *from = spectra + (size_t)(i ? partner : column) * tall * CELL;
            memset(x, 0, size * sizeof(float));
            for (int h = 0; h < at->high; h++)
                put(x + (size_t)((h - at->above + rows) % rows) * CELL, get(from + (size_t)h * CELL));
            fourier((struct lane){x, CELL}, (struct lane){found[i], CELL}, x + size, rows, rows, at->row_turns, 0);
        }
        for (int k = 0; k < rows; k++)
            part(to + ((size_t)column * rows + k) * 2 * CELL, found[0] + (size_t)k * CELL,
                 found[1] + (size_t)((rows - k) % rows) * CELL, scale);
    }
    free(room);
    return 0;
}

static int spectrum_task(void *about, long block) {
    const struct longconv *at = about;
    return spectrum_of(at, block, at->spectrum + block * spectrum_size(at));
}

/* One block of channels of one image. */
static int convolve_block(const struct longconv *at, long block, long image, const float *kernel) {
    int height = at->height, width = at->width, columns = at->columns;
    int touched = places_touched(at->rows, height), tall = touched | 1; /* odd: spread over the cache */
    struct lanes lanes = lanes_of(at, block);
    size_t work = 4 * (size_t)at->rows * CELL, lines = 3 * (size_t)columns * CELL;
    float *room = claim((size_t)columns * tall * CELL + (work > lines ? work : lines));
    if (!room) return 1;
    float *spectra = room, *line = room + (size_t)columns * tall * CELL;
    const float *x = at->x + (size_t)image * height * width * at->channels;
    struct scale powers = scale_of(at, &lanes, x, (size_t)height * width);
    cvec lacking = get(kernel + spectrum_size(at) - CELL);
    lacking.re *= powers.re, lacking.im *= powers.im;
    for (int h = 0; h < height; h++)
        line_task(at, &lanes, &powers, x + (size_t)h * width * at->channels, width, 0, line, spectra, tall, h);
    for (int k = 0; k < columns && height < touched; k++)
        memset(spectra + ((size_t)k * tall + height) * CELL, 0, (size_t)(touched - height) * CELL * sizeof(float));
    for (int k = 0; k <= columns / 2; k++) columns_task(at, spectra, kernel + (size_t)k * at->rows * 2 * CELL, line, k, tall);
    for (int h = 0; h < height; h++) {
        struct lane from = {spectra + (size_t)h * CELL, (size_t)tall * CELL}, to = {line, CELL};
        fourier(from, to, line + (size_t)columns * CELL, columns, places_touched(columns, width), at->column_turns, 1);
        for (int w = 0; w < width; w++) {
            size_t pixel = ((size_t)image * height + h) * width + w;
            float *to = at->out + pixel * at->channels + lanes.first;
            cvec y = get(line + (size_t)w * CELL);
            y.re *= lacking.re, y.im *= lacking.im;
            if (at->factor) {
                const float *factor = at->factor + pixel * at->factor_row + lanes.first;
                y.re *= load_some(factor, lanes.real), y.im *= load_some(factor + LANES, lanes.imaginary);
            }
            store_some(to, y.re, lanes.real), store_some(to + LANES, y.im, lanes.imaginary);
        }
    }
    free(room);
    return 0;
}

static int longconv_task(void *about, long index) {
    const struct longconv *at = about;
    long block = index / at->images;
    return convolve_block(at, block, index % at->images, at->spectrum + block * spectrum_size(at));
}

/* All images of a block, with a spectrum that is made for them and thrown away. */
static int longconv_anew_task(void *about, long block) {
    const struct longconv *at = about;
    float *kernel = claim(spectrum_size(at));
    if (!kernel) return 1;
    int failed = spectrum_of(at, block, kernel);
    for (long image = 0; image < at->images && !failed; image++) failed = convolve_block(at, block, image, kernel);
    free(kernel);
    return failed;
}

static int run_longconv(struct longconv *at) {
    long blocks = (at->channels + CELL - 1) / CELL;
    if (!at->x) return share(spectrum_task, at, blocks, at->threads);
    if (!at->spectrum) return share(longconv_anew_task, at, blocks, at->threads);
    return share(longconv_task, at, blocks * at->images, at->threads);
}

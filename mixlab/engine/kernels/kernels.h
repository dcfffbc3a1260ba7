/* What a level of instructions offers. Sizes are in elements; every kernel returns 0, or 1 if there was no memory. */
#include <stddef.h>

#include "threads.h"

/* An LSTM over the rows or columns of maps, in one direction. */
struct lstm {
    const float *inputs; /* images x height x width x 4 gates x units: the share of the inputs and their bias */
    const float *weight; /* 4 gates x units x units, of the last output */
    const float *bias;   /* 4 gates x units */
    float *packed;       /* room for the weight as steps want it: blocks of 16 units x units x 4 x 16 */
    float *out;          /* images x height x width x out_row */
    ptrdiff_t out_row;
    int height, width, units;
    int vertical, backwards;
};
struct lstms {
    const struct lstm *each;
    int count, images, packs, threads; /* packs: whether weights are to be packed first */
};

/* The cell of an mLSTM layer with all that surrounds it but the linear layers. */
struct mlstm {
    const float *source, *values, *gate; /* images x steps x row; a walk backwards starts at the last of all, with rows below 0 */
    ptrdiff_t source_row, values_row, gate_row, out_row;
    const float *projections;   /* 3 (queries, keys, values) x 4 turns x channels */
    const float *biases;        /* 3 x channels, or NULL */
    const float *gate_weights;  /* heads x 2 gates x 2 (source, values) x channels */
    const float *gate_biases;   /* heads x 2 gates */
    const float *norm, *norm_bias, *skip; /* channels; norm_bias may be NULL */
    float *out, *gates; /* gates: room for 2 of every head and step */
    int images, steps, heads, width, chunk, threads;
    int gated; /* the gate has been through its activation */
    float eps, norm_eps;
};

/* Blocks of 4 x 4 weights along the channels of rows, head by head. */
struct heads {
    const float *x;
    const float *weights; /* 4 turns x channels */
    const float *bias;    /* channels, or NULL */
    float *out;
    ptrdiff_t x_row, x_head, out_row, out_head; /* from a row or a head to the next */
    long rows;
    int heads, width, threads;
};

/* What a change of every weight of such blocks, and of the bias, would change. */
struct blocks_gradient {
    const float *x, *gradient;
    float *out;  /* (4 turns and the bias) x channels */
    float *sums; /* the kernel's own, as is `shares` */
    ptrdiff_t x_row, x_head, gradient_row, gradient_head;
    long rows;
    int heads, width, shares, threads;
};

/* A convolution of every channel with a kernel as large as the map, through the Fourier transform. */
struct longconv {
    const float *x;        /* images x height x width x channels; NULL: only the spectrum is wanted */
    const float *taps;     /* of the kernels: high x wide x channels, the place that meets itself at (above, before) */
    float *spectrum;       /* blocks of 2 LANES channels x half of the columns x rows x 4 x LANES; NULL: made anew */
    const float *factor;   /* of every output, with rows of factor_row, or NULL */
    float *out;
    ptrdiff_t factor_row;
    int images, height, width, channels;
    int rows, columns; /* periods */
    int high, wide, above, before;
    const float *row_turns, *column_turns; /* cos and sin of the whole circle in so many steps */
    int threads;
};

/* Layer norm of the product of two, or of one where `other` is NULL. */
struct norm {
    const float *one, *other;
    const float *weight; /* or NULL: no norm */
    const float *bias;
    float *out;
    ptrdiff_t one_row, other_row;
    long rows;
    int width, threads;
    float eps;
};

/* Small kernels over every channel; out = f(first part) * f(second part), normed, and aside = f(third part). */
struct depthwise {
    const float *x;      /* images x height x width x row */
    const float *weight; /* channels of x x high x wide */
    const float *bias;   /* or NULL */
    const float *norm;   /* or NULL: no norm */
    float *out, *aside;  /* images x height x width x channels */
    float *packed;       /* the kernel's own, as is `strip`: rows of a task */
    ptrdiff_t row, image, out_row, out_image; /* from a pixel or an image to the next */
    int part[3]; /* where in a pixel the channels of a part begin; -1: there is none */
    int images, height, width, channels;
    int high, wide, above, before;
    int turned; /* weights are read from the last tap to the first */
    int adds;   /* the first part is added to what is there */
    int after, strip, threads;
    float eps;
};

/* What a change of every tap of small kernels over every channel would change, for maps that keep their size. */
struct taps {
    const float *x, *gradient; /* images x height x width x row: of the input, of the output */
    float *out;                /* channels x high x wide */
    float *bias;               /* channels: the sums of the gradient, or NULL */
    float *sums;               /* the kernel's own, as is `shares` */
    ptrdiff_t x_row, x_image, gradient_row, gradient_image; /* from a pixel or an image to the next */
    int images, height, width, channels;
    int high, wide, above, before; /* wide: 3, 5 or 7 */
    int shares, threads;
};

/* Factorised attention; out = scale query (softmax(key)^T value) + query * near. */
struct factor {
    const float *query, *key, *value; /* images x tokens x row: heads side by side */
    const float *near;                /* images x tokens behind the first `prefix` x channels, or NULL */
    float *out;                       /* images x tokens x channels */
    float *contexts; /* room for every image and head: (width + 2) x width padded to 16; the last are peaks and sums */
    ptrdiff_t query_row, key_row, value_row;
    long tokens;
    int images, heads, width, prefix, threads;
    float scale;
};

/* Softmax attention of queries, keys and values, which lie behind each other in every token. */
struct attention {
    const float *qkv; /* images x tokens x (queries, keys, values) x heads x width */
    float *out;       /* images x tokens x heads x width */
    float *logs;      /* images x heads x tokens: of the sums of powers of 2, or NULL */
    ptrdiff_t image, row; /* of qkv, from one to the next */
    long tokens, parts;   /* parts: of a head's queries, the kernel's own */
    int images, heads, width, threads;
    float scale;
};
struct attention_gradient {
    const float *qkv, *out, *logs;
    const float *gradient; /* of out, with rows and images of its own */
    float *to_qkv;         /* images x tokens x (queries, keys, values) x heads x width */
    ptrdiff_t image, row, gradient_image, gradient_row;
    long tokens;
    int images, heads, width, threads;
    float scale;
};

/* What a change of queries, keys, values and `near` would change, from the gradient of `out`. */
struct factor_gradient {
    const float *query, *key, *value, *near, *gradient; /* as above; gradient: images x tokens x channels */
    const float *contexts;                              /* as `factor` left them */
    float *to_query, *to_key, *to_value;                /* images x tokens x to_row */
    float *to_near;                                     /* as near, or NULL */
    float *matrices;                                    /* the kernel's own */
    ptrdiff_t query_row, key_row, value_row, to_row;
    long tokens;
    int images, heads, width, prefix, threads;
    float scale;
};

/* Tokens on another grid: its rows and columns as weighted sums. Of each the list of what it is made of, one behind the
other, and where in that list it starts. */
struct resample {
    const float *x; /* images x (prefix + height x width of the source) x channels */
    float *out;
    const int *row_starts, *rows;
    const float *row_weights;
    const int *column_starts, *columns;
    const float *column_weights;
    int images, prefix, source_height, source_width, height, width, channels;
    int adds, threads; /* adds: to what is in out */
};

/* The gradient of a weight: out = left^T right, added to what is there if it `adds`, and so the sums of left over its rows. */
struct weight {
    const float *left, *right; /* rows x high, rows x wide */
    float *out, *sums;         /* high x wide; high, or NULL */
    ptrdiff_t left_row, right_row;
    long rows;
    int high, wide, adds, threads;
    float *others; /* the kernel's own, as is what follows: rows at work, pieces of rows and columns that are tasks */
    long from, until, shares, down, across;
};

/* Back through s r^2 + b, r at least 0: out = gradient * r * slope, and the sums of gradient * r^2 and of gradient. */
struct star {
    const float *gradient, *kept; /* kept: r */
    float *out;
    double *sums; /* for each of `tasks` two */
    long count, tasks;
    float slope;
    int threads;
};

/* out = f(left right + bias), or with the numbers `beside` it: a residual sum, or a gradient through an activation */
struct linear {
    const float *left, *right, *bias; /* rows x depth, depth x columns, columns or NULL */
    float *packed, *out;              /* packed: room for depth x columns rounded up to 32, or NULL */
    const float *beside;            /* rows x columns, as out */
    float *aside;                   /* a second output, as out */
    const float *residual, *branch; /* columns: factors of the residual sum, or NULL: 1 */
    const float *norm, *norm_bias;  /* depth: of rows of left, which are normed first, or NULL */
    ptrdiff_t left_row, left_column, right_row, out_row;
    long rows, groups;
    int columns, depth;
    int right_turned; /* it lies there as columns x depth */
    int after, threads;
    int ready;     /* `packed` holds the weight already */
    float then[2]; /* a factor and a summand behind the squared ReLU */
    float eps;     /* of the norm */
};

/* Two of them, one behind the other; `left` of the second is not used. `out` of the first, or NULL: rows x columns of the hidden
layer, without gaps. */
struct mlp {
    struct linear first, second;
    long tasks;
};

/* The mean over a window of an image minus its middle, and a residual sum: out = residual stream + branch that. */
struct pool {
    const float *x, *stream;        /* images x height x width x channels; stream may be NULL: no sum */
    const float *residual, *branch; /* channels, or NULL: 1 */
    float *out;
    int images, height, width, channels;
    int size; /* of the window, odd; what is outside of the image does not count */
    int back; /* the gradient of x instead, from that of the output in its place */
    int threads;
};

/* A norm over all rows of an image. */
struct whole_norm {
    const float *x, *weight, *bias; /* images x rows x width, width, width or NULL */
    float *out, *sums;              /* sums are the kernel's own */
    int images, rows, width, threads;
    float eps;
};

struct kernels {
    int lanes;
    int (*mlp)(struct mlp *);
    int (*linear)(const struct linear *);
    int (*lstm)(const struct lstms *);
    int (*mlstm)(struct mlstm *);
    int (*longconv)(const struct longconv *);
    int (*norm)(const struct norm *);
    int (*depthwise)(struct depthwise *);
    int (*taps)(struct taps *);
    int (*star)(struct star *);
    int (*weight)(struct weight *);
    int (*factor)(struct factor *);
    int (*attention)(struct attention *);
    int (*attention_gradient)(struct attention_gradient *);
    int (*factor_gradient)(struct factor_gradient *);
    int (*resample)(const struct resample *);
    int (*heads)(const struct heads *);
    int (*blocks)(struct blocks_gradient *);
    int (*pool)(const struct pool *);
    int (*whole_norm)(struct whole_norm *);
};

/* What callers hand over to kernels, by name: the one definition that both C and Python read.

C makes structs and enums of these lists; the library describes them (`describe`), and Python reads that description when
it loads the library. Sizes are in elements. */
#include <stddef.h>

typedef const float *floats_in;
typedef float *floats_out; /* also room that a kernel works in */
typedef double *doubles_out;
typedef const int *ints_in;
typedef int int_3[3];
typedef float float_2[2];

/* Numbers that both sides have to agree on. */
#define CONSTANTS(_) \
    _(PACKED_COLUMNS, 32)  /* that the columns of a packed weight are rounded up to: the widest panel of all levels */ \
    _(LSTM_UNITS, 16)      /* that the units of a packed LSTM are rounded up to */ \
    _(CONTEXT_COLUMNS, 16) /* that rows of what factorised attention keeps are rounded up to */ \
    _(STAR_AT_ONCE, 16384) /* numbers of a task of `star` */

/* What follows a product: of sums x and numbers y beside them. The last five: residual y + branch x; x times the root of y;
x, and aside GELU(x); x times the slope of GELU at y, and aside GELU(y); the squared ReLU, and aside the ReLU. */
#define ACTIVATIONS(_) \
    _(NOTHING, none) _(GELU, gelu) _(RELU, relu) _(SQUARED_RELU, squared_relu) _(SILU, silu) \
    _(ONTO, onto) _(TIMES_ROOT, times_root) _(AND_GELU, and_gelu) _(GELU_SLOPE, gelu_slope) _(AND_RELU, and_relu)

/* Kernels and the structs that they take. */
#define KERNELS(_) \
    _(norm, norm) _(linear, linear) _(mlp, mlp) _(depthwise, depthwise) \
    _(mlstm, mlstm) _(longconv, longconv) _(pool, pool) _(attention, attention) \
    _(factor, factor) _(lstm, lstms) _(resample, resample) _(whole_norm, whole_norm) \
    _(heads, heads) _(taps, taps) _(star, star) _(weight, weight) \
    _(attention_gradient, attention_gradient) _(factor_gradient, factor_gradient) _(blocks_gradient, blocks_gradient) \
    _(patches, patches) _(put, put) _(mean, mean)

#define STRUCTS(_) \
    _(lstm) _(lstms) _(mlstm) _(heads) _(blocks_gradient) _(longconv) _(norm) _(depthwise) \
    _(taps) _(factor) _(attention) _(attention_gradient) _(factor_gradient) _(resample) _(weight) _(star) \
    _(linear) _(mlp) _(pool) _(whole_norm) \
    _(patches) _(put) _(mean)

/* An LSTM over the rows or columns of maps, in one direction. */
#define FIELDS_OF_lstm(_) \
    _(floats_in, inputs) /* images x height x width x 4 gates x units: the share of the inputs and their bias */ \
    _(floats_in, weight) /* 4 gates x units x units, of the last output */ \
    _(floats_in, bias) /* 4 gates x units */ \
    _(floats_out, packed) /* room for the weight as steps want it: blocks of 16 units x units x 4 x 16 */ \
    _(floats_out, out) /* images x height x width x out_row */ \
    _(ptrdiff_t, out_row) \
    _(int, height) _(int, width) _(int, units) \
    _(int, vertical) _(int, backwards)

/* Such layers over the same maps: their outputs lie side by side. */
#define FIELDS_OF_lstms(_) \
    _(lstm_4, each) /* as many as `count` */ \
    _(int, count) _(int, images) _(int, packs) _(int, threads) /* packs: whether weights are to be packed first */ \
    _(int, many) /* sequences of a task: the kernel's own */

/* The cell of an mLSTM layer with all that surrounds it but the linear layers. */
#define FIELDS_OF_mlstm(_) \
    _(floats_in, source) _(floats_in, values) _(floats_in, gate) \
       /* images x steps x row; a walk backwards starts at the last of all, with rows below 0 */ \
    _(ptrdiff_t, source_row) _(ptrdiff_t, values_row) _(ptrdiff_t, gate_row) _(ptrdiff_t, out_row) \
    _(floats_in, projections) /* 3 (queries, keys, values) x 4 turns x channels */ \
    _(floats_in, biases) /* 3 x channels, or NULL */ \
    _(floats_in, gate_weights) /* heads x 2 gates x 2 (source, values) x channels */ \
    _(floats_in, gate_biases) /* heads x 2 gates */ \
    _(floats_in, norm) _(floats_in, norm_bias) _(floats_in, skip) /* channels; norm_bias may be NULL */ \
    _(floats_out, out) _(floats_out, gates) /* gates: room for 2 of every head and step */ \
    _(int, images) _(int, steps) _(int, heads) _(int, width) _(int, chunk) _(int, threads) \
    _(int, gated) /* the gate has been through its activation */ \
    _(float, eps) _(float, norm_eps)

/* Blocks of 4 x 4 weights along the channels of rows, head by head. */
#define FIELDS_OF_heads(_) \
    _(floats_in, x) \
    _(floats_in, weights) /* 4 turns x channels */ \
    _(floats_in, bias) /* channels, or NULL */ \
    _(floats_out, out) \
    _(ptrdiff_t, x_row) _(ptrdiff_t, x_head) _(ptrdiff_t, out_row) _(ptrdiff_t, out_head) \
       /* from a row or a head to the next */ \
    _(long, rows) \
    _(int, heads) _(int, width) _(int, threads)

/* What a change of every weight of such blocks, and of the bias, would change. */
#define FIELDS_OF_blocks_gradient(_) \
    _(floats_in, x) _(floats_in, gradient) \
    _(floats_out, out) /* (4 turns and the bias) x channels */ \
    _(floats_out, sums) /* the kernel's own, as is `shares` */ \
    _(ptrdiff_t, x_row) _(ptrdiff_t, x_head) _(ptrdiff_t, gradient_row) _(ptrdiff_t, gradient_head) \
    _(long, rows) \
    _(int, heads) _(int, width) _(int, shares) _(int, threads)

/* A convolution of every channel with a kernel as large as the map, through the Fourier transform. */
#define FIELDS_OF_longconv(_) \
    _(floats_in, x) /* images x height x width x channels; NULL: only the spectrum is wanted */ \
    _(floats_in, taps) /* of the kernels: high x wide x channels, the place that meets itself at (above, before) */ \
    _(floats_out, spectrum) /* blocks of 2 LANES channels x half of the columns x rows x 4 x LANES; NULL: made anew */ \
    _(floats_in, factor) /* of every output, with rows of factor_row, or NULL */ \
    _(floats_out, out) \
    _(ptrdiff_t, factor_row) \
    _(int, images) _(int, height) _(int, width) _(int, channels) \
    _(int, rows) _(int, columns) /* periods */ \
    _(int, high) _(int, wide) _(int, above) _(int, before) \
    _(floats_in, row_turns) _(floats_in, column_turns) /* cos and sin of the whole circle in so many steps */ \
    _(int, threads)

/* Layer norm of the product of two, or of one where `other` is NULL. */
#define FIELDS_OF_norm(_) \
    _(floats_in, one) _(floats_in, other) \
    _(floats_in, weight) /* or NULL: no norm */ \
    _(floats_in, bias) \
    _(floats_out, out) \
    _(ptrdiff_t, one_row) _(ptrdiff_t, other_row) \
    _(long, rows) \
    _(int, width) _(int, threads) \
    _(float, eps)

/* Small kernels over every channel; out = f(first part) * f(second part), normed, and aside = f(third part). */
#define FIELDS_OF_depthwise(_) \
    _(floats_in, x) /* images x height x width x row */ \
    _(floats_in, weight) /* channels of x x high x wide */ \
    _(floats_in, bias) /* or NULL */ \
    _(floats_in, norm) /* or NULL: no norm */ \
    _(floats_out, out) _(floats_out, aside) /* images x height x width x channels */ \
    _(floats_out, packed) /* the kernel's own, as is `strip`: rows of a task */ \
    _(ptrdiff_t, row) _(ptrdiff_t, image) _(ptrdiff_t, out_row) _(ptrdiff_t, out_image) \
       /* from a pixel or an image to the next */ \
    _(int_3, part) /* where in a pixel the channels of a part begin; -1: there is none */ \
    _(int, images) _(int, height) _(int, width) _(int, channels) \
    _(int, high) _(int, wide) _(int, above) _(int, before) \
    _(int, turned) /* weights are read from the last tap to the first */ \
    _(int, adds) /* the first part is added to what is there */ \
    _(int, after) _(int, strip) _(int, threads) \
    _(float, eps)

/* What a change of every tap of small kernels over every channel would change, for maps that keep their size. */
#define FIELDS_OF_taps(_) \
    _(floats_in, x) _(floats_in, gradient) /* images x height x width x row: of the input, of the output */ \
    _(floats_out, out) /* channels x high x wide */ \
    _(floats_out, bias) /* channels: the sums of the gradient, or NULL */ \
    _(floats_out, sums) /* the kernel's own, as is `shares` */ \
    _(ptrdiff_t, x_row) _(ptrdiff_t, x_image) _(ptrdiff_t, gradient_row) _(ptrdiff_t, gradient_image) \
       /* from a pixel or an image to the next */ \
    _(int, images) _(int, height) _(int, width) _(int, channels) \
    _(int, high) _(int, wide) _(int, above) _(int, before) /* wide: 3, 5 or 7 */ \
    _(int, shares) _(int, threads)

/* Factorised attention; out = scale query (softmax(key)^T value) + query * near. */
#define FIELDS_OF_factor(_) \
    _(floats_in, query) _(floats_in, key) _(floats_in, value) /* images x tokens x row: heads side by side */ \
    _(floats_in, near) /* images x tokens behind the first `prefix` x channels, or NULL */ \
    _(floats_out, out) /* images x tokens x channels */ \
    _(floats_out, contexts) \
       /* room for every image and head: (width + 2) x width padded to 16; the last are peaks and sums */ \
    _(ptrdiff_t, query_row) _(ptrdiff_t, key_row) _(ptrdiff_t, value_row) \
    _(long, tokens) \
    _(int, images) _(int, heads) _(int, width) _(int, prefix) _(int, threads) \
    _(float, scale)

/* Softmax attention of queries, keys and values, which lie behind each other in every token. */
#define FIELDS_OF_attention(_) \
    _(floats_in, qkv) /* images x tokens x (queries, keys, values) x heads x width */ \
    _(floats_out, out) /* images x tokens x heads x width */ \
    _(floats_out, logs) /* images x heads x tokens: of the sums of powers of 2, or NULL */ \
    _(ptrdiff_t, image) _(ptrdiff_t, row) /* of qkv, from one to the next */ \
    _(long, tokens) _(long, parts) /* parts: of a head's queries, the kernel's own */ \
    _(int, images) _(int, heads) _(int, width) _(int, threads) \
    _(float, scale)

/* What a change of queries, keys and values would change, from the gradient of `out`. */
#define FIELDS_OF_attention_gradient(_) \
    _(floats_in, qkv) _(floats_in, out) _(floats_in, logs) \
    _(floats_in, gradient) /* of out, with rows and images of its own */ \
    _(floats_out, to_qkv) /* images x tokens x (queries, keys, values) x heads x width */ \
    _(ptrdiff_t, image) _(ptrdiff_t, row) _(ptrdiff_t, gradient_image) _(ptrdiff_t, gradient_row) \
    _(long, tokens) \
    _(int, images) _(int, heads) _(int, width) _(int, threads) \
    _(float, scale)

/* What a change of queries, keys, values and `near` would change, from the gradient of `out`. */
#define FIELDS_OF_factor_gradient(_) \
    _(floats_in, query) _(floats_in, key) _(floats_in, value) _(floats_in, near) _(floats_in, gradient) \
       /* as above; gradient: images x tokens x channels */ \
    _(floats_in, contexts) /* as `factor` left them */ \
    _(floats_out, to_query) _(floats_out, to_key) _(floats_out, to_value) /* images x tokens x to_row */ \
    _(floats_out, to_near) /* as near, or NULL */ \
    _(floats_out, matrices) /* the kernel's own */ \
    _(ptrdiff_t, query_row) _(ptrdiff_t, key_row) _(ptrdiff_t, value_row) _(ptrdiff_t, to_row) \
    _(long, tokens) \
    _(int, images) _(int, heads) _(int, width) _(int, prefix) _(int, threads) \
    _(float, scale)

/* Tokens on another grid: its rows and columns as weighted sums. Of each the list of what it is made of, one behind the
other, and where in that list it starts. */
#define FIELDS_OF_resample(_) \
    _(floats_in, x) /* images x (prefix + height x width of the source) x channels */ \
    _(floats_out, out) \
    _(ints_in, row_starts) _(ints_in, rows) \
    _(floats_in, row_weights) \
    _(ints_in, column_starts) _(ints_in, columns) \
    _(floats_in, column_weights) \
    _(int, images) _(int, prefix) _(int, source_height) _(int, source_width) _(int, height) _(int, width) _(int, channels) \
    _(int, adds) _(int, threads) /* adds: to what is in out */

/* The gradient of a weight: out = left^T right, added to what is there if it `adds`, and so the sums of left over its rows. */
#define FIELDS_OF_weight(_) \
    _(floats_in, left) _(floats_in, right) /* rows x high, rows x wide */ \
    _(floats_out, out) _(floats_out, sums) /* high x wide; high, or NULL */ \
    _(ptrdiff_t, left_row) _(ptrdiff_t, right_row) \
    _(long, rows) \
    _(int, high) _(int, wide) _(int, adds) _(int, threads) \
    _(floats_out, others) \
       /* the kernel's own, as is what follows: rows at work, pieces of rows and columns that are tasks */ \
    _(long, from) _(long, until) _(long, shares) _(long, down) _(long, across)

/* Back through s r^2 + b, r at least 0: out = gradient * r * slope, and the sums of gradient * r^2 and of gradient. */
#define FIELDS_OF_star(_) \
    _(floats_in, gradient) _(floats_in, kept) /* kept: r */ \
    _(floats_out, out) \
    _(doubles_out, sums) /* for each of `tasks` two */ \
    _(long, count) _(long, tasks) \
    _(float, slope) \
    _(int, threads)

/* out = f(left right + bias), or with the numbers `beside` it: a residual sum, or a gradient through an activation */
#define FIELDS_OF_linear(_) \
    _(floats_in, left) _(floats_in, right) _(floats_in, bias) /* rows x depth, depth x columns, columns or NULL */ \
    _(floats_out, packed) _(floats_out, out) /* packed: room for depth x columns rounded up to 32, or NULL */ \
    _(floats_in, beside) /* rows x columns, as out */ \
    _(floats_out, aside) /* a second output, as out */ \
    _(floats_in, residual) _(floats_in, branch) /* columns: factors of the residual sum, or NULL: 1 */ \
    _(floats_in, norm) _(floats_in, norm_bias) /* depth: of rows of left, which are normed first, or NULL */ \
    _(ptrdiff_t, left_row) _(ptrdiff_t, left_column) _(ptrdiff_t, right_row) _(ptrdiff_t, out_row) \
    _(long, rows) _(long, groups) \
    _(int, columns) _(int, depth) \
    _(int, right_turned) /* it lies there as columns x depth */ \
    _(int, after) _(int, threads) \
    _(int, ready) /* `packed` holds the weight already */ \
    _(float_2, then) /* a factor and a summand behind the squared ReLU */ \
    _(float, eps) /* of the norm */

/* Two of them, one behind the other; `left` of the second is not used. `out` of the first, or NULL: rows x columns of the hidden
layer, without gaps. */
#define FIELDS_OF_mlp(_) \
    _(struct_linear, first) _(struct_linear, second) \
    _(long, tasks)

/* The mean over a window of an image minus its middle, and a residual sum: out = residual stream + branch that. */
#define FIELDS_OF_pool(_) \
    _(floats_in, x) _(floats_in, stream) /* images x height x width x channels; stream may be NULL: no sum */ \
    _(floats_in, residual) _(floats_in, branch) /* channels, or NULL: 1 */ \
    _(floats_out, out) \
    _(int, images) _(int, height) _(int, width) _(int, channels) \
    _(int, size) /* of the window, odd; what is outside of the image does not count */ \
    _(int, back) /* the gradient of x instead, from that of the output in its place */ \
    _(int, threads)

/* A norm over all rows of an image. */
#define FIELDS_OF_whole_norm(_) \
    _(floats_in, x) _(floats_in, weight) _(floats_in, bias) /* images x rows x width, width, width or NULL */ \
    _(floats_out, out) _(floats_out, sums) /* sums are the kernel's own */ \
    _(int, images) _(int, rows) _(int, width) _(int, threads) \
    _(float, eps)

/* Patches of maps as rows for a product: images x out_height x out_width x numbers of a patch, zero outside of the map. */
#define FIELDS_OF_patches(_) \
    _(floats_in, x) _(floats_out, out) \
    _(ptrdiff_t, x_image) _(ptrdiff_t, x_row) _(ptrdiff_t, x_column) _(ptrdiff_t, x_channel) /* from one to the next */ \
    _(int, images) _(int, height) _(int, width) _(int, channels) \
    _(int, high) _(int, wide) _(int, stride) _(int, above) _(int, before) _(int, out_height) _(int, out_width) \
    _(int, channels_first) /* a patch is channels x rows x columns, else rows x columns x channels */ \
    _(int, threads)

/* out = x + y, or x where y is NULL, row by row of images; a distance of 0 repeats what is there. */
#define FIELDS_OF_put(_) \
    _(floats_in, x) _(floats_in, y) _(floats_out, out) \
    _(ptrdiff_t, x_image) _(ptrdiff_t, x_row) _(ptrdiff_t, y_image) _(ptrdiff_t, y_row) \
    _(ptrdiff_t, out_image) _(ptrdiff_t, out_row) \
    _(long, images) _(long, rows) \
    _(int, width) _(int, threads)

/* The mean over the tokens of images. */
#define FIELDS_OF_mean(_) \
    _(floats_in, x) _(floats_out, out) \
    _(ptrdiff_t, x_image) _(ptrdiff_t, x_row) _(ptrdiff_t, out_row) \
    _(long, tokens) \
    _(int, images) _(int, width) _(int, threads)

#define AS_MEMBER(kind, name) kind name;
#define AS_STRUCT(name) \
    struct name { FIELDS_OF_##name(AS_MEMBER) }; \
    typedef struct name struct_##name, name##_4[4];
#define AS_NUMBER(name, value) name = value,
#define AS_ENUMERATOR(name, spelling) name,
STRUCTS(AS_STRUCT)
enum constants { CONSTANTS(AS_NUMBER) };
enum activations { ACTIVATIONS(AS_ENUMERATOR) };

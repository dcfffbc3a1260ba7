/* All kernels for vectors of LANES floats, as LEVEL. */
#include "kernels.h"
#include "vector.h"
#include "product.h"
#include "norm.h"
#include "linear.h"
#include "weight.h"
#include "recurrent.h"
#include "mlstm.h"
#include "longconv.h"
#include "depthwise.h"
#include "taps.h"
#include "factor.h"
#include "attention.h"
#include "resample.h"
#include "heads.h"
#include "pool.h"

const struct kernels LEVEL = {
    .lanes = LANES,
    .mlp = run_mlp,
    .linear = run_linear,
    .lstm = run_lstms,
    .mlstm = run_mlstm,
    .longconv = run_longconv,
    .norm = run_norm,
    .depthwise = run_depthwise,
    .taps = run_taps,
    .star = run_star,
    .weight = run_weight,
    .factor = run_factor,
    .factor_gradient = run_factor_gradient,
    .attention = run_attention,
    .attention_gradient = run_attention_gradient,
    .resample = run_resample,
    .heads = run_heads,
    .blocks = run_blocks,
    .pool = run_pool,
    .whole_norm = run_whole_norm,
};

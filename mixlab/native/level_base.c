/* The kernels for vectors of 4 floats. */
#define LANES 4
#include "kernels.h"
#include "vector.h"
#include "product.h"
#include "norm.h"
#include "linear.h"
#include "recurrent.h"
#include "mlstm.h"
#include "longconv.h"
#include "depthwise.h"
#include "taps.h"
#include "factor.h"
#include "resample.h"
#include "heads.h"

const struct kernels kernels_base = {LANES, run_mlp, run_linear, run_lstms, run_mlstm, run_longconv, run_norm,
                                     run_depthwise, run_taps,
                                     run_star, run_factor, run_factor_gradient, run_resample, run_heads, run_blocks};

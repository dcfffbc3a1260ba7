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
#include "tokens.h"

_Static_assert(PACKED_COLUMNS % WIDE == 0 && LSTM_UNITS == BLOCK && CONTEXT_COLUMNS == PANEL, "as layouts.h says");

#define AS_FUNCTION(kernel, about) .kernel = run_##kernel,
const struct kernels LEVEL = {.lanes = LANES, KERNELS(AS_FUNCTION)};

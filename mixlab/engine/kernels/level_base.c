/* The kernels for vectors of 4 floats. */
#define LANES 4
#define LEVEL kernels_base
#include "level.h"

/* The kernels for vectors of 8 floats. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define LANES 8
#define LEVEL kernels_avx2
#include "level.h"
#endif

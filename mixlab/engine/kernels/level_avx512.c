/* The kernels for vectors of 16 floats. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define LANES 16
#define LEVEL kernels_avx512
#include "level.h"
#endif

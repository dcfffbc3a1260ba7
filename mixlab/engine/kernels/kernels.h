/* What a level of instructions offers. Every kernel returns 0, or 1 if there was no memory. */
#include "layouts.h"
#include "threads.h"

#define AS_POINTER(kernel, about) int (*kernel)(struct about *);
struct kernels {
    int lanes;
    KERNELS(AS_POINTER)
};

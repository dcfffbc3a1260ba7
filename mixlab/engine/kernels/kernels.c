/* The library: which level of instructions serves, and what it offers by name.

It is loaded by address, not by Python's means; the module exists because installers build modules. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kernels.h"

extern const struct kernels kernels_base;
#if defined(__x86_64__)
extern const struct kernels kernels_avx2, kernels_avx512;
#endif

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

static const struct kernels *chosen = &kernels_base;

/* The widest level up to `most` lanes that this processor has. Returns its lanes. */
EXPORT int mixlab_choose(int most) {
    const struct kernels *best = &kernels_base;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (most >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = &kernels_avx2;
    if (most >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        best = &kernels_avx512;
#endif
    chosen = best;
    return chosen->lanes;
}

/* A quota of processor time is the caller's to find out. */
EXPORT void mixlab_limit_threads(int most) { limit_threads(most); }

EXPORT void mixlab_use_team(start_team starter) { use_team(starter); }

EXPORT int mixlab_count_workers(void) { return count_workers(); }

/* Callers tell the size of what they hand over: that of other sources is refused. */
#define AS_EXPORT(kernel, about) \
    EXPORT int mixlab_##kernel(struct about *at, size_t size) { return size == sizeof(*at) ? chosen->kernel(at) : 1; }
KERNELS(AS_EXPORT)

/* Kernels one behind the other: for each a number and the size of what it is handed, which follows. */
struct step {
    long kernel;
    size_t size;
};
typedef int (*any_kernel)(void *, size_t);
#define AS_ADDRESS(kernel, about) (any_kernel)mixlab_##kernel,
static const any_kernel numbered[] = {KERNELS(AS_ADDRESS)};

static int run_steps(char *steps, size_t size) {
    for (char *end = steps + size; steps < end;) {
        const struct step *step = (const struct step *)steps;
        if (step->kernel < 0 || step->kernel >= (long)(sizeof(numbered) / sizeof(*numbered))) return 1;
        steps += sizeof(*step);
        if (numbered[step->kernel](steps, step->size)) return 1;
        steps += (step->size + 7) / 8 * 8;
    }
    return 0;
}

/* `apart`: nothing of PyTorch comes in front of these steps or after them, so that the pool of this library's own serves. */
EXPORT int mixlab_steps(char *steps, size_t size, int apart) {
    work_apart(apart);
    int failed = run_steps(steps, size);
    work_apart(-apart);
    return failed;
}

/* Lines of words that describe `layouts.h` as it was built. */
struct text {
    char *at;
    size_t size, room;
};

static void write_line(struct text *to, const char *form, ...) {
    va_list values;
    va_start(values, form);
    size_t left = to->size < to->room ? to->room - to->size : 0;
    to->size += vsnprintf(left ? to->at + to->size : NULL, left, form, values);
    va_end(values);
}

#define AS_CONSTANT_LINE(name, value) write_line(&text, "constant %s %d\n", #name, name);
#define AS_ACTIVATION_LINE(name, spelling) write_line(&text, "activation %s %d\n", #spelling, name);
#define AS_KERNEL_LINE(kernel, about) write_line(&text, "kernel %s %s\n", #kernel, #about);
#define AS_FIELD_LINE(kind, name) write_line(&text, "field %s %s %zu %zu\n", #name, #kind, offsetof(SELF, name), sizeof(self->name));
#define AS_STRUCT_LINES(name) \
    { \
        typedef struct name SELF; \
        SELF *self; \
        write_line(&text, "struct %s %zu\n", #name, sizeof(SELF)); \
        FIELDS_OF_##name(AS_FIELD_LINE) \
    }

/* Writes as much of the description as there is room for, and returns the size of all of it. */
EXPORT size_t mixlab_describe(char *to, size_t room) {
    struct text text = {to, 0, room};
    CONSTANTS(AS_CONSTANT_LINE)
    ACTIVATIONS(AS_ACTIVATION_LINE)
    KERNELS(AS_KERNEL_LINE)
    STRUCTS(AS_STRUCT_LINES)
    return text.size;
}

/* Whether pieces of memory hold the same. */
struct pieces {
    const char *const *now, *const *before;
    const size_t *sizes;
    int count;
    int different;
};
#define SLICE ((size_t)1 << 16)

static int compare(void *about, long index) {
    struct pieces *at = about;
    for (int i = 0; i < at->count; i++) {
        long slices = (at->sizes[i] + SLICE - 1) / SLICE;
        if (index < slices) {
            size_t start = index * SLICE, left = at->sizes[i] - start, size = left < SLICE ? left : SLICE;
            if (!__atomic_load_n(&at->different, __ATOMIC_RELAXED) && memcmp(at->now[i] + start, at->before[i] + start, size))
                __atomic_store_n(&at->different, 1, __ATOMIC_RELAXED);
            return 0;
        }
        index -= slices;
    }
    return 0;
}

EXPORT int mixlab_same(const char *const *now, const char *const *before, const size_t *sizes, int count, int threads) {
    struct pieces pieces = {now, before, sizes, count, 0};
    long slices = 0;
    size_t all = 0;
    for (int i = 0; i < count; i++) slices += (sizes[i] + SLICE - 1) / SLICE, all += sizes[i];
    work_apart(1); /* what follows may be a whole model */
    share(compare, &pieces, slices, all > 4 * SLICE ? threads : 1);
    work_apart(-1);
    return !pieces.different;
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = 0};
PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }

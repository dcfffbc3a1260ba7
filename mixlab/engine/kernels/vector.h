/* Vectors of LANES floats in the way of GNU compilers, and the functions of them that gates need. */
#if !defined(__GNUC__) || defined(__clang__)
#error "GCC's vectors and shuffles are needed; without these kernels PyTorch does their work"
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if LANES == 16
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any address */

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec x) { *(loose *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }
#if LANES == 16
INLINE vec choose(ivec mask, vec yes, vec no) { return _mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), no, yes); }
#else
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
#endif

/* The instructions of Intel give their second operand where one is not a number: `than`. */
#if LANES == 16
INLINE vec larger_of(vec x, vec than) { return _mm512_max_ps(x, than); }
INLINE vec smaller_of(vec x, vec than) { return _mm512_min_ps(x, than); }
INLINE vec square_root(vec x) { return _mm512_sqrt_ps(x); }
#elif LANES == 8 && defined(__AVX__)
INLINE vec larger_of(vec x, vec than) { return (vec)__builtin_ia32_maxps256(x, than); }
INLINE vec smaller_of(vec x, vec than) { return (vec)__builtin_ia32_minps256(x, than); }
INLINE vec square_root(vec x) { return (vec)__builtin_ia32_sqrtps256(x); }
#else
INLINE vec larger_of(vec x, vec than) { return choose(x > than, x, than); }
INLINE vec smaller_of(vec x, vec than) { return choose(x < than, x, than); }
INLINE vec square_root(vec x) {
    for (int lane = 0; lane < LANES; lane++) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
}
#endif
/* What is not a number stays so. */
INLINE vec at_least(vec x, float low) { return larger_of(all(low), x); }
INLINE vec at_most(vec x, float high) { return smaller_of(all(high), x); }

/* The first `count` of a vector, where there may be no more. */
#if LANES == 16
INLINE __mmask16 mask_of(int count) { return count >= LANES ? 0xffff : count > 0 ? (1u << count) - 1 : 0; }
INLINE vec load_some(const float *from, int count) { return _mm512_maskz_loadu_ps(mask_of(count), from); }
INLINE void store_some(float *to, vec x, int count) { _mm512_mask_storeu_ps(to, mask_of(count), x); }
#else
INLINE vec load_some(const float *from, int count) {
    if (count >= LANES) return load(from);
    float some[LANES] = {0};
    if (count > 0) memcpy(some, from, count * sizeof(float));
    return load(some);
}

INLINE void store_some(float *to, vec x, int count) {
    if (count >= LANES) store(to, x);
    else if (count > 0) {
        float some[LANES];
        store(some, x);
        memcpy(to, some, count * sizeof(float));
    }
}
#endif

INLINE vec first_of(vec x, int count) { /* zeros behind them */
    if (count >= LANES) return x;
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return choose(lane < count, x, (vec){0});
}

/* The sum of a vector: halves upon halves. */
INLINE float sum(vec x) {
#if LANES == 16
    x += __builtin_shuffle(x, (ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    x += __builtin_shuffle(x, (ivec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
#elif LANES == 8
    x += __builtin_shuffle(x, (ivec){4, 5, 6, 7, 0, 1, 2, 3});
#endif
    return (x[0] + x[2]) + (x[1] + x[3]);
}

/* x times 2^whole, which may be infinity; nothing where `none`. The power is at least -125. */
INLINE vec scaled_by_power(vec x, vec whole, ivec shifted, ivec none) {
#if LANES == 16
    (void)shifted;
    return _mm512_maskz_scalef_ps(_knot_mask16(_mm512_movepi32_mask((__m512i)none)), x, whole);
#else
    (void)whole;
    x *= (vec)((shifted + 126) << 23); /* by half of it, which is a number even where it is not */
    return choose(none, (vec){0}, x + x);
#endif
}

/* e^x within 2 units in the last place; nothing below e^-86.5, where numbers lose their precision. */
INLINE vec exponential(vec x) {
    ivec none = x < -86.5f;
    x = at_most(at_least(x, -86.5f), 89.0f);
    const vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    vec shifted = x * 1.44269504088896341f + magic;
    vec whole = shifted - magic;
    vec rest = x - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    vec even = all(1.9875691500e-4f);
    even = even * rest + 1.3981999507e-3f;
    even = even * rest + 8.3334519073e-3f;
    even = even * rest + 4.1665795894e-2f;
    even = even * rest + 1.6666665459e-1f;
    even = even * rest + 5.0000001201e-1f;
    vec result = even * rest * rest + rest + 1.0f;
    return scaled_by_power(result, whole, (ivec)shifted - (ivec)magic, none);
}

/* log(sigmoid(x)); the logarithm of 1 + y as 2 artanh(y / (2 + y)), exact for small y. */
INLINE vec log_sigmoid(vec x) {
    vec y = exponential(choose(x < 0.0f, x, -x)), s = y / (2.0f + y), square = s * s;
    vec series = all(1.0f / 13);
    series = series * square + 1.0f / 11;
    series = series * square + 1.0f / 9;
    series = series * square + 1.0f / 7;
    series = series * square + 1.0f / 5;
    series = series * square + 1.0f / 3;
    series = series * square + 1.0f;
    return choose(x < 0.0f, x, (vec){0}) - 2.0f * s * series;
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE vec hyperbolic_tangent(vec x) {
    vec square = x * x;
    vec small = all(-5.70498872745e-3f);
    small = small * square + 2.06390887954e-2f;
    small = small * square - 5.37397155531e-2f;
    small = small * square + 1.33314422036e-1f;
    small = small * square - 3.33332819422e-1f;
    small = small * square * x + x;
    vec large = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    return choose((x < 0.625f) & (x > -0.625f), small, large);
}

/* Numbers that are wanted soon are asked for: a head's share of a row is too short for the processor to see it coming. */
INLINE void ask_for(const float *from, ptrdiff_t count) {
    for (ptrdiff_t c = 0; c < count; c += 16) __builtin_prefetch(from + c);
}

INLINE int pieces_of(int size, int at_most) { return (size + at_most - 1) / at_most; }
INLINE int padded_to(int size, int multiple) { return pieces_of(size, multiple) * multiple; }

/* Working memory that vectors may lie in; NULL where there is none. */
INLINE float *claim(size_t floats) { return aligned_alloc(64, (floats * 4 + 127) / 64 * 64); }

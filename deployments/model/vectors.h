// Vectors as wide as the processor's registers, and the numbers in memory: float, or bfloat16 with HALF defined.

#pragma once

#include <stdint.h>
#include <string.h>

// Of wider vectors than the registers compilers make code that is several times as slow.
#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define LANES (WIDTH / 4)

typedef float vec __attribute__((vector_size(WIDTH)));
typedef int32_t ivec __attribute__((vector_size(WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(WIDTH)));
typedef uint16_t hvec __attribute__((vector_size(WIDTH / 2)));

#ifdef HALF // bfloat16
typedef uint16_t number;
static inline vec load(const number *from) {
    hvec bits;
    memcpy(&bits, from, sizeof bits);
    return (vec)(__builtin_convertvector(bits, uvec) << 16);
}
static inline float wide(number x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}
static inline number narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (number)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
typedef float number;
static inline vec load(const number *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}
static inline float wide(number x) { return x; }
static inline number narrow(float x) { return x; }
#endif

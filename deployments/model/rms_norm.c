// The root mean square norm of rows: each number times a scale over the root of its row's mean square.
//
// Each row is computed by itself, in the same order.

#include "vectors.h"

#include <math.h>

#define SUMS 4 // vectors that add up squares, so that additions need not wait for each other

static float mean_square(const number *x, int64_t size) {
    vec sum[SUMS] = {};
    int64_t i = 0;
    for (; i + SUMS * LANES <= size; i += SUMS * LANES)
        for (int s = 0; s < SUMS; s++) {
            const vec part = load(x + i + s * LANES);
            sum[s] += part * part;
        }
    for (; i + LANES <= size; i += LANES) {
        const vec part = load(x + i);
        sum[0] += part * part;
    }
    const vec whole = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = 0;
    for (int l = 0; l < LANES; l++) total += whole[l];
    for (; i < size; i++) total += wide(x[i]) * wide(x[i]);
    return total / (float)size;
}

// x and out [rows, size], scale [size]. With `rounded` a normalized number is rounded before it is scaled.
void rms_norm(const number *x, const float *scale, number *out, int64_t rows, int64_t size, float eps, int32_t rounded,
              int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const number *restrict from = x + row * size;
        number *restrict to = out + row * size;
        const float over = 1.0f / sqrtf(mean_square(from, size) + eps);
        if (rounded)
            for (int64_t i = 0; i < size; i++) to[i] = narrow(wide(narrow(wide(from[i]) * over)) * scale[i]);
        else
            for (int64_t i = 0; i < size; i++) to[i] = narrow(wide(from[i]) * over * scale[i]);
    }
}

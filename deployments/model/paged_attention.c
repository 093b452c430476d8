// Attention over keys and values in pages, for rows of many sequences in one call.
//
// Each query row is computed by itself, in the order of absolute positions: what it gives does not depend on which
// other rows there are. Layouts: keys [pages, kv_heads, head_dim, PAGE], values [pages, kv_heads, PAGE, value_dim]
// with value_dim a multiple of 16.

#include "vectors.h"

#include <math.h>
#include <stdlib.h>

#define PAGE 16
#define AHEAD 512 // numbers: how far ahead memory is fetched; a page's heads follow each other
#define MOST_SCORES (4 << 20) // bytes of a thread, for several key heads together
#define PARTS (PAGE / LANES) // vectors of a page's scores
#if WIDTH == 64
#define MOST 8 // query vectors that share a pass over the keys; their sums stay in registers, of which there are 32
#else
#define MOST 6 // of 32 registers with 4 lanes (24 sums), or 16 with 8 (12)
#endif

typedef struct {
    const number *query, *key, *value; // of this forward's rows; strides below, in numbers
    number *keys, *values;             // the pages of one layer
    number *out;                       // [rows, heads, value_width]
    const float *sinks;                // [heads], or NULL
    const int32_t *position;           // [rows]
    const int32_t *table;              // [rows] where the row's sequence begins in `pages`
    const int32_t *pages;              // page numbers of all sequences
    const int32_t *units;              // [unit_count, 2] first row and rows, of one sequence each
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int32_t rows, unit_count, heads, kv_heads, head_dim, value_width, value_dim, window, chunk, threads;
    float scaling, softcap;
} Call;

static inline vec choose(ivec which, vec a, vec b) { return (vec)(((ivec)a & which) | ((ivec)b & ~which)); }

static inline vec exponential(vec x) {
    const vec low = (vec){} - 87.3f;
    x = choose(x < low, low, x); // a NaN stays
    vec n = x * 1.44269504088896341f;
    ivec whole = __builtin_convertvector(n + choose(n < 0.0f, (vec){} - 0.5f, (vec){} + 0.5f), ivec);
    vec k = __builtin_convertvector(whole, vec);
    vec r = x - k * 0.693359375f + k * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((whole + 127) << 23);
}

// Where the keys and the values of a page and a key head begin.
static inline int64_t keys_at(const Call *c, int64_t page, int32_t kv_head) {
    return (page * c->kv_heads + kv_head) * c->head_dim * PAGE;
}
static inline int64_t values_at(const Call *c, int64_t page, int32_t kv_head) {
    return (page * c->kv_heads + kv_head) * PAGE * c->value_dim;
}

static void store(const Call *c) {
#pragma omp for schedule(static)
    for (int32_t row = 0; row < c->rows; row++) {
        const int32_t position = c->position[row], at = position % PAGE;
        const int64_t page = c->pages[c->table[row] + position / PAGE];
        for (int32_t head = 0; head < c->kv_heads; head++) {
            const number *key = c->key + row * c->key_row + head * c->key_head;
            const number *value = c->value + row * c->value_row + head * c->value_head;
            number *to = c->keys + keys_at(c, page, head) + at;
            for (int32_t d = 0; d < c->head_dim; d++) to[d * PAGE] = key[d];
            to = c->values + values_at(c, page, head) + at * c->value_dim;
            memcpy(to, value, c->value_width * sizeof(number));
            memset(to + c->value_width, 0, (c->value_dim - c->value_width) * sizeof(number));
        }
    }
}

// `count` query vectors times one page of keys; query [head_dim][MOST].
static inline __attribute__((always_inline)) void scores_of(
    const float *query, const number *keys, int32_t head_dim, const int count, vec *scores, int64_t stride) {
    vec sum[MOST * PARTS];
    for (int i = 0; i < count * PARTS; i++) sum[i] = (vec){};
    for (int32_t d = 0; d < head_dim; d++) {
        vec key[PARTS];
        for (int v = 0; v < PARTS; v++) key[v] = load(keys + d * PAGE + v * LANES);
        __builtin_prefetch(keys + d * PAGE + AHEAD);
        for (int n = 0; n < count; n++)
            for (int v = 0; v < PARTS; v++) sum[n * PARTS + v] += query[d * MOST + n] * key[v];
    }
    for (int n = 0; n < count; n++)
        for (int v = 0; v < PARTS; v++) scores[n * stride + v] = sum[n * PARTS + v];
}

static inline __attribute__((always_inline)) void outputs_of(
    const float *weights, int64_t stride, const number *values, int32_t dim, int32_t tokens, const int count, vec *out,
    int32_t chunks, const int wide_by) {
    // out [count][chunks], `wide_by` chunks of it in registers
    vec sum[MOST * 2];
    for (int n = 0; n < count; n++)
        for (int w = 0; w < wide_by; w++) sum[n * wide_by + w] = out[n * chunks + w];
    for (int32_t j = 0; j < tokens; j++) {
        vec value[2];
        for (int w = 0; w < wide_by; w++) value[w] = load(values + j * dim + w * LANES);
        for (int w = 0; w < wide_by; w++) __builtin_prefetch(values + j * dim + w * LANES + AHEAD);
        for (int n = 0; n < count; n++) {
            const float weight = weights[n * stride + j];
            for (int w = 0; w < wide_by; w++) sum[n * wide_by + w] += weight * value[w];
        }
    }
    for (int n = 0; n < count; n++)
        for (int w = 0; w < wide_by; w++) out[n * chunks + w] = sum[n * wide_by + w];
}

#define CASE(count, call)                                                                                              \
    case count: { enum { N = count }; call; } break;
#define DISPATCH(count, call)                                                                                          \
    switch (count) {                                                                                                   \
    CASE(1, call) CASE(2, call) CASE(3, call) CASE(4, call) CASE(5, call) MORE(call)                                   \
    default: { enum { N = MOST }; call; } break;                                                                       \
    }
#if MOST == 8
#define MORE(call) CASE(6, call) CASE(7, call)
#else
#define MORE(call)
#endif

// The first key that a row at `position` reads, maybe below 0.
static inline int32_t first_key(const Call *c, int32_t position) {
    if (c->chunk) return position - position % c->chunk;
    return c->window ? position - c->window + 1 : 0;
}

// Which tokens of page `p` a row at `position` reads, whose first key is at `from`.
static inline int32_t reads_from(int32_t from, int32_t p) {
    const int32_t low = from - p * PAGE;
    return low < 0 ? 0 : low > PAGE ? PAGE : low;
}
static inline int32_t reads_until(int32_t position, int32_t p) {
    const int32_t high = position + 1 - p * PAGE;
    return high < 0 ? 0 : high > PAGE ? PAGE : high;
}

static void add_values(const Call *c, const float *weights, int64_t stride, const number *values, int count, vec *out,
                       int32_t begin, int32_t until) {
    const int32_t tokens = until - begin;
    const int32_t dim = c->value_dim, chunks = dim / LANES;
    weights += begin;
    values += begin * dim;
    int32_t w = 0;
    for (; w + 2 <= chunks; w += 2)
        DISPATCH(count, outputs_of(weights, stride, values + w * LANES, dim, tokens, N, out + w, chunks, 2));
    for (; w < chunks; w++)
        DISPATCH(count, outputs_of(weights, stride, values + w * LANES, dim, tokens, N, out + w, chunks, 1));
}

// `count` query vectors, at most MOST, of each of `kv_heads` key heads from `kv_head` on: vector n is of row rows[n],
// and of head heads[n] of the first key head.
static void attend(const Call *c, int32_t kv_head, int32_t kv_heads, const int32_t *rows, const int32_t *heads,
                   int count, float *query, vec *scores, int64_t stride, vec *out) {
    const int32_t *pages = c->pages + c->table[rows[0]];
    const int32_t last = c->position[rows[count - 1]], first = c->position[rows[0]];
    const int32_t low_first = first_key(c, first), low_last = first_key(c, last);
    const int32_t from = low_first > 0 ? low_first / PAGE : 0;
    const int32_t until = last / PAGE + 1, chunks = c->value_dim / LANES, group = c->heads / c->kv_heads;
    const int64_t query_size = c->head_dim * MOST, scores_size = count * stride, out_size = count * chunks;
    for (int32_t h = 0; h < kv_heads; h++)
        for (int n = 0; n < count; n++) {
            const number *q = c->query + rows[n] * c->query_row + (heads[n] + h * group) * c->query_head;
            for (int32_t d = 0; d < c->head_dim; d++) query[h * query_size + d * MOST + n] = wide(q[d]) * c->scaling;
        }
    for (int32_t p = from; p < until; p++)
        for (int32_t h = 0; h < kv_heads; h++) {
            const number *keys = c->keys + keys_at(c, pages[p], kv_head + h);
            vec *to = scores + h * scores_size + (p - from) * PARTS;
            DISPATCH(count, scores_of(query + h * query_size, keys, c->head_dim, N, to, stride));
        }
    float total[kv_heads * count];
    ivec lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    const int32_t begin = from * PARTS, end = until * PARTS; // vectors of scores
    for (int i = 0; i < kv_heads * count; i++) {
        const int n = i % count, head = heads[n] + i / count * group;
        vec *mine = scores + i * stride;
        const int32_t position = c->position[rows[n]], low = first_key(c, position) - 1;
        const vec least = (vec){} - INFINITY;
        vec most = least;
        for (int32_t v = begin; v < end; v++) {
            const ivec key = lane + v * LANES;
            vec x = mine[v - begin];
            if (c->softcap > 0)
                for (int l = 0; l < LANES; l++) x[l] = tanhf(x[l] / c->softcap) * c->softcap;
            x = choose((key <= position) & (key > low), x, least);
            mine[v - begin] = x;
            most = choose(x > most, x, most);
        }
        float top = c->sinks ? c->sinks[head] : -INFINITY;
        for (int l = 0; l < LANES; l++) top = most[l] > top ? most[l] : top;
        vec sum = {};
        for (int32_t v = begin; v < end; v++) {
            const ivec key = lane + v * LANES;
            const vec weight = choose((key <= position) & (key > low), exponential(mine[v - begin] - top), (vec){});
            mine[v - begin] = weight;
            sum += weight;
        }
        total[i] = c->sinks ? expf(c->sinks[head] - top) : 0.0f;
        for (int l = 0; l < LANES; l++) total[i] += sum[l];
    }
    for (int32_t i = 0; i < kv_heads * out_size; i++) out[i] = (vec){};
    for (int32_t p = from; p < until; p++)
        for (int32_t h = 0; h < kv_heads; h++) {
            const number *values = c->values + values_at(c, pages[p], kv_head + h);
            const float *weights = (const float *)(scores + h * scores_size + (p - from) * PARTS);
            vec *to = out + h * out_size;
            const int32_t begins = reads_from(low_first, p), ends = reads_until(first, p);
            if (begins == reads_from(low_last, p) && ends == reads_until(last, p))
                add_values(c, weights, stride * LANES, values, count, to, begins, ends);
            else // a value that a row does not read may not be finite, and would reach it even with a weight of 0
                for (int n = 0; n < count; n++) {
                    const int32_t position = c->position[rows[n]], low = first_key(c, position);
                    const int32_t own_begin = reads_from(low, p), own_end = reads_until(position, p);
                    add_values(c, weights + n * stride * LANES, 0, values, 1, to + n * chunks, own_begin, own_end);
                }
        }
    for (int i = 0; i < kv_heads * count; i++) {
        const int32_t head = heads[i % count] + i / count * group;
        number *to = c->out + ((int64_t)rows[i % count] * c->heads + head) * c->value_width;
        const float *from_out = (const float *)(out + i * chunks);
        for (int32_t d = 0; d < c->value_width; d++) to[d] = narrow(from_out[d] / total[i]);
    }
}

static void unit(const Call *c, int32_t first, int32_t rows, int32_t kv_head, int32_t kv_heads, float *query,
                 vec *scores, int64_t stride, vec *out) {
    const int32_t group = c->heads / c->kv_heads;
    int32_t of_row[MOST], of_head[MOST];
    int count = 0;
    for (int32_t row = first; row < first + rows; row++)
        for (int32_t g = 0; g < group; g++) {
            of_row[count] = row;
            of_head[count++] = kv_head * group + g;
            if (count == MOST) {
                attend(c, kv_head, kv_heads, of_row, of_head, count, query, scores, stride, out);
                count = 0;
            }
        }
    if (count) attend(c, kv_head, kv_heads, of_row, of_head, count, query, scores, stride, out);
}

// Writes the rows' keys and values into their pages, then attends. Returns 0, or 1 where there is no memory.
int paged_attention(const Call *c) {
    int failed = 0;
    int32_t longest = 0, longest_single = 0;
    int64_t singles = 0; // keys of all single rows
    for (int32_t row = 0; row < c->rows; row++)
        if (c->position[row] >= longest) longest = c->position[row] + 1;
    for (int32_t u = 0; u < c->unit_count; u++) {
        if (c->units[2 * u + 1] != 1) continue;
        const int32_t position = c->position[c->units[2 * u]];
        const int32_t low = first_key(c, position), keys = position + 1 - (low > 0 ? low : 0);
        singles += keys;
        if (keys > longest_single) longest_single = keys;
    }
    const int64_t stride = ((longest + PAGE - 1) / PAGE + 1) * PARTS, tasks = (int64_t)c->unit_count * c->kv_heads;
    // A single row's key heads are read together, as one stream through each page: so many that the longest row's are at
    // most a fourth of a thread's work, and that their scores take little memory.
    const int64_t group = c->heads / c->kv_heads < MOST ? c->heads / c->kv_heads : MOST;
    const int64_t most = MOST_SCORES / (group * stride * WIDTH);
    int64_t share = longest_single ? singles * c->kv_heads / ((int64_t)4 * c->threads * longest_single) : 1;
    share = share < most ? share : most;
    const int32_t together = share < 1 ? 1 : share < c->kv_heads ? (int32_t)share : c->kv_heads;
    const int64_t vectors = together * group < MOST ? MOST : together * group;
#pragma omp parallel num_threads(c->threads)
    {
        store(c);
        const int64_t sizes[3] = {together * MOST * c->head_dim * 4, vectors * stride * WIDTH, vectors * c->value_dim * 4};
        char *memory = aligned_alloc(64, (size_t)(sizes[0] + sizes[1] + sizes[2] + 191) / 64 * 64);
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
        vec *scores = (vec *)memory;
        vec *out = (vec *)(memory + sizes[1]);
        float *query = (float *)(memory + sizes[1] + sizes[2]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks; i++) {
            // The longest rows of a prompt are its last: from them on, so that no thread is left with one at the end.
            const int32_t *of = c->units + 2 * (c->unit_count - 1 - i / c->kv_heads), head = (int32_t)(i % c->kv_heads);
            const int32_t step = of[1] == 1 ? together : 1, left = c->kv_heads - head;
            if (!memory || head % step) continue;
            unit(c, of[0], of[1], head, step < left ? step : left, query, scores, stride, out);
        }
        free(memory);
    }
    return failed;
}

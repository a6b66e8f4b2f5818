/* The k largest values of each chunk: the operations of topk.py, to the byte. Indices of loops that append are 64 bits
   wide: converting narrower ones would double the time. */
#include "common.h"

typedef int32_t i32;
enum { SIZE = 0x7fffffff, NONE = 0x7f800001, MOST = 4096, LINE = 16, SPAN = 1 << 14 };

/* Return how many values a thread takes at once: whole chunks. */
INLINE i64 span_of(i64 chunk) { return chunk < SPAN ? SPAN / chunk * chunk : chunk; }
INLINE i64 spans_of(i64 n, i64 chunk) { return (n + span_of(chunk) - 1) / span_of(chunk); }

/* ---- select ---- */

/* Return how many of n sizes reach `least`. */
INLINE i64 reaching(const i32 *sizes, i64 n, i32 least)
{
    i32 count = 0;
    for (i64 i = 0; i < n; i++) count += sizes[i] >= least;
    return count;
}

/* Return the largest size that at least k of n sizes reach, or any size that exactly k reach: by bisection. */
static i32 threshold(const i32 *sizes, i64 n, i64 k)
{
    i32 low = SIZE, high = 0, middle;
    for (i64 i = 0; i < n; i++) {
        low = sizes[i] < low ? sizes[i] : low;
        high = sizes[i] > high ? sizes[i] : high;
    }
    for (i64 reached = n, count; low < high && reached != k;) {
        middle = high - (high - low) / 2;
        if ((count = reaching(sizes, n, middle)) >= k)
            low = middle, reached = count;
        else
            high = middle - 1;
    }
    return low;
}

/* Write the places and sizes of all values that can be among the k largest; return how many they are. Each is in one of
   the lines with the k largest maxima, and not smaller than the least of these maxima. */
INLINE i64 candidates(const i32 *sizes, i64 n, i64 k, const int line, i32 *restrict at, i32 *restrict found)
{
    i32 maxima[MOST / 4], hit[MOST / 4 + 1];
    i64 lines = (n + line - 1) / line, hits = 0, count = 0;
    if (line == 1) {
        for (i64 i = 0; i < n; i++) at[i] = (i32)i, found[i] = sizes[i];
        return n;
    }
    for (i64 i = 0; i < lines; i++) {
        maxima[i] = sizes[i * line];
        for (i64 j = i * line + 1; j < (i + 1) * line; j++) maxima[i] = maxima[i] > sizes[j] ? maxima[i] : sizes[j];
    }
    i32 least = threshold(maxima, lines, k);
    for (i64 i = 0; i < lines; i++) {
        hit[hits] = (i32)i * line;
        hits += maxima[i] >= least;
    }
    for (i64 i = 0; i < hits; i++)
        for (i32 j = hit[i]; j < hit[i] + line; j++) {
            at[count] = j;
            count += sizes[j] >= least;
        }
    for (i64 i = 0; i < count; i++) found[i] = sizes[at[i]];
    return count;
}

/* Write the places of the k largest of n values, ascending. */
static void largest(const float *v, int n, i64 k, i32 *restrict places)
{
    _Alignas(64) i32 sizes[MOST], at[MOST + 1], found[MOST + 1];
    for (i64 i = 0; i < n; i++) {
        i32 size = (i32)(bits_of(v[i]) & SIZE);
        sizes[i] = size < NONE ? size : NONE;
    }
    for (i64 i = n; i % LINE; i++) sizes[i] = -1;
    i64 last = 0, kept = 0;
    i64 count = k * 2 * LINE <= n ? candidates(sizes, n, k, LINE, at, found)
                : k * 5 <= n      ? candidates(sizes, n, k, 4, at, found)
                                  : candidates(sizes, n, k, 1, at, found);
    i32 least = threshold(found, count, k);
    /* As many equals are kept as are missing; from `last` on, only what exceeds the threshold. */
    for (i64 equals = k - reaching(found, count, least + 1); equals > 0; last++) equals -= found[last] == least;
    for (i64 i = 0; kept < k; i++) {
        places[kept] = at[i];
        kept += found[i] >= least + (i >= last);
    }
}

/* x has rows of n values; `residual` may be NULL. */
typedef struct {
    const void *x; float *residual; i32 *places; float *values; i64 dtype, rows, n, chunk, k, rest, threads;
} Select;

static void select_span(const void *context, i64 i)
{
    const Select *c = context;
    i64 spans = spans_of(c->n, c->chunk), row = i / spans, span = span_of(c->chunk), start = i % spans * span, end = least(start + span, c->n);
    i64 slot = row * (c->n / c->chunk * c->k + c->rest) + start / c->chunk * c->k;
    float converted[MOST];
    for (; start < end; start += c->chunk) {
        int n = (int)least(c->chunk, c->n - start);
        i64 k = n == c->chunk ? c->k : c->rest;
        float *residual = c->residual ? c->residual + row * c->n + start : converted, *values = c->values + slot;
        const float *v = load(c->x, (int)c->dtype, row * c->n + start, n, residual);
        i32 *places = c->places + slot;
        largest(v, n, k, places);
        for (i64 j = 0; j < k; j++) values[j] = v[places[j]] == v[places[j]] ? v[places[j]] : float_of(0x7fc00000);
        if (c->residual) {
            if (v != residual) memcpy(residual, v, n * sizeof(float));
            for (i64 j = 0; j < k; j++) residual[places[j]] = values[j] - values[j];
        }
        slot += k;
    }
}

void topk_select(const Select *c) { parallel(select_span, c, c->rows * spans_of(c->n, c->chunk), c->threads); }

/* ---- add_: in a plane of w bytes, value i has bits of byte i % w; i / w tells which ---- */

/* The values of a row begin `stride` bytes after those of the row before. Without weights `out` becomes the mean, and
   `ok` may be NULL. `outside` becomes 1 if a place is beyond the end of the row: nothing is added there. `out` is not fp64. */
typedef struct {
    void *out; const uint8_t *packed, *values; const float *weights; uint8_t *ok; i64 *outside;
    i64 dtype, rows, row_bytes, stride, n, chunk, k, count, bits, threads;
} Add;

/* Write the places of the values first, first + 1, ... of a packed row. */
static void split(const uint8_t *plane, i64 first, i64 wanted, const Add *c, i32 *restrict places)
{
    memset(places, 0, wanted * sizeof(i32));
    for (int bits = 8, shift = 0; bits > 0; bits /= 2)
        if (c->bits & bits) {
            i64 width = (c->count + 7) / 8 * bits;
            for (i64 i = first, end; i < first + wanted; i = end) {
                i64 stripe = i / width, at = i - stripe * width;
                end = least(first + wanted, i - at + width);
                for (i64 j = 0; j < end - i; j++)
                    places[i - first + j] |= (plane[at + j] >> stripe * bits & ((1 << bits) - 1)) << shift;
            }
            plane += width, shift += bits;
        }
}

static void add_span(const void *context, i64 i)
{
    const Add *c = context;
    float converted[MOST];
    i32 places[MOST];
    i64 span = span_of(c->chunk), start = i * span, end = least(start + span, c->n);
    for (; start < end; start += c->chunk) {
        i64 first = start / c->chunk * c->k, n = least(c->chunk, c->n - start);
        i64 k = n == c->chunk ? c->k : c->count - first;
        float *total = c->dtype == FP32 ? (float *)c->out + start : converted;
        int outside = 0, broken = 0;
        if (!c->weights)
            memset(total, 0, n * sizeof(float));
        else
            load(c->out, (int)c->dtype, start, n, total);
        for (i64 row = 0; row < c->rows; row++) {
            float weight = c->weights ? c->weights[row] : (float)(1.0 / (double)c->rows), value;
            split(c->packed + row * c->row_bytes, first, k, c, places);
            for (i64 j = 0; j < k; j++) {
                memcpy(&value, c->values + row * c->stride + (first + j) * sizeof(float), sizeof(float));
                if (places[j] >= n)
                    outside = 1;
                else
                    total[places[j]] += value * weight;
            }
        }
        if (total == converted) store(c->out, (int)c->dtype, start, n, total);
        const float *seen = c->ok ? load(c->out, (int)c->dtype, start, n, converted) : total;
        for (i64 j = 0; c->ok && j < n; j++) broken |= !(fabsf(seen[j]) < INFINITY);
        if (broken) __atomic_store_n(c->ok, 0, __ATOMIC_RELAXED);
        if (outside) __atomic_store_n(c->outside, 1, __ATOMIC_RELAXED);
    }
}

void topk_add(const Add *c) { parallel(add_span, c, spans_of(c->n, c->chunk), c->threads); }

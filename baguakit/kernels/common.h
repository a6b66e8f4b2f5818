/* Values as bits, dtypes, random numbers and threads, for all kernels of this folder. */
#ifndef BAGUAKIT_COMMON_H
#define BAGUAKIT_COMMON_H

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__ /* refused before a library is loaded: it would make the whole process flush subnormals */
#error "-ffast-math changes results; compile without it"
#endif

#define INLINE static inline __attribute__((always_inline))

typedef int64_t i64;
enum { FP32, BF16, FP16, FP64 }; /* dtypes */

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE float smaller(float a, float b) { return a < b ? a : b; }
INLINE float larger(float a, float b) { return a > b ? a : b; }
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

/* fp16 by integers and one product, which is exact: compilers vectorise it on every machine. */
INLINE float from_fp16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    float x = float_of(rest) * 0x1p112f;
    return float_of(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : bits_of(x)));
}

INLINE uint16_t to_bf16(float x)
{
    uint32_t u = bits_of(x);
    return x == x ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : 0x7fc0;
}

/* To the nearest, ties to even: the sum with a power of two rounds subnormals, an integer sum all others. */
INLINE uint16_t to_fp16(float x)
{
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    uint32_t normal = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    uint32_t tiny = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    uint32_t h = size < 0x38800000 ? tiny : size < 0x47800000 ? normal : size > 0x7f800000 ? 0x7e00 : 0x7c00;
    return sign | h;
}

/* Return values at..at+n as fp32: in place, or converted into `to`. */
INLINE const float *load(const void *x, int dtype, i64 at, i64 n, float *restrict to)
{
    if (dtype == FP32)
        return (const float *)x + at;
    if (dtype == BF16)
        for (i64 i = 0; i < n; i++) to[i] = float_of((uint32_t)((const uint16_t *)x)[at + i] << 16);
    else if (dtype == FP16)
        for (i64 i = 0; i < n; i++) to[i] = from_fp16(((const uint16_t *)x)[at + i]);
    else
        for (i64 i = 0; i < n; i++) to[i] = (float)((const double *)x)[at + i];
    return to;
}

INLINE void store(void *x, int dtype, i64 at, i64 n, const float *restrict from)
{
    if (dtype == FP32)
        memcpy((float *)x + at, from, n * sizeof(float));
    else if (dtype == BF16)
        for (i64 i = 0; i < n; i++) ((uint16_t *)x)[at + i] = to_bf16(from[i]);
    else if (dtype == FP16)
        for (i64 i = 0; i < n; i++) ((uint16_t *)x)[at + i] = to_fp16(from[i]);
    else
        for (i64 i = 0; i < n; i++) ((double *)x)[at + i] = from[i];
}

INLINE uint32_t mixed(uint32_t h)
{
    h = (h ^ h >> 16) * 0x21f0aaadu;
    h = (h ^ h >> 15) * 0x735a2d97u;
    return h ^ h >> 15;
}

/* A number in [0, 1) with 24 bits for a position: kernels/noise.py. */
INLINE float uniform(uint64_t position, uint32_t low, uint32_t high)
{
    uint32_t h = mixed((uint32_t)position ^ low);
    return (float)(int32_t)(mixed(h ^ (uint32_t)(position >> 32) ^ high) >> 8) * 0x1p-24f;
}

/* ---- threads ---- */

typedef void Job(const void *context, i64 i);
typedef struct { Job *job; const void *context; i64 count, next, taken; } Shared; /* taken: jobs at a time */
enum { MOST_THREADS = 256 };

static void *run_jobs(void *given)
{
    Shared *shared = given;
    for (i64 i; (i = __atomic_fetch_add(&shared->next, shared->taken, __ATOMIC_RELAXED)) < shared->count;)
        for (i64 end = least(i + shared->taken, shared->count); i < end; i++) shared->job(shared->context, i);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* also what was written past the caches is there before others read it */
    return NULL;
}

/* Run job(context, i) for all i in 0..count, on at most so many threads. The threads live for this call. */
static void parallel(Job *job, const void *context, i64 count, i64 threads)
{
    Shared shared = {job, context, count, 0, count / (8 * threads) + 1};
    pthread_t others[MOST_THREADS];
    int started = 0, wanted = (int)least(least(threads, MOST_THREADS), count) - 1;
    while (started < wanted && pthread_create(&others[started], NULL, run_jobs, &shared) == 0)
        started++; /* what no thread can be had for is done by this one */
    run_jobs(&shared);
    while (started > 0)
        pthread_join(others[--started], NULL);
}

/* ---- arithmetic: kernels/cpu.py compares it with NumPy's ---- */

void exact(const float *a, const float *b, const float *c, float *restrict out, i64 n)
{
    for (i64 i = 0; i < n; i++) out[i] = a[i] * b[i] + c[i];
    for (i64 i = 0; i < n; i++) out[n + i] = (a[i] + b[i]) - b[i];
    for (i64 i = 0; i < n; i++) out[2 * n + i] = a[i] / b[i];
    for (i64 i = 0; i < n; i++) out[3 * n + i] = sqrtf(fabsf(a[i]));
    for (i64 i = 0; i < n; i++) out[4 * n + i] = b[i] * 0x1p-80f;
    for (i64 i = 0; i < n; i++) out[5 * n + i] = a[i] == a[i];
}

#endif

/* The arithmetic of mixing.py, with the same roundings: a product and its sum are one fma, which rounds once.
   Tensors are not fp64. */
#include "common.h"

enum { RUN = 1024 }; /* values of a job: those of all tensors stay in the nearest cache */

typedef struct { void *x; const void *const *others; const float *weights; i64 n, count, dtype, threads; } Mix;

static void mix_run(const void *given, i64 run)
{
    const Mix *m = given;
    i64 at = run * RUN, n = least(RUN, m->n - at);
    float wide[RUN], read[RUN];
    float *total = m->dtype == FP32 ? (float *)m->x + at : wide;
    load(m->x, m->dtype, at, n, wide);
    for (i64 k = 0; k < m->count; k++) {
        const float *restrict y = load(m->others[k], m->dtype, at, n, read);
        float *restrict sum = total;
        float scale = k ? 1 : m->weights[0], weight = m->weights[k + 1];
        for (i64 i = 0; i < n; i++) sum[i] = fmaf(y[i], weight, sum[i] * scale);
    }
    if (total == wide)
        store(m->x, m->dtype, at, n, wide);
}

/* Mix one or more tensors into x. */
void mix(const Mix *m) { parallel(mix_run, m, (m->n + RUN - 1) / RUN, m->threads); }

typedef struct { void *x; const void *result, *before; i64 n, dtype, threads; } Landing;

static void land_run(const void *given, i64 run)
{
    const Landing *l = given;
    i64 at = run * RUN, n = least(RUN, l->n - at);
    float buffers[3][RUN], change[RUN];
    uint16_t narrow[RUN];
    const float *x = load(l->x, l->dtype, at, n, buffers[0]);
    const float *result = load(l->result, l->dtype, at, n, buffers[1]);
    const float *before = load(l->before, l->dtype, at, n, buffers[2]);
    for (i64 i = 0; i < n; i++) change[i] = result[i] - before[i];
    if (l->dtype != FP32) { /* this difference is rounded to the dtype */
        store(narrow, l->dtype, 0, n, change);
        load(narrow, l->dtype, 0, n, change);
    }
    for (i64 i = 0; i < n; i++) change[i] = x[i] == before[i] ? result[i] : x[i] + change[i];
    store(l->x, l->dtype, at, n, change);
}

void land(const Landing *l) { parallel(land_run, l, (l->n + RUN - 1) / RUN, l->threads); }

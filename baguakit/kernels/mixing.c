/* The arithmetic of mixing.py, with the same roundings: a product and its sum are one fma, which rounds once. */
#include "common.h"

enum { RUN = 1024 }; /* values of a job: those of all tensors stay in the nearest cache */

typedef struct { void *x; const void *const *others; const double *weights; i64 n, count, dtype, threads; } Mix;

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
        float scale = k ? 1 : (float)m->weights[0], weight = (float)m->weights[k + 1];
        for (i64 i = 0; i < n; i++) sum[i] = fmaf(y[i], weight, sum[i] * scale);
    }
    if (total == wide)
        store(m->x, m->dtype, at, n, wide);
}

static void mix_run_fp64(const void *given, i64 run)
{
    const Mix *m = given;
    i64 at = run * RUN, n = least(RUN, m->n - at);
    double *restrict sum = (double *)m->x + at;
    for (i64 k = 0; k < m->count; k++) {
        const double *restrict y = (const double *)m->others[k] + at;
        double scale = k ? 1 : m->weights[0], weight = m->weights[k + 1];
        for (i64 i = 0; i < n; i++) sum[i] = fma(y[i], weight, sum[i] * scale);
    }
}

/* Mix one or more tensors into x. */
void mix(const Mix *m)
{
    parallel(m->dtype == FP64 ? mix_run_fp64 : mix_run, m, (m->n + RUN - 1) / RUN, m->threads);
}

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

static void land_run_fp64(const void *given, i64 run)
{
    const Landing *l = given;
    i64 at = run * RUN, n = least(RUN, l->n - at);
    double *x = (double *)l->x + at;
    const double *result = (const double *)l->result + at, *before = (const double *)l->before + at;
    for (i64 i = 0; i < n; i++) x[i] = x[i] == before[i] ? result[i] : x[i] + (result[i] - before[i]);
}

void land(const Landing *l)
{
    parallel(l->dtype == FP64 ? land_run_fp64 : land_run, l, (l->n + RUN - 1) / RUN, l->threads);
}

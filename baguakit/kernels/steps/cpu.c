/* The arithmetic of definition.py, with the same roundings in the same order: the same bits. One call steps all
   parameters of the same dtypes. A job takes one tile of one parameter, which it finds in the tables of operators.py. */
#include "common.h"

enum { TILE = 1024, SUM_TILE = 16384, LANES = 16 };
enum { SGD, ADAM, LION };
enum { COUPLED = 1, DECOUPLED = 2 }; /* what a decay is added to: gradients, or weights */

typedef struct { i64 p, g, u, v, master, length, start, whole; } Record;
typedef struct {
    const i64 *tiles;
    const Record *records;
    i64 count, rule, decay, nesterov, p, g, drawn;
    const float *numbers; /* seven of the rule, and the factor of the gradients */
    i64 low, high, threads;
} Step;

INLINE void sgd(float *restrict p, const float *restrict g, float *restrict b, i64 n, const Step *s)
{
    const float decay = s->numbers[0], kept = s->numbers[1], taken = s->numbers[2], momentum = s->numbers[3];
    const float rate = s->numbers[4], factor = s->numbers[7];
    const int decays = s->decay, nesterov = s->nesterov;
    for (i64 i = 0; i < n; i++) {
        float x = g[i] * factor;
        if (decays)
            x = x + p[i] * decay;
        if (b) {
            b[i] = b[i] * kept + x * taken;
            x = nesterov ? x + b[i] * momentum : b[i];
        }
        p[i] = p[i] + x * rate;
    }
}

INLINE void adam(
    float *restrict p, const float *restrict g, float *restrict m, float *restrict v, i64 n, const Step *s)
{
    const float decay = s->numbers[0], first = s->numbers[1], kept = s->numbers[2], second = s->numbers[3];
    const float root = s->numbers[4], eps = s->numbers[5], size = s->numbers[6], factor = s->numbers[7];
    const int decays = (int)s->decay;
    for (i64 i = 0; i < n; i++) {
        float x = g[i] * factor, w = decays == DECOUPLED ? p[i] * decay : p[i];
        if (decays == COUPLED)
            x = x + w * decay;
        m[i] = m[i] + (x - m[i]) * first;
        v[i] = v[i] * kept + x * second * x;
        p[i] = w + m[i] * size / (sqrtf(v[i]) / root + eps);
    }
}

INLINE void lion(float *restrict p, const float *restrict g, float *restrict m, i64 n, const Step *s)
{
    const float decay = s->numbers[0], old = s->numbers[1], new = s->numbers[2], kept = s->numbers[3];
    const float taken = s->numbers[4], rate = s->numbers[5], factor = s->numbers[7];
    for (i64 i = 0; i < n; i++) {
        float x = g[i] * factor, c = m[i] * old + x * new;
        float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;
        m[i] = m[i] * kept + x * taken;
        p[i] = p[i] * decay + sign * rate;
    }
}

/* Round values to bf16 at random, by their positions among all values. */
INLINE void draw(uint16_t *restrict to, const float *restrict x, i64 n, uint64_t start, uint32_t low, uint32_t high)
{
    for (i64 i = 0; i < n; i++) {
        uint32_t chance = (uint32_t)(int32_t)(uniform(start + (uint64_t)i, low, high) * 0x1p16f);
        to[i] = x[i] == x[i] ? (uint16_t)((bits_of(x[i]) + chance) >> 16) : 0x7fc0;
    }
}

INLINE void *address(i64 x) { return (void *)(intptr_t)x; }
INLINE float *column(i64 x, i64 at) { return x ? (float *)address(x) + at : NULL; }

static void step_tile(const void *given, i64 job)
{
    const Step *s = given;
    const Record *r = s->records + (s->tiles[job] >> 32);
    const i64 at = (s->tiles[job] & 0xffffffff) * TILE, n = least(TILE, r->length - at);
    float wide[TILE], gradients[TILE], *p = wide, *u = column(r->u, at), *v = column(r->v, at);
    const float *g = load(address(r->g), s->g, at, n, gradients);
    if (r->master || s->p == FP32)
        p = column(r->master ? r->master : r->p, at);
    else
        load(address(r->p), s->p, at, n, wide);
    if (s->rule == SGD)
        sgd(p, g, u, n, s);
    else if (s->rule == LION)
        lion(p, g, u, n, s);
    else
        adam(p, g, u, v, n, s);
    if (s->drawn)
        draw((uint16_t *)address(r->p) + at, p, n, (uint64_t)(r->start + at), s->low, s->high);
    else if (s->p != FP32)
        store(address(r->p), s->p, at, n, p);
}

void step(const Step *s) { parallel(step_tile, s, s->count, s->threads); }

typedef struct { const i64 *tiles; const Record *records; i64 count, g; double *partials; i64 threads; } Norm;

/* Add the squares of a tile: lane j adds those of values j, j + LANES, ..., and then the lanes are added in order. */
static void square_tile(const void *given, i64 job)
{
    const Norm *s = given;
    const Record *r = s->records + (s->tiles[job] >> 32);
    const i64 begin = (s->tiles[job] & 0xffffffff) * SUM_TILE, end = least(begin + SUM_TILE, r->length);
    double lanes[LANES] = {0}, total = 0;
    for (i64 at = begin; at < end; at += TILE) {
        float wide[TILE];
        const i64 n = least(TILE, end - at), full = n / LANES * LANES;
        const float *g = load(address(r->g), s->g, at, n, wide);
        for (i64 i = 0; i < full; i += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] += (double)g[i + j] * g[i + j];
        for (i64 i = full; i < n; i++) lanes[i - full] += (double)g[i] * g[i];
    }
    for (int j = 0; j < LANES; j++) total += lanes[j];
    s->partials[job] = total;
}

void squares(const Norm *s) { parallel(square_tile, s, s->count, s->threads); }

/* The operations of blockwise formats on CPUs, byte for byte those of definition.py. A block at a time stays in L1. */
#include "codes.h"

#define SMALLEST 0x1p-126f
enum { LEAST = 64, SPAN = 1024 };

typedef struct {
    const Form *form;
    i64 rows;
    void *values;
    const uint8_t *packed;
    uint8_t *sent;
    float *residual, *weights;
    uint8_t *ok;
    i64 dtype, drawn, seed[2], far, threads; /* drawn: round at random; far: results do not fit the caches */
} Call;

INLINE int is_centred(const Form *f, int drawn)
{
    return f->bits == 1 || (f->rotated && !drawn && f->bits <= 3);
}

/* ---- rotation: rotation.py ---- */

/* Return a vector in which values at distance d have changed places. */
INLINE lanes swapped(lanes x, const int d)
{
#ifdef __clang__
    lanes y = x;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) y[i] = x[i ^ d];
    return y;
#else
    return __builtin_shuffle(x, NUMBERED ^ d);
#endif
}

INLINE void butterfly(lanes *a, lanes *b)
{
    const lanes sum = *a + *b;
    *b = *a - *b, *a = sum;
}

/* Replace x by H x: first the steps within vectors, then those between vectors, two at a time. */
INLINE void hadamard(float *x, i64 width)
{
    for (float *v = x; v < x + width; v += LANES) {
        lanes a = lanes_at(v);
#pragma GCC unroll 4
        for (int k = 0; 1 << k < LANES; k++) a = swapped(a, 1 << k) + (lanes)((places)a ^ NUMBERED >> k << 31);
        set_lanes(v, a);
    }
    for (i64 d = LANES; d < width; d *= 4)
        for (i64 i = 0; i < width; i += 4 * d)
            for (float *v = x + i; v < x + i + d; v += LANES) {
                lanes a = lanes_at(v), b = lanes_at(v + d);
                butterfly(&a, &b);
                if (4 * d <= width) {
                    lanes c = lanes_at(v + 2 * d), e = lanes_at(v + 3 * d);
                    butterfly(&c, &e), butterfly(&a, &c), butterfly(&b, &e);
                    set_lanes(v + 2 * d, c), set_lanes(v + 3 * d, e);
                }
                set_lanes(v, a), set_lanes(v + d, b);
            }
}

APART void rotate(const Form *f, const float *x, float *out)
{
    const float factor = 0.5f / (float)f->block;
    for (i64 i = 0; i < f->block; i++) out[i] = x[i] * (f->signs[i] * factor);
    hadamard(out, f->block);
}

APART void restore(const Form *f, float *x)
{
    const float before = 1.0f / (float)f->block, after = 2.0f * (float)f->block;
    for (i64 i = 0; i < f->block; i++) x[i] *= before;
    hadamard(x, f->block);
    for (i64 i = 0; i < f->block; i++) x[i] *= f->signs[i] * after;
}

/* ---- grids: uniform.py and float8.py ---- */

INLINE float bf16_above(float x) { return float_of((bits_of(x) + 0xffff) & 0xffff0000u); }

INLINE float mean_magnitude(const float *x, i64 n, float size)
{
    int32_t field = (int32_t)(bits_of(size) >> 23), total = 0;
    field = field < 30 ? 30 : field;
    float unit = float_of((uint32_t)(field - 16) << 23), units = float_of((uint32_t)(270 - field) << 23);
    for (i64 i = 0; i < n; i++) total += (int32_t)(fabsf(x[i]) * units);
    return (float)total / (float)n * unit;
}

INLINE float largest_magnitude(const float *x, i64 n)
{
    int32_t most = 0;
    for (i64 i = 0; i < n; i++) {
        int32_t size = (int32_t)(bits_of(x[i]) & INT32_MAX);
        most = size > most ? size : most;
    }
    return float_of((uint32_t)most);
}

APART Grid measure(const Form *f, const float *x, i64 n, int drawn)
{
    const float top = (float)((1 << f->bits) - 1);
    if (f->m || is_centred(f, drawn)) {
        float size = largest_magnitude(x, n);
        if (size - size != 0) return (Grid){NAN, 0, NAN};
        if (f->m) {
            int32_t field = (int32_t)((bits_of(size) + 0x7fffff - 0x600000) >> 23) - f->exponent;
            int32_t first = 1 + f->m - f->e, last = 254 - f->exponent;
            field = field < first ? first : field > last ? last : field;
            return (Grid){float_of((uint32_t)field << 23), 0, float_of((uint32_t)(254 - field) << 23)};
        }
        if (!drawn) size = mean_magnitude(x, n, size);
        if (size == 0) return (Grid){0, -top * f->unit, 0};
        float step = bf16_above(smaller(larger(size * (drawn ? 2.0f : f->spacing), SMALLEST), 0x1p127f));
        return (Grid){step, -top * f->unit, 1 / step};
    }
    int32_t least = INT32_MAX, most = INT32_MIN; /* as integers: negative numbers are in reverse, and NaN outermost */
    uint32_t farthest = 0;
    for (i64 i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]);
        least = (int32_t)u < least ? (int32_t)u : least;
        most = (int32_t)u > most ? (int32_t)u : most;
        farthest = u > farthest ? u : farthest;
    }
    const float low = float_of(least < 0 ? farthest : (uint32_t)least);
    const float high = float_of((uint32_t)(most < 0 ? least : most)), spread = high * 0.5f - low * 0.5f;
    if (spread - spread != 0) return (Grid){NAN, 0, NAN};
    float step = larger(spread / ((top - (float)drawn) / 2), SMALLEST);
    const float reach = larger(fabsf(low), fabsf(high)) / (32760.0f * f->unit);
    if (!f->wide) step = bf16_above(smaller(larger(reach, step), 0x1.fep127f));
    float scale = 1 / step, level = low * scale;
    if (fabsf(level) < SMALLEST) level = 0;
    if (f->wide && low == high && high != 0) return (Grid){high, 1, 0};
    return (Grid){step, floorf(level + (drawn ? 0 : 0.5f)), scale};
}

/* ---- values to codes ---- */

INLINE void encode_float8(const Form *f, const float *x, i64 n, Grid g, const float *draws, uint8_t *restrict codes)
{
    const int m = f->m, lowest = 127 + f->e, drop = 23 - m, largest = f->largest;
    for (i64 i = 0; i < n; i++) {
        int32_t u = (int32_t)bits_of(x[i] * g.scale), binade = u & 0x7f800000, k;
        float size = float_of((uint32_t)u & INT32_MAX);
        binade = binade > lowest << 23 ? binade : lowest << 23;
        if (draws) {
            float level = size * float_of(((254u + (uint32_t)m) << 23) - (uint32_t)binade), below = floorf(level);
            k = (int32_t)below + (level - below > draws[i]);
        } else {
            int32_t unit = binade + (drop << 23); /* its last place is that of codes */
            k = (int32_t)bits_of(size + float_of((uint32_t)unit)) - unit;
        }
        k += (binade >> drop) - (lowest << m);
        codes[i] = (uint8_t)((u >> 24 & 0x80) | (k < largest ? k : largest));
    }
}

INLINE void encode_with(const Form *f, const float *x, i64 n, Grid g, const float *draws, uint8_t *restrict codes)
{
    const int centred = is_centred(f, draws != NULL), most = (1 << f->bits) - 1, half = 1 << (f->bits - 1);
    const float top = (float)most, before = centred ? top / 2 : 0, after = centred ? 0 : g.bottom;
    if (g.scale != g.scale)
        memset(codes, 0, (size_t)n);
    else if (f->m)
        encode_float8(f, x, n, g, draws, codes);
    else if (f->bits == 1 && !draws)
        for (i64 i = 0; i < n; i++) codes[i] = x[i] >= 0;
    else if (centred && !draws) {
        const float first = g.step, second = half > 2 ? 2 * first : INFINITY, third = half > 2 ? 3 * first : INFINITY;
        for (i64 i = 0; i < n; i++) {
            float size = fabsf(x[i]);
            int above = half + (size >= first) + (size >= second) + (size >= third);
            codes[i] = (uint8_t)(x[i] >= 0 ? above : most - above);
        }
    } else
        for (i64 i = 0; i < n; i++) {
            float level = x[i] * g.scale, drawn = level + before, below = floorf(drawn);
            level = draws ? below + (drawn - below > draws[i] ? 1.0f : 0.0f) : floorf(level + 0.5f);
            codes[i] = (uint8_t)(int32_t)smaller(larger(level - after, 0), top);
        }
}

/* Two loops of each kind, with draws and without: gcc would make them of one, clang would not. */
APART void encode(const Form *f, const float *x, i64 n, Grid g, const float *draws, uint8_t *restrict codes)
{
    if (draws)
        encode_with(f, x, n, g, draws, codes);
    else
        encode_with(f, x, n, g, NULL, codes);
}

/* ---- operations ---- */

/* A span is some blocks of a row, one after another: their n values, of which `all` are stored, begin at `at`. */
typedef struct { i64 r, b, n, all, at; } Span;
#define EACH_BLOCK(f, s)                                                  \
    for (i64 b = (s).b, j = 0, n __attribute__((unused));                 \
         n = least((s).all - j, (f)->block), n > 0; j += (f)->block, b++)

/* Pack the stored values of a span; write what they decode to, unless `decoded` is NULL. */
APART void pack(const Call *c, const float *x, Span s, uint8_t *row, float *decoded)
{
    const Form *f = c->form;
    Grid grids[SPAN / LEAST];
    float draws[WIDEST];
    EACH_BLOCK(f, s) grids[b - s.b] = measure(f, x + j, n, c->drawn); /* first: these wait for divisions */
    EACH_BLOCK(f, s) {
        uint8_t space[WIDEST + SLACK], *codes = space;
        if (f->bits == 8 && !(n & (SLACK - 1))) codes = row + plane_at(f, 8, b); /* as they are packed */
        for (i64 i = 0; c->drawn && i < n; i++) draws[i] = uniform((uint64_t)(s.at + j + i), c->seed[0], c->seed[1]);
        write_header(f, grids[b - s.b], row + f->header_at, b);
        encode(f, x + j, n, grids[b - s.b], c->drawn ? draws : NULL, codes);
        const Rows one = {f, codes, row + f->header_at, 1, b, {0}, NULL};
        if (decoded) add_planes(&one, 8, n, NOTHING, decoded + j);
        if (codes == space) join(f, codes, n, b, row);
    }
}

/* Return the values of a span, with zeros up to the end of the last vector that is read: in place, or in a buffer. */
INLINE float *values_of(const Call *c, Span s, float *buffer)
{
    const float *x = load(c->values, c->dtype, s.at, s.n, buffer);
    const i64 count = rounded_up(s.all);
    if (count == s.n) return (float *)x;
    if (x != buffer) memcpy(buffer, x, (size_t)s.n * sizeof *x);
    memset(buffer + s.n, 0, (size_t)(count - s.n) * sizeof *x);
    return buffer;
}

/* Write the values of a span. Far ones go past the caches, which would first read what was there. */
INLINE void put(const Call *c, Span s, void *to, i64 dtype, const float *x)
{
    if (c->far && dtype == FP32 && (uintptr_t)to % sizeof *x == 0)
        stream((float *)to + s.at, x, s.n);
    else
        store(to, dtype, s.at, s.n, x);
}

static void compress_span(const Call *c, const Form *f, Span s)
{
    float space[WIDEST + SLACK], turned[WIDEST + SLACK];
    const float *x = values_of(c, s, space);
    if (f->rotated) EACH_BLOCK(f, s) rotate(f, x + j, turned + j);
    pack(c, f->rotated ? turned : x, s, c->sent + s.r * f->row, c->residual ? turned : NULL);
    if (!c->residual) return;

    if (f->rotated) EACH_BLOCK(f, s) restore(f, turned + j);
    for (i64 i = 0; i < s.n; i++) turned[i] = x[i] - turned[i];
    put(c, s, c->residual, FP32, turned);
}

static void decompress_span(const Call *c, const Form *f, Span s)
{
    const int whole = c->dtype == FP32 && s.n == rounded_up(s.all);
    const int past = whole && c->far && !c->ok && !f->rotated && (uintptr_t)c->values % 64 == 0 && s.at % 16 == 0;
    const int apart = !whole || (c->far && !past);
    float space[WIDEST + SLACK], *values = apart ? space : (float *)c->values + s.at;
    EACH_BLOCK(f, s) {
        add_block(f, c->packed + s.r * f->row, 1, NULL, n, b, past ? PAST : NOTHING, values + j);
        if (f->rotated) restore(f, values + j);
    }
    if (apart) put(c, s, c->values, c->dtype, values);
    if (!c->ok) return;
    if (c->dtype != FP32) load(c->values, c->dtype, s.at, s.n, space); /* in their dtype they may be infinite */
    uint32_t carried = 0; /* into the sign, from exponents that are all ones */
    for (i64 i = 0; i < s.n; i++) carried |= (bits_of(values[i]) & INT32_MAX) + 0x800000;
    if (carried >> 31) __atomic_store_n(c->ok, 0, __ATOMIC_RELAXED);
}

static void add_span(const Call *c, const Form *f, Span s)
{
    float space[WIDEST + SLACK], turned[WIDEST + SLACK];
    float *values = values_of(c, s, space), *sums = f->rotated ? turned : values;
    /* The next values in memory: the machine does not foresee an order of stripes and spans. */
    for (i64 i = s.n; values != space && i < 2 * s.n; i += 16) __builtin_prefetch(values + i, 1);
    EACH_BLOCK(f, s) {
        add_block(f, c->packed, c->rows, c->weights, n, b, f->rotated ? ZERO : (Start){values + j, 0, 0}, sums + j);
        if (f->rotated) restore(f, turned + j);
    }
    for (i64 i = 0; f->rotated && i < s.n; i++) values[i] += turned[i];
    if (values == space) store(c->values, c->dtype, s.at, s.n, values);
}

static void reduce_span(const Call *c, const Form *f, Span s)
{
    const float count = (float)c->rows;
    float mean[WIDEST + SLACK], values[WIDEST + SLACK];
    EACH_BLOCK(f, s) add_block(f, c->packed, c->rows, NULL, n, b, ZERO, mean + j);
    if ((c->rows & (c->rows - 1)) == 0) /* the product with a power of two is the quotient */
        for (i64 i = 0; i < s.all; i++) mean[i] *= 1 / count;
    else
        for (i64 i = 0; i < s.all; i++) mean[i] /= count;
    pack(c, mean, s, c->sent, c->residual ? values : NULL);
    if (!c->residual) return;
    for (i64 i = 0; i < s.all; i++) values[i] = mean[i] - values[i];
    if (f->rotated) EACH_BLOCK(f, s) restore(f, values + j);
    for (i64 i = 0; i < s.n; i++) c->residual[s.at + i] += values[i] * count;
}

/* ---- what Python calls ---- */

typedef void Operation(const Call *, const Form *, Span);
typedef struct { const Call *call; Operation *on; i64 blocks, spans; } Work; /* blocks of a span; spans of a row */

static void work_on(const void *given, i64 job)
{
    const Work *w = given;
    const Form *f = w->call->form;
    const i64 r = job / w->spans, b = job % w->spans * w->blocks, blocks = least(w->blocks, f->blocks - b);
    const i64 n = least(blocks * f->block, f->n - b * f->block);
    w->on(w->call, f, (Span){r, b, n, f->padded ? blocks * f->block : n, r * f->n + b * f->block});
}

/* Run an operation on spans of SPAN values, or of one block; a row begins with a span. */
static void run(const Call *c, i64 rows, Operation *on)
{
    const i64 blocks = c->form->block < SPAN ? SPAN / c->form->block : 1;
    const Work w = {c, on, blocks, (c->form->blocks + blocks - 1) / blocks};
    parallel(work_on, &w, rows * w.spans, c->threads);
}

void compress(const Call *c) { run(c, c->rows, compress_span); }
void decompress(const Call *c) { run(c, c->rows, decompress_span); }
void add(const Call *c) { run(c, 1, add_span); }
void reduce(const Call *c) { run(c, 1, reduce_span); }

/* The operations of blockwise formats on CPUs, byte for byte those of definition.py. A block at a time stays in L1. */
#include "common.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define SMALLEST 0x1p-126f
enum { WIDEST = 8192, SLACK = 64, AT_ONCE = 8, AHEAD = 1024, CHUNK = 1 << 14 }; /* AT_ONCE: rows that a pass adds */

/* Vectors of the machine. Compilers take these two operations only as intrinsics: bytes widened, and a table read. */
#ifdef __AVX512F__
enum { LANES = 16 };
#define EACH(F, d) F4(F, d, 0), F4(F, d, 4), F4(F, d, 8), F4(F, d, 12)
#define WIDENED(bytes) (places)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(bytes)))
#define LOOK_UP(table, at) (lanes)_mm512_permutexvar_ps((__m512i)(at), (__m512)(table))
#elif defined __AVX2__
enum { LANES = 8 };
#define EACH(F, d) F4(F, d, 0), F4(F, d, 4)
#define WIDENED(bytes) (places)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(bytes)))
#else
enum { LANES = 4 };
#define EACH(F, d) F4(F, d, 0)
#define WIDENED(bytes) (places){(bytes)[0], (bytes)[1], (bytes)[2], (bytes)[3]}
#endif
#define F4(F, d, i) F(i, d), F((i) + 1, d), F((i) + 2, d), F((i) + 3, d)
#define FLIPPED(i, d) ((i) ^ (d))
#define SIGN(i, d) ((i) & (d) ? INT32_MIN : 0)
#define MASKED(i, d) ((i) & (d))

#define APART static __attribute__((noinline)) /* registers and compile time for itself */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t places __attribute__((vector_size(4 * LANES)));

#ifdef __clang__
#define FLIP(v, d) __builtin_shufflevector(v, v, EACH(FLIPPED, d))
#else
#define FLIP(v, d) __builtin_shuffle(v, (places){EACH(FLIPPED, d)})
#endif

typedef struct {
    int32_t float8, bits, wide, padded, rotated;
    float unit, spacing;                 /* of bottoms, in steps; of levels about zero */
    int32_t m, e, exponent, largest;     /* of float8: see float8.py */
    int32_t block;
    i64 n, blocks, row, header_at, planes_at[3]; /* of a row: values, blocks, bytes, and where its parts begin */
    const float *signs;                  /* of the rotation */
} Form;

typedef struct {
    const Form *form;
    i64 rows;
    void *values;
    const uint8_t *packed;
    uint8_t *sent;
    float *residual;
    const float *weights;
    uint8_t *ok;
    int32_t dtype, drawn; /* drawn: round at random */
    uint32_t seed[2];
} Call;

typedef struct { float step, scale, bottom; uint32_t field; } Grid;

INLINE i64 held(const Form *f, i64 b) { return least(f->n - b * f->block, f->block); }
INLINE i64 stored(const Form *f, i64 b) { return f->padded ? f->block : held(f, b); }
INLINE i64 rounded_up(i64 n) { return (n + SLACK - 1) & -(i64)SLACK; }
INLINE int is_centred(const Form *f, int drawn)
{
    return !f->float8 && (f->bits == 1 || (f->rotated && !drawn && f->bits <= 3));
}

/* ---- rotation: rotation.py ---- */

#define BUTTERFLY(v, d) (FLIP(v, d) + (lanes)((places)v ^ (places){EACH(SIGN, d)}))

APART void hadamard(float *x, i64 width)
{
    for (i64 i = 0; i < width; i += LANES) {
        lanes v;
        memcpy(&v, x + i, sizeof v);
        v = BUTTERFLY(v, 1);
        v = BUTTERFLY(v, 2);
        if (LANES > 4) v = BUTTERFLY(v, 4 % LANES);
        if (LANES > 8) v = BUTTERFLY(v, 8 % LANES);
        memcpy(x + i, &v, sizeof v);
    }
    i64 d = LANES;
    for (; 2 * d < width; d *= 4) /* two steps in one pass */
        for (i64 i = 0; i < width; i += 4 * d)
            for (i64 j = i; j < i + d; j++) {
                float a = x[j] + x[j + d], b = x[j] - x[j + d];
                float c = x[j + 2 * d] + x[j + 3 * d], e = x[j + 2 * d] - x[j + 3 * d];
                x[j] = a + c, x[j + d] = b + e, x[j + 2 * d] = a - c, x[j + 3 * d] = b - e;
            }
    if (d < width)
        for (i64 j = 0; j < d; j++) {
            float a = x[j], b = x[j + d];
            x[j] = a + b, x[j + d] = a - b;
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

typedef struct { float low, high, size; int broken; } Range;

INLINE Range range(const float *x, i64 n)
{
    /* As integers in the order of numbers: compilers may reorder these, and a NaN is seen by its size. */
    int32_t low = INT32_MAX, high = INT32_MIN, size = 0;
    for (i64 i = 0; i < n; i++) {
        int32_t u = (int32_t)bits_of(x[i]), m = u & INT32_MAX, k = u ^ (u >> 31 & INT32_MAX);
        low = k < low ? k : low;
        high = k > high ? k : high;
        size = m > size ? m : size;
    }
    low ^= low >> 31 & INT32_MAX;
    high ^= high >> 31 & INT32_MAX;
    return (Range){float_of((uint32_t)low), float_of((uint32_t)high), float_of((uint32_t)size), size >= 0x7f800000};
}

INLINE float bf16_above(float x) { return float_of((bits_of(x) + 0xffff) & 0xffff0000u); }

INLINE float mean_magnitude(const float *x, i64 n, float size)
{
    int32_t field = (int32_t)(bits_of(size) >> 23), total = 0;
    field = field < 30 ? 30 : field;
    float unit = float_of((uint32_t)(field - 16) << 23), units = float_of((uint32_t)(270 - field) << 23);
    for (i64 i = 0; i < n; i++) total += (int32_t)(fabsf(x[i]) * units);
    return (float)total / (float)n * unit;
}

INLINE Grid measure_float8(const Form *f, Range r)
{
    int32_t field = (int32_t)((bits_of(r.size) + 0x7fffff - 0x600000) >> 23) - f->exponent;
    int32_t low = 1 + f->m - f->e, high = 254 - f->exponent;
    field = field < low ? low : field > high ? high : field;
    if (r.broken) return (Grid){NAN, NAN, 0, 255};
    return (Grid){float_of((uint32_t)field << 23), float_of((uint32_t)(254 - field) << 23), 0, (uint32_t)field};
}

APART Grid measure(const Form *f, const float *x, i64 n, int drawn)
{
    const Range r = range(x, n);
    if (f->float8) return measure_float8(f, r);
    const float top = (float)((1 << f->bits) - 1), spread = r.high * 0.5f - r.low * 0.5f;
    if (is_centred(f, drawn)) {
        if (r.broken) return (Grid){NAN, NAN, 0, 0};
        float size = drawn ? r.size : mean_magnitude(x, n, r.size);
        if (size == 0) return (Grid){0, 0, -top * f->unit, 0};
        float step = bf16_above(smaller(larger(size * (drawn ? 2.0f : f->spacing), SMALLEST), 0x1p127f));
        return (Grid){step, 1 / step, -top * f->unit, 0};
    }
    if (r.broken || spread - spread != 0) return (Grid){NAN, NAN, 0, 0};
    float step = larger(spread / ((top - (float)drawn) / 2), SMALLEST);
    if (!f->wide) {
        float reach = larger(fabsf(r.low), fabsf(r.high)) / (32760.0f * f->unit);
        step = bf16_above(smaller(larger(reach, step), 0x1.fep127f));
    }
    float scale = 1 / step, level = r.low * scale;
    if (fabsf(level) < SMALLEST) level = 0;
    if (f->wide && r.low == r.high && r.high != 0) return (Grid){r.high, 0, 1, 0};
    return (Grid){step, scale, floorf(level + (drawn ? 0 : 0.5f)), 0};
}

INLINE void write_header(const Form *f, Grid g, uint8_t *at, i64 b)
{
    uint32_t step = g.step == g.step ? bits_of(g.step) : 0x7fc00000;
    uint32_t word = step >> 16 | (uint32_t)(f->wide || f->float8 ? 0 : (int32_t)(g.bottom / f->unit)) << 16;
    if (f->float8)
        at[b] = (uint8_t)g.field;
    else if (f->wide)
        memcpy(at + 8 * b, &step, 4), memcpy(at + 8 * b + 4, &g.bottom, 4);
    else
        memcpy(at + 4 * b, &word, 4);
}

INLINE Grid read_header(const Form *f, const uint8_t *at, i64 b)
{
    Grid g = {0, 0, 0, 0};
    uint32_t word;
    if (f->float8)
        g.step = at[b] == 255 ? NAN : float_of((uint32_t)at[b] << 23);
    else if (f->wide)
        memcpy(&g.step, at + 8 * b, 4), memcpy(&g.bottom, at + 8 * b + 4, 4);
    else
        memcpy(&word, at + 4 * b, 4), g.step = float_of(word << 16), g.bottom = (float)((int32_t)word >> 16) * f->unit;
    return g;
}

/* ---- values to codes ---- */

INLINE void encode_float8(const Form *f, const float *x, i64 n, Grid g, const float *draws, uint8_t *restrict codes)
{
    const int m = f->m, lowest = 127 + f->e, drop = 23 - m;
    const int32_t half = (1 << (drop - 1)) - 1, bias = lowest << m, largest = f->largest;
    const float magic = float_of((uint32_t)(lowest + drop) << 23); /* whose last place is that of subnormal codes */
    if (draws)
        for (i64 i = 0; i < n; i++) {
            int32_t u = (int32_t)bits_of(x[i] * g.scale), size = u & INT32_MAX, field = size >> 23;
            field = field < lowest ? lowest : field;
            float level = float_of((uint32_t)size) * float_of((uint32_t)(254 - field + m) << 23), below = floorf(level);
            int32_t code = ((field - lowest) << m) + (int32_t)below + (level - below > draws[i]);
            codes[i] = (uint8_t)((u >> 24 & 0x80) | (code < largest ? code : largest));
        }
    else
        for (i64 i = 0; i < n; i++) {
            int32_t u = (int32_t)bits_of(x[i] * g.scale), size = u & INT32_MAX;
            int32_t normal = ((size + half + (size >> drop & 1)) >> drop) - bias + (1 << m);
            int32_t tiny = (int32_t)bits_of(float_of((uint32_t)size) + magic) - (int32_t)bits_of(magic);
            int32_t code = size < lowest << 23 ? tiny : normal;
            codes[i] = (uint8_t)((u >> 24 & 0x80) | (code < largest ? code : largest));
        }
}

APART void encode(const Form *f, const float *x, i64 n, Grid g, const float *draws, uint8_t *restrict codes)
{
    const int centred = is_centred(f, draws != NULL);
    const float top = (float)((1 << f->bits) - 1), before = centred ? top / 2 : 0, after = centred ? 0 : g.bottom;
    if (g.scale != g.scale)
        memset(codes, 0, (size_t)n);
    else if (f->float8)
        encode_float8(f, x, n, g, draws, codes);
    else if (draws)
        for (i64 i = 0; i < n; i++) {
            float level = x[i] * g.scale + before, below = floorf(level);
            level = below + (level - below > draws[i] ? 1.0f : 0.0f) - after;
            codes[i] = (uint8_t)(int32_t)smaller(larger(level, 0), top);
        }
    else if (f->bits == 1)
        for (i64 i = 0; i < n; i++) codes[i] = x[i] >= 0;
    else
        for (i64 i = 0; i < n; i++)
            codes[i] = (uint8_t)(int32_t)smaller(larger(floorf(x[i] * g.scale + before + 0.5f) - after, 0), top);
}

/* ---- codes to bytes and back: format.py. A byte of a plane of p bits has the codes of 8 / p stripes. ---- */

#define PLANES(f, b, n, ONE)                                                          \
    for (int p = 8, shift = 0, plane = 0; p; p /= 2)                                  \
        if ((f)->bits & p) {                                                          \
            const i64 at = (f)->planes_at[plane++] + (b) * (f)->block * p / 8, width = ((n) * p + 7) / 8; \
            if (p == 8) ONE(8)                                                        \
            if (p == 4) ONE(4)                                                        \
            if (p == 2) ONE(2)                                                        \
            if (p == 1) ONE(1)                                                        \
            shift += p;                                                               \
        }

INLINE void join_plane(const uint8_t *restrict codes, i64 width, const int p, int shift, uint8_t *restrict out)
{
    for (i64 i = 0; i < width; i++) {
        int byte = 0;
#pragma GCC unroll 8
        for (int s = 0; s < 8 / p; s++) byte |= (codes[s * width + i] >> shift & ((1 << p) - 1)) << s * p;
        out[i] = (uint8_t)byte;
    }
}

INLINE void split_plane(const uint8_t *restrict in, i64 width, const int p, int shift, uint8_t *restrict codes)
{
#pragma GCC unroll 8
    for (int s = 0; s < 8 / p; s++)
        for (i64 i = 0; i < width; i++)
            codes[s * width + i] = (uint8_t)((shift ? codes[s * width + i] : 0) | (in[i] >> s * p & ((1 << p) - 1)) << shift);
}

/* `codes` has SLACK bytes beyond n, which become zeros. */
APART void join(const Form *f, uint8_t *codes, i64 n, i64 b, uint8_t *row)
{
    memset(codes + n, 0, 8);
#define JOIN(p) join_plane(codes, width, p, shift, row + at);
    PLANES(f, b, n, JOIN)
}

APART void split(const Form *f, const uint8_t *row, i64 n, i64 b, uint8_t *codes)
{
#define SPLIT(p) split_plane(row + at, width, p, shift, codes);
    PLANES(f, b, n, SPLIT)
    memset(codes + n, 0, SLACK);
}

/* ---- codes to sums of values ---- */

enum { FROM_ZERO, FROM_NOTHING, FROM_SUMS }; /* where sums begin */

typedef struct {
    const uint8_t *codes;
    float step, bottom, weight;
    int32_t m, unit; /* of float8: the exponent of its smallest normal number times the step, less one */
    lanes table;     /* values by code, repeated */
} Row;

INLINE void set_row(Row *r, const Form *f, Grid g, const uint8_t *codes, float weight)
{
    r->codes = codes, r->step = g.step, r->bottom = g.bottom, r->weight = weight, r->m = f->m;
    if (f->float8) {
        int broken = g.step != g.step;
        r->unit = (int32_t)(broken ? 0x3f800000 : bits_of(g.step)) + (f->e - 1) * (1 << 23);
        if (broken) r->weight = NAN;
    } else if (f->bits <= 4) {
        const places at = {EACH(MASKED, 15)};
        r->table = (__builtin_convertvector(at & ((1 << f->bits) - 1), lanes) + g.bottom) * g.step * weight;
    }
}

INLINE lanes value(const Row *r, places u, const int p, const int float8)
{
    if (float8) {
        places size = u & 0x7f, subnormal = size < 1 << r->m; /* they are (1 + part) - 1, in places of the least normal */
        size += subnormal & (1 << r->m);
        lanes x = (lanes)((size << (23 - r->m)) + r->unit) - (lanes)(subnormal & ((1 << 23) + r->unit));
        return (lanes)((places)x | (u & 0x80) << 24) * r->weight;
    }
#ifdef LOOK_UP
    if (p <= 4) return LOOK_UP(r->table, u);
#endif
    return (__builtin_convertvector(p < 8 ? u & ((1 << p) - 1) : u, lanes) + r->bottom) * r->step * r->weight;
}

/* Write sums of rows of n codes of p bits, a multiple of SLACK in stripes of whole vectors, to `out`. */
INLINE void add_codes(const Row *rows, i64 count, const int p, const int float8, i64 n, int start, float *out)
{
    enum { MOST = 8 };
    const int stripes = 8 / p, beside = p == 8 ? 4 : p == 4 ? 2 : 1; /* vectors of one stripe in a pass */
    const i64 width = n * p / 8;
    for (i64 i = 0; i < width; i += beside * LANES) {
        lanes sums[MOST];
#pragma GCC unroll 8
        for (int k = 0; k < stripes * beside; k++) {
            sums[k] = (lanes)((places){0} | (start == FROM_NOTHING ? INT32_MIN : 0)); /* -0 + x = x for any x */
            if (start == FROM_SUMS) memcpy(&sums[k], out + k / beside * width + i + k % beside * LANES, sizeof *sums);
        }
        for (i64 r = 0; r < count; r++)
#pragma GCC unroll 4
            for (int j = 0; j < beside; j++) {
                const uint8_t *bytes = rows[r].codes + i + j * LANES;
                const places u = WIDENED(bytes);
                if (j * LANES % 64 == 0) __builtin_prefetch(bytes + AHEAD); /* eight rows are too many for caches to guess */
#pragma GCC unroll 8
                for (int s = 0; s < stripes; s++) sums[s * beside + j] += value(&rows[r], u >> s * p, p, float8);
            }
#pragma GCC unroll 8
        for (int k = 0; k < stripes * beside; k++)
            memcpy(out + k / beside * width + i + k % beside * LANES, &sums[k], sizeof *sums);
    }
}

#define CODED(p, float8, name) \
    APART void name(const Row *r, i64 count, i64 n, int start, float *out) { add_codes(r, count, p, float8, n, start, out); }
CODED(8, 1, add_float8)
CODED(8, 0, add_8)
CODED(4, 0, add_4)
CODED(2, 0, add_2)
CODED(1, 0, add_1)

INLINE void add_coded(const Form *f, const Row *rows, i64 count, int p, i64 n, int start, float *out)
{
    (f->float8 ? add_float8 : p == 8 ? add_8 : p == 4 ? add_4 : p == 2 ? add_2 : add_1)(rows, count, n, start, out);
}

/* Write sums of rows to `out`, which has SLACK values beyond n unless n is a multiple of SLACK. */
APART void add_rows(
    const Form *f, const uint8_t *packed, i64 count, const float *weights, i64 n, i64 b, int start, float *out)
{
    uint8_t codes[WIDEST + SLACK];
    Row rows[AT_ONCE];
    const i64 all = rounded_up(n);
    const int direct = !(f->bits & (f->bits - 1)) && !(n & (f->bits == 1 ? 2 * SLACK - 1 : SLACK - 1)); /* else split first */
    const int p = direct ? f->bits : 8;
    for (i64 r = 0, now; r < count; r += now, start = FROM_SUMS) {
        now = direct ? least(count - r, AT_ONCE) : 1;
        for (i64 i = 0; i < now; i++) {
            const uint8_t *row = packed + (r + i) * f->row, *at = row + f->planes_at[0] + b * f->block * p / 8;
            if (!direct) split(f, row, n, b, codes), at = codes;
            set_row(&rows[i], f, read_header(f, row + f->header_at, b), at, weights ? weights[r + i] : 1);
        }
        add_coded(f, rows, now, p, all, start, out);
    }
}

/* ---- operations ---- */

INLINE void fill_padding(const Form *f, uint8_t *row)
{
    const i64 blocks = f->blocks, whole = f->padded ? blocks : f->n / f->block, rest = f->n - whole * f->block;
    const i64 headers = blocks * (f->float8 ? 1 : f->wide ? 8 : 4);
    for (int p = 8, plane = 0; p; p /= 2) {
        if (!(f->bits & p)) continue;
        const i64 size = whole * f->block * p / 8 + (rest > 0 ? (rest * p + 7) / 8 : 0);
        memset(row + f->planes_at[plane++] + size, 0, (size_t)(-size & 15));
    }
    memset(row + f->header_at + headers, 0, (size_t)(-headers & 15));
}

/* Pack n values as block b, and write the packed values to `decoded` unless it is NULL. */
APART void pack(const Call *c, const float *x, i64 n, i64 b, i64 start, uint8_t *row, float *decoded)
{
    const Form *f = c->form;
    uint8_t codes[WIDEST + SLACK];
    float draws[WIDEST];
    const Grid g = measure(f, x, n, c->drawn);
    for (i64 i = 0, end; c->drawn && i < n; i = end) { /* the upper half of positions changes at most once in a block */
        const uint64_t at = (uint64_t)(start + i), high = at >> 32 << 32;
        end = least(n, i + (1ll << 32) - (i64)(uint32_t)at);
        for (i64 j = i; j < end; j++)
            draws[j] = uniform(high | ((uint32_t)at + (uint32_t)(j - i)), c->seed[0], c->seed[1]);
    }
    write_header(f, g, row + f->header_at, b);
    encode(f, x, n, g, c->drawn ? draws : NULL, codes);
    join(f, codes, n, b, row);
    if (decoded) {
        memset(codes + n, 0, SLACK);
        Row r;
        set_row(&r, f, g, codes, 1);
        add_coded(f, &r, 1, 8, rounded_up(n), FROM_NOTHING, decoded);
    }
}

INLINE void compress_block(const Call *c, i64 r, i64 b)
{
    const Form *f = c->form;
    const i64 n = held(f, b), all = stored(f, b), at = r * f->n + b * f->block;
    float values[WIDEST + SLACK], turned[WIDEST + SLACK];
    uint8_t *row = c->sent + r * f->row;
    if (b == 0) fill_padding(f, row);
    const float *x = load(c->values, c->dtype, at, n, values), *coded = x;
    if (all > n) {
        if (x != values) memcpy(values, x, (size_t)n * sizeof *x), x = coded = values;
        memset(values + n, 0, (size_t)(all - n) * sizeof *x);
    }
    if (f->rotated) rotate(f, x, turned), coded = turned;
    pack(c, coded, all, b, at, row, c->residual ? turned : NULL);
    if (!c->residual) return;
    if (f->rotated) restore(f, turned);
    for (i64 i = 0; i < n; i++) c->residual[at + i] = x[i] - turned[i];
}

/* Return whether values are finite in their dtype. */
INLINE int all_finite(const void *x, int dtype, i64 at, i64 n, const float *values)
{
    const uint16_t top = dtype == BF16 ? 0x7f80 : 0x7c00, *half = (const uint16_t *)x + at;
    int broken = 0;
    if (dtype == FP32 || dtype == FP64)
        for (i64 i = 0; i < n; i++) broken |= (bits_of(values[i]) & INT32_MAX) >= 0x7f800000;
    else
        for (i64 i = 0; i < n; i++) broken |= (half[i] & top) == top;
    return !broken;
}

INLINE void decompress_block(const Call *c, i64 r, i64 b)
{
    const Form *f = c->form;
    const i64 n = held(f, b), all = stored(f, b), at = r * f->n + b * f->block;
    float space[WIDEST + SLACK];
    float *values = c->dtype == FP32 && !(n & (SLACK - 1)) && n == all ? (float *)c->values + at : space;
    add_rows(f, c->packed + r * f->row, 1, NULL, all, b, FROM_NOTHING, values);
    if (f->rotated) restore(f, values);
    if (values == space) store(c->values, c->dtype, at, n, values);
    if (c->ok && !all_finite(c->values, c->dtype, at, n, values)) __atomic_store_n(c->ok, 0, __ATOMIC_RELAXED);
}

INLINE void add_block(const Call *c, i64 r, i64 b)
{
    const Form *f = c->form;
    const i64 n = held(f, b), all = stored(f, b), at = b * f->block;
    float space[WIDEST + SLACK], turned[WIDEST + SLACK];
    const int in_place = c->dtype == FP32 && !(n & (SLACK - 1)) && n == all;
    float *values = in_place ? (float *)c->values + at : space;
    const float *x = load(c->values, c->dtype, at, n, space);
    if (x != values) {
        memmove(space, x, (size_t)n * sizeof *x);
        memset(space + n, 0, (size_t)(rounded_up(all) - n) * sizeof *x);
    }
    add_rows(f, c->packed, c->rows, c->weights, all, b, f->rotated ? FROM_ZERO : FROM_SUMS, f->rotated ? turned : values);
    if (f->rotated) {
        restore(f, turned);
        for (i64 i = 0; i < n; i++) values[i] += turned[i];
    }
    if (!in_place) store(c->values, c->dtype, at, n, values);
    (void)r;
}

INLINE void reduce_block(const Call *c, i64 r, i64 b)
{
    const Form *f = c->form;
    const i64 n = held(f, b), all = stored(f, b), at = b * f->block;
    const float count = (float)c->rows;
    float mean[WIDEST + SLACK], values[WIDEST + SLACK];
    if (b == 0) fill_padding(f, c->sent);
    add_rows(f, c->packed, c->rows, NULL, all, b, FROM_ZERO, mean);
    for (i64 i = 0; i < all; i++) mean[i] /= count;
    pack(c, mean, all, b, at, c->sent, c->residual ? values : NULL);
    if (!c->residual) return;
    for (i64 i = 0; i < all; i++) values[i] = mean[i] - values[i];
    if (f->rotated) restore(f, values);
    for (i64 i = 0; i < n; i++) c->residual[at + i] += values[i] * count;
    (void)r;
}

/* A job is so many blocks as hold about CHUNK values, of all rows one after another. */
INLINE i64 per_job(const Form *f) { return CHUNK / f->block + (CHUNK < f->block); }

INLINE void each_block(const Call *c, i64 job, i64 rows, void work(const Call *, i64, i64))
{
    const i64 blocks = c->form->blocks, per = per_job(c->form), first = job * per;
    i64 r = first / blocks, b = first % blocks; /* a division takes as long as a hundred values */
    for (i64 left = least(per, rows * blocks - first); left > 0; left--) {
        work(c, r, b);
        if (++b == blocks) b = 0, r++;
    }
}

#define OPERATION(name, ROWS)                                                                  \
    static void name##_job(const void *c, i64 job) { each_block(c, job, ROWS((const Call *)c), name##_block); } \
    void name(const Form *form, const Call *given, int threads)                                \
    {                                                                                          \
        Call c = *given;                                                                       \
        c.form = form;                                                                         \
        parallel(name##_job, &c, (ROWS(&c) * form->blocks + per_job(form) - 1) / per_job(form), threads); \
    }
#define ALL_ROWS(c) (c)->rows
#define ONE_ROW(c) 1
OPERATION(compress, ALL_ROWS)
OPERATION(decompress, ALL_ROWS)
OPERATION(add, ONE_ROW)
OPERATION(reduce, ONE_ROW)

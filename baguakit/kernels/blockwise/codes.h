/* Packed codes and headers of blockwise formats: written, and read as sums of the values of rows. */
#ifndef BAGUAKIT_CODES_H
#define BAGUAKIT_CODES_H

#include "common.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { WIDEST = 8192, SLACK = 64, AT_ONCE = 8, AHEAD = 1024 };

/* Vectors of the machine. Compilers take some operations only as intrinsics: bytes widened, fp16 read, a table read. */
#ifdef __AVX512BW__
enum { LANES = 16 };
#define NUMBERED (places){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define WIDENED(bytes) (places)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(bytes)))
#define WIDENED_HALF(bytes) (halves)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(bytes)))
#define FROM_FP16(h) (lanes)_mm512_cvtph_ps((__m256i)(h))
#define STREAM(to, x) _mm512_stream_ps(to, (__m512)(x))
#define TABLED(bits) ((bits) <= 4)
#define LOOK_UP(table, at) (lanes)_mm512_permutexvar_ps((__m512i)(at), (__m512)(table))
#elif defined __AVX2__ && defined __F16C__
enum { LANES = 8 };
#define NUMBERED (places){0, 1, 2, 3, 4, 5, 6, 7}
#define WIDENED(bytes) (places)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(bytes)))
#define WIDENED_HALF(bytes) (halves)_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)(bytes)))
#define FROM_FP16(h) (lanes)_mm256_cvtph_ps((__m128i)(h))
#define STREAM(to, x) _mm256_stream_ps(to, (__m256)(x))
#else
enum { LANES = 4 };
#define NUMBERED (places){0, 1, 2, 3}
#define WIDENED(bytes) (places){(bytes)[0], (bytes)[1], (bytes)[2], (bytes)[3]}
#define STREAM(to, x) memcpy(to, &(x), sizeof(x))
#endif
#ifndef LOOK_UP
#define TABLED(bits) 0
#define LOOK_UP(table, at) (table)
#endif
#define APART static __attribute__((noinline)) /* registers and compile time for itself */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t places __attribute__((vector_size(4 * LANES)));
typedef int16_t halves __attribute__((vector_size(2 * LANES)));

INLINE lanes lanes_at(const float *x) { lanes v; memcpy(&v, x, sizeof v); return v; }
INLINE void set_lanes(float *x, lanes v) { memcpy(x, &v, sizeof v); }

/* Copy values past the caches. */
INLINE void stream(float *to, const float *from, i64 n)
{
    const i64 head = least(n, (i64)(-((uintptr_t)to / sizeof *to) & (LANES - 1))), end = n - (n - head) % LANES;
    memcpy(to, from, (size_t)head * sizeof *to);
    for (i64 i = head; i < end; i += LANES) {
        const lanes x = lanes_at(from + i);
        STREAM(to + i, x);
    }
    memcpy(to + end, from + end, (size_t)(n - end) * sizeof *to);
}

typedef struct {
    int32_t bits, wide, padded, rotated;
    float unit, spacing;                    /* of bottoms, in steps; of levels about zero */
    int32_t m, e, exponent, largest, block; /* the first four are of float8, or zeros: see float8.py */
    i64 n, blocks, row, header_at;          /* of a row: values, blocks, bytes, and where its headers begin */
    i64 planes_at[9];                       /* and its planes, by their bits */
    const float *signs;                     /* of the rotation */
} Form;

typedef struct { float step, bottom, scale; } Grid; /* scale: what values are multiplied by, the inverse of the step */

INLINE i64 rounded_up(i64 n) { return (n + SLACK - 1) & -(i64)SLACK; }

/* ---- headers ---- */

INLINE void write_header(const Form *f, Grid g, uint8_t *at, i64 b)
{
    uint32_t word = bits_of(g.step);
    if (f->m) {
        at[b] = (uint8_t)(word >> 23);
    } else if (f->wide) {
        memcpy(at + 8 * b, &g, 8);
    } else {
        word = word >> 16 | (uint32_t)(int32_t)(g.bottom / f->unit) << 16;
        memcpy(at + 4 * b, &word, 4);
    }
}

INLINE Grid read_header(const Form *f, const uint8_t *at, i64 b)
{
    Grid g = {0, 0, 0};
    uint32_t word;
    if (f->m) {
        g.step = at[b] == 255 ? NAN : float_of((uint32_t)at[b] << 23);
    } else if (f->wide) {
        memcpy(&g, at + 8 * b, 8);
    } else {
        memcpy(&word, at + 4 * b, 4);
        g.step = float_of(word << 16), g.bottom = (float)((int32_t)word >> 16) * f->unit;
    }
    return g;
}

/* ---- codes to bytes and back: format.py. A byte of a plane of p bits has the codes of 8 / p stripes. ---- */

INLINE void join_plane(const uint8_t *restrict codes, i64 width, const int p, uint8_t *restrict out)
{
#define STRIPE(s) ((codes[(s) * width + i] & ((1 << p) - 1)) << (s) * p)
    for (i64 i = 0; i < width; i++) {
        int byte = STRIPE(0) | STRIPE(1);
        if (p < 4) byte |= STRIPE(2) | STRIPE(3);
        if (p < 2) byte |= STRIPE(4) | STRIPE(5) | STRIPE(6) | STRIPE(7);
        out[i] = (uint8_t)byte;
    }
}

#define EACH_PLANE(p, bits) for (int p = 8; p; p /= 2) if ((bits) & p)
INLINE i64 plane_at(const Form *f, int p, i64 b) { return f->planes_at[p] + b * f->block * p / 8; }

/* Pack n codes, which have SLACK bytes beyond them, as block b of a row; the codes are lost. */
APART void join(const Form *f, uint8_t *codes, i64 n, i64 b, uint8_t *row)
{
    memset(codes + n, 0, SLACK);
    EACH_PLANE(p, f->bits) {
        const i64 width = (n * p + 7) / 8;
        uint8_t *out = row + plane_at(f, p, b);
        if (p == 8) memcpy(out, codes, (size_t)n);
        if (p == 4) join_plane(codes, width, 4, out);
        if (p == 2) join_plane(codes, width, 2, out);
        if (p == 1) join_plane(codes, width, 1, out);
        if (f->bits & (p - 1)) /* the next plane has the next bits */
            for (i64 i = 0; i < n; i++) codes[i] = (uint8_t)(p == 4 ? codes[i] >> 4 : codes[i] >> 2);
    }
}

/* Write the codes of block b of a row to bytes, which have SLACK more. */
APART void split(const Form *f, const uint8_t *row, i64 n, i64 b, uint8_t *codes)
{
    memset(codes, 0, (size_t)n + SLACK);
    int low = 0;
    EACH_PLANE(p, f->bits) {
        const i64 width = (n * p + 7) / 8;
        const uint8_t *in = row + plane_at(f, p, b);
        for (i64 i = 0; i < n; i++) codes[i] |= (uint8_t)((in[i % width] >> i / width * p & ((1 << p) - 1)) << low);
        low += p;
    }
}

/* ---- codes to sums of values ---- */

/* Codes of float8 have the bits of an fp16 number, apart from the bias of its exponent. */
INLINE lanes float8_value(const uint8_t *bytes, const int m)
{
#ifdef FROM_FP16
    return FROM_FP16(WIDENED_HALF(bytes) << (10 - m) & (int16_t)(m == 3 ? 0xbf80 : 0xff00));
#else
    const places u = WIDENED(bytes), rest = (u & 0x7f) << (23 - m);
    const lanes x = (lanes)rest * 0x1p112f;
    return (lanes)((u & 0x80) << 24 | ((places)x | ((rest >= 0x0f800000) & 0x7f800000)));
#endif
}

typedef struct { const float *from; float begin; int past; } Start; /* of sums: values, or else one for all */
static const Start ZERO = {NULL, 0.0f, 0}, NOTHING = {NULL, -0.0f, 0}, PAST = {NULL, -0.0f, 1}; /* -0 + x = x for any x */

typedef struct {
    const uint8_t *bytes;
    float step, bottom, weight;
    lanes table; /* values by code, repeated */
} Row;

/* Write the sums of rows of n codes to `out`. A pass takes whole vectors of each stripe of the narrowest plane. */
INLINE void add_codes(
    const Row *rows, i64 count, const int bits, const int m, const i64 *at, i64 n, int weighted, Start start, float *out)
{
    const int narrowest = bits & -bits, beside = narrowest > 1 ? narrowest / 2 : 1, vectors = 8 / narrowest * beside;
    const i64 width = n * narrowest / 8;
#define PLACE(k) ((k) / beside * width + i + (k) % beside * LANES)
    for (i64 i = 0; i < width; i += beside * LANES) {
        lanes sums[8];
#pragma GCC unroll 8
        for (int k = 0; k < vectors; k++)
            sums[k] = start.from ? lanes_at(start.from + PLACE(k)) : (lanes)((places){0} | (int32_t)bits_of(start.begin));
        for (const Row *r = rows; r < rows + count; r++)
#pragma GCC unroll 8
            for (int k = 0; k < vectors; k++) {
                lanes x = {0};
                places u = {0};
                int low = 0;
#pragma GCC unroll 4
                EACH_PLANE(p, bits) {
                    const int stripe = k / beside, turns = p / narrowest; /* stripes of the narrowest plane */
                    const int masked = p < 8 && (!TABLED(bits) || bits & (p - 1)); /* tables ignore higher bits */
                    const uint8_t *bytes = r->bytes + at[p] + PLACE(k - stripe / turns * turns * beside);
                    if (stripe < turns && k % beside * LANES % 64 == 0) __builtin_prefetch(bytes + AHEAD);
                    if (m) x = float8_value(bytes, m);
                    else u |= (WIDENED(bytes) >> stripe / turns * p & (masked ? (1 << p) - 1 : -1)) << low;
                    low += p;
                }
                if (!m && !TABLED(bits)) x = __builtin_convertvector(u, lanes) + r->bottom;
                sums[k] += TABLED(bits) ? LOOK_UP(r->table, u) : weighted ? x * r->step * r->weight : x * r->step;
            }
#pragma GCC unroll 8
        for (int k = 0; k < vectors; k++)
            if (start.past) STREAM(out + PLACE(k), sums[k]);
            else set_lanes(out + PLACE(k), sums[k]);
    }
}

/* Rows of one block to be added: `bytes` with planes at at[bits], and headers. Rows are f->row bytes apart. */
typedef struct {
    const Form *f;
    const uint8_t *bytes, *headers;
    i64 count, b, at[9];
    const float *weights;
} Rows;

INLINE void add_rows(const Rows *given, const int bits, const int m, i64 n, Start start, float *out)
{
    const Form *f = given->f;
    Row rows[AT_ONCE];
    for (i64 first = 0; first < given->count || first == 0; first += AT_ONCE, start.from = out) {
        const i64 count = least(given->count - first, AT_ONCE);
        for (i64 i = 0; i < count; i++) {
            const Grid g = read_header(f, given->headers + (first + i) * f->row, given->b);
            Row *r = &rows[i];
            r->bytes = given->bytes + (first + i) * f->row, r->bottom = g.bottom;
            r->weight = given->weights ? given->weights[first + i] : 1;
            r->step = g.step * (m == 3 ? 256 : 1); /* between the biases of fp16 and of e4m3 */
            if (TABLED(bits))
                r->table = (__builtin_convertvector(NUMBERED & ((1 << bits) - 1), lanes) + g.bottom) * r->step * r->weight;
        }
        add_codes(rows, count, bits, m, given->at, n, given->weights != NULL, start, out);
    }
}

#define KINDS(X) X(1, 0) X(2, 0) X(3, 0) X(4, 0) X(5, 0) X(6, 0) X(7, 0) X(8, 0) X(8, 2) X(8, 3) /* bits, m of float8 */
#define ADDER(bits, m) \
    APART void add_##bits##_##m(const Rows *r, i64 n, Start s, float *out) { add_rows(r, bits, m, n, s, out); }
#define NAME(bits, m) add_##bits##_##m,
KINDS(ADDER)
static void (*const adders[])(const Rows *, i64, Start, float *) = {KINDS(NAME)};

INLINE void add_planes(const Rows *rows, int bits, i64 n, Start start, float *out)
{
    adders[bits - 1 + (rows->f->m ? rows->f->m - 1 : 0)](rows, rounded_up(n), start, out);
}

/* Do it where stripes are not whole vectors: one row after another, whose codes are first split into bytes. */
APART void add_split(Rows rows, i64 n, Start start, float *out)
{
    uint8_t codes[WIDEST + SLACK];
    Rows one = rows;
    one.bytes = codes, one.count = least(rows.count, 1);
    for (i64 r = 0; r < rows.count || r == 0; r++, start.from = out) {
        if (one.count) split(one.f, rows.bytes + r * one.f->row, n, one.b, codes);
        add_planes(&one, 8, n, start, out);
        one.headers += one.f->row, one.weights += one.weights != NULL;
    }
}

/* Write sums of block b of rows to `out`, which has SLACK values beyond n unless n is a multiple of SLACK. */
INLINE void add_block(
    const Form *f, const uint8_t *packed, i64 count, const float *weights, i64 n, i64 b, Start start, float *out)
{
    Rows rows = {f, packed, packed + f->header_at, count, b, {0}, weights};
    if (n & (f->bits & 1 ? 2 * SLACK - 1 : SLACK - 1)) {
        add_split(rows, n, start, out);
        return;
    }
    EACH_PLANE(p, f->bits) rows.at[p] = plane_at(f, p, b);
    add_planes(&rows, f->bits, n, start, out);
}

#endif

/* The operations of blockwise formats on CPUs, byte for byte those of definition.py. A block at a time stays in L1. */
#include "common.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define SMALLEST 0x1p-126f
enum { WIDEST = 8192, SLACK = 64, AT_ONCE = 8, AHEAD = 1024, LEAST = 64, SPAN = 1024 };

/* Vectors of the machine. Compilers take some operations only as intrinsics: bytes widened, fp16 read, a table read. */
#ifdef __AVX512BW__
enum { LANES = 16 };
#define WIDENED(bytes) (places)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(bytes)))
#define WIDENED_HALF(bytes) (halves)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(bytes)))
#define FROM_FP16(h) (lanes)_mm512_cvtph_ps((__m256i)(h))
#define LOOK_UP(table, at) (lanes)_mm512_permutexvar_ps((__m512i)(at), (__m512)(table))
#elif defined __AVX2__ && defined __F16C__
enum { LANES = 8 };
#define WIDENED(bytes) (places)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(bytes)))
#define WIDENED_HALF(bytes) (halves)_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)(bytes)))
#define FROM_FP16(h) (lanes)_mm256_cvtph_ps((__m128i)(h))
#else
enum { LANES = 4 };
#define WIDENED(bytes) (places){(bytes)[0], (bytes)[1], (bytes)[2], (bytes)[3]}
#endif
#define APART static __attribute__((noinline)) /* registers and compile time for itself */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t places __attribute__((vector_size(4 * LANES)));
typedef int16_t halves __attribute__((vector_size(2 * LANES)));

typedef struct {
    int32_t float8, bits, wide, padded, rotated;
    float unit, spacing;                    /* of bottoms, in steps; of levels about zero */
    int32_t m, e, exponent, largest, block; /* the first four are of float8: see float8.py */
    i64 n, blocks, row, header_at, planes_at[3]; /* of a row: values, blocks, bytes, and where its parts begin */
    const float *signs;                     /* of the rotation */
} Form;

typedef struct {
    const Form *form;
    i64 rows;
    void *values;
    const uint8_t *packed;
    uint8_t *sent;
    float *residual, *weights;
    uint8_t *ok;
    i64 dtype, drawn, seed[2], threads; /* drawn: round at random */
} Call;

typedef struct { float step, scale, bottom; uint32_t field; } Grid;

INLINE i64 rounded_up(i64 n) { return (n + SLACK - 1) & -(i64)SLACK; }
INLINE int is_centred(const Form *f, int drawn)
{
    return !f->float8 && (f->bits == 1 || (f->rotated && !drawn && f->bits <= 3));
}

/* ---- rotation: rotation.py ---- */

INLINE void butterflies(float *x, i64 width, i64 d)
{
    for (i64 i = 0; i < width / (2 * d); i++)
        for (i64 k = 2 * d * i; k < 2 * d * i + d; k++) {
            float a = x[k], b = x[k + d];
            x[k] = a + b, x[k + d] = a - b;
        }
}

INLINE void hadamard(float *x, i64 width)
{
    butterflies(x, width, 1); /* compilers vectorise these by shuffles of known distances */
    butterflies(x, width, 2);
    butterflies(x, width, 4);
    butterflies(x, width, 8);
    for (i64 d = 16; d < width; d *= 2) butterflies(x, width, d);
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
    if (f->float8 || is_centred(f, drawn)) {
        float size = largest_magnitude(x, n);
        if (size - size != 0) return (Grid){NAN, NAN, 0, 255};
        if (f->float8) {
            int32_t field = (int32_t)((bits_of(size) + 0x7fffff - 0x600000) >> 23) - f->exponent;
            int32_t first = 1 + f->m - f->e, last = 254 - f->exponent;
            field = field < first ? first : field > last ? last : field;
            return (Grid){float_of((uint32_t)field << 23), float_of((uint32_t)(254 - field) << 23), 0, (uint32_t)field};
        }
        if (!drawn) size = mean_magnitude(x, n, size);
        if (size == 0) return (Grid){0, 0, -top * f->unit, 0};
        float step = bf16_above(smaller(larger(size * (drawn ? 2.0f : f->spacing), SMALLEST), 0x1p127f));
        return (Grid){step, 1 / step, -top * f->unit, 0};
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
    if (spread - spread != 0) return (Grid){NAN, NAN, 0, 255};
    float step = larger(spread / ((top - (float)drawn) / 2), SMALLEST);
    const float reach = larger(fabsf(low), fabsf(high)) / (32760.0f * f->unit);
    if (!f->wide) step = bf16_above(smaller(larger(reach, step), 0x1.fep127f));
    float scale = 1 / step, level = low * scale;
    if (fabsf(level) < SMALLEST) level = 0;
    if (f->wide && low == high && high != 0) return (Grid){high, 0, 1, 0};
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
    const int m = f->m, lowest = 127 + f->e, drop = 23 - m, bias = (lowest - 1) * (1 << 23), largest = f->largest;
    const float magic = float_of((uint32_t)(lowest + drop) << 23); /* whose last place is that of subnormal codes */
    for (i64 i = 0; i < n; i++) {
        int32_t u = (int32_t)bits_of(x[i] * g.scale), size = u & INT32_MAX, code;
        if (draws) {
            int32_t field = size >> 23 < lowest ? lowest : size >> 23;
            float level = float_of((uint32_t)size) * float_of((uint32_t)(254 - field + m) << 23), below = floorf(level);
            code = ((field - lowest) << m) + (int32_t)below + (level - below > draws[i]);
        } else {
            int32_t normal = (size - bias + (1 << (drop - 1)) - 1 + (size >> drop & 1)) >> drop;
            int32_t tiny = (int32_t)bits_of(float_of((uint32_t)size) + magic) - (int32_t)bits_of(magic);
            code = size < lowest << 23 ? tiny : normal;
        }
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
    else if (f->bits == 1 && !draws)
        for (i64 i = 0; i < n; i++) codes[i] = x[i] >= 0;
    else
        for (i64 i = 0; i < n; i++) {
            float level = x[i] * g.scale + before, below = floorf(level);
            level = draws ? below + (level - below > draws[i] ? 1.0f : 0.0f) : floorf(level + 0.5f);
            codes[i] = (uint8_t)(int32_t)smaller(larger(level - after, 0), top);
        }
}

/* ---- codes to bytes and back: format.py. A byte of a plane of p bits has the codes of 8 / p stripes. ---- */

INLINE void join_plane(uint8_t *restrict codes, i64 width, const int p, uint8_t *restrict out)
{
    for (i64 i = 0; i < width; i++) {
        int byte = 0;
#pragma GCC unroll 8
        for (int s = 0; s < 8 / p; s++) byte |= (codes[s * width + i] & ((1 << p) - 1)) << s * p;
        out[i] = (uint8_t)byte;
    }
}

INLINE i64 plane_at(const Form *f, int plane, int p, i64 b) { return f->planes_at[plane] + b * f->block * p / 8; }

/* Pack n codes, which have SLACK bytes beyond them, as block b of a row; the codes are lost. */
APART void join(const Form *f, uint8_t *codes, i64 n, i64 b, uint8_t *row)
{
    memset(codes + n, 0, SLACK);
    for (int p = 8, plane = 0; p; p /= 2) {
        if (!(f->bits & p)) continue;
        const i64 width = (n * p + 7) / 8;
        uint8_t *out = row + plane_at(f, plane++, p, b);
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
    for (int p = 8, plane = 0, low = 0; p; p /= 2) {
        if (!(f->bits & p)) continue;
        const i64 width = (n * p + 7) / 8;
        const uint8_t *in = row + plane_at(f, plane++, p, b);
        for (i64 i = 0; i < n; i++) codes[i] |= (uint8_t)((in[i % width] >> i / width * p & ((1 << p) - 1)) << low);
        low += p;
    }
}

/* ---- codes to sums of values ---- */

typedef struct {
    const uint8_t *bytes;
    float step, bottom, weight;
    lanes table; /* values by code, repeated */
} Row;

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

typedef struct { const float *from; float begin; } Start; /* of sums: values, or else one for all */
static const Start ZERO = {NULL, 0.0f}, NOTHING = {NULL, -0.0f}; /* -0 + x = x for any x */

#ifdef LOOK_UP /* takes no more bits of a place than its table has */
#define MASKED(bits, p) ((bits) > 4 ? (p) < 8 : (p) < (bits) && (p) > 1)
#else
#define MASKED(bits, p) ((p) < 8)
#endif

/* Add codes of n values of some rows to sums. A pass takes whole vectors of each stripe of the narrowest plane. */
INLINE void add_codes(
    const Row *rows, i64 count, const int bits, const int m, const int weighted, const i64 *at, i64 n, Start start,
    float *out)
{
    enum { MOST = 8 };
    const int least_bits = bits & -bits, stripes = 8 / least_bits, beside = least_bits > 1 ? least_bits / 2 : 1;
    const i64 width = n * least_bits / 8;
    for (i64 i = 0; i < width; i += beside * LANES) {
        lanes sums[MOST];
#pragma GCC unroll 8
        for (int k = 0; k < stripes * beside; k++) {
            sums[k] = (lanes)((places){0} | (int32_t)bits_of(start.begin));
            if (start.from) memcpy(&sums[k], start.from + k / beside * width + i + k % beside * LANES, sizeof *sums);
        }
        for (i64 r = 0; r < count; r++)
#pragma GCC unroll 8
            for (int k = 0; k < stripes * beside; k++) {
                const int s = k / beside, j = k % beside;
                lanes x = {0};
                places u = {0};
#pragma GCC unroll 4
                for (int p = 8, plane = 0, low = 0; p; p /= 2) {
                    if (!(bits & p)) continue;
                    const int turns = p / least_bits;
                    const uint8_t *bytes = rows[r].bytes + at[plane++] + s % turns * width + i + j * LANES;
                    if (s < turns && j * LANES % 64 == 0) __builtin_prefetch(bytes + AHEAD);
                    if (m) x = float8_value(bytes, m);
                    else u |= (WIDENED(bytes) >> s / turns * p & (MASKED(bits, p) ? (1 << p) - 1 : -1)) << low;
                    low += p;
                }
#ifdef LOOK_UP
                if (bits <= 4)
                    x = LOOK_UP(rows[r].table, u);
                else
#endif
                {
                    if (!m) x = __builtin_convertvector(u, lanes) + rows[r].bottom;
                    x *= rows[r].step;
                    if (weighted) x *= rows[r].weight;
                }
                sums[k] += x;
            }
#pragma GCC unroll 8
        for (int k = 0; k < stripes * beside; k++)
            memcpy(out + k / beside * width + i + k % beside * LANES, &sums[k], sizeof *sums);
    }
}

/* Rows to be added: `rows` with their codes `at` places of planes, and with headers. Rows are f->row bytes apart. */
typedef struct { const Form *f; const uint8_t *rows, *headers; i64 count; const float *weights; float sign; i64 b, at[3]; } Rows;

INLINE void add_rows(const Rows *given, const int bits, const int m, i64 n, Start start, float *out)
{
    Row rows[AT_ONCE];
    const Form *f = given->f;
    i64 r = 0, now;
    do {
        now = least(given->count - r, AT_ONCE);
        for (i64 i = 0; i < now; i++) {
            const Grid g = read_header(f, given->headers + (r + i) * f->row, given->b);
            const float weight = given->weights ? given->weights[r + i] : 1;
            rows[i].bytes = given->rows + (r + i) * f->row, rows[i].bottom = g.bottom, rows[i].weight = weight;
            rows[i].step = g.step * given->sign * (m == 3 ? 256 : 1); /* between the biases of fp16 and of the code */
            if (bits <= 4) {
                static const int32_t counting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
                places code;
                memcpy(&code, counting, sizeof code);
                rows[i].table = (__builtin_convertvector(code & ((1 << bits) - 1), lanes) + g.bottom) * g.step * weight;
            }
        }
        if (bits < 8 || given->weights)
            add_codes(rows, now, bits, m, 1, given->at, n, start, out);
        else
            add_codes(rows, now, bits, m, 0, given->at, n, start, out);
        r += now, start.from = out;
    } while (r < given->count);
}

#define ADD(name, bits, m) \
    APART void name(const Rows *rows, i64 n, Start start, float *out) { add_rows(rows, bits, m, n, start, out); }
ADD(add_1, 1, 0)
ADD(add_2, 2, 0)
ADD(add_3, 3, 0)
ADD(add_4, 4, 0)
ADD(add_5, 5, 0)
ADD(add_6, 6, 0)
ADD(add_7, 7, 0)
ADD(add_8, 8, 0)
ADD(add_e4m3, 8, 3)
ADD(add_e5m2, 8, 2)

INLINE void add_planes(const Rows *rows, int bits, i64 n, Start start, float *out)
{
    static void (*const each[])(const Rows *, i64, Start, float *) = {
        add_1, add_2, add_3, add_4, add_5, add_6, add_7, add_8, add_e5m2, add_e4m3};
    each[bits - 1 + (rows->f->float8 ? rows->f->m - 1 : 0)](rows, rounded_up(n), start, out);
}

APART void add_split(Rows given, i64 n, Start start, float *out)
{
    uint8_t codes[WIDEST + SLACK];
    Rows one = given;
    one.rows = codes, one.count = least(given.count, 1);
    for (i64 r = 0; r < given.count || r == 0; r++, start.from = out) {
        if (given.count) split(given.f, given.rows + r * given.f->row, n, given.b, codes);
        add_planes(&one, 8, n, start, out);
        one.headers += given.f->row, one.weights += one.weights != NULL;
    }
}

/* Write sums of block b of rows to `out`, which has SLACK values beyond n unless n is a multiple of SLACK. */
INLINE void add_block(
    const Form *f, const uint8_t *packed, i64 count, const float *weights, i64 n, i64 b, Start start, float *out)
{
    Rows rows = {f, packed, packed + f->header_at, count, weights, 1, b, {0}};
    if (n & (f->bits & 1 ? 2 * SLACK - 1 : SLACK - 1)) { /* stripes are not whole vectors */
        add_split(rows, n, start, out);
        return;
    }
    for (int p = 8, plane = 0; p; p /= 2)
        if (f->bits & p) rows.at[plane] = plane_at(f, plane, p, b), plane++;
    add_planes(&rows, f->bits, n, start, out);
}

/* ---- operations ---- */

/* A span is some blocks of a row, one after another: their n values, of which `all` are stored, begin at `at`. */
typedef struct { i64 r, b, blocks, n, all, at; } Span;
#define EACH_BLOCK(f, s)                                                  \
    for (i64 b = (s).b, j = 0, n __attribute__((unused));                 \
         n = least((s).all - j, (f)->block), n > 0; j += (f)->block, b++)

/* Job by job: spans of SPAN values, or of one block; a row begins with a span. */
INLINE i64 blocks_per_span(const Form *f) { return f->block < SPAN ? SPAN / f->block : 1; }
INLINE i64 spans_per_row(const Form *f) { return (f->blocks + blocks_per_span(f) - 1) / blocks_per_span(f); }
INLINE Span span_of(const Form *f, i64 job)
{
    Span s = {job / spans_per_row(f), job % spans_per_row(f) * blocks_per_span(f), blocks_per_span(f), 0, 0, 0};
    s.blocks = least(s.blocks, f->blocks - s.b);
    s.n = least(s.blocks * f->block, f->n - s.b * f->block);
    s.all = f->padded ? s.blocks * f->block : s.n;
    s.at = s.r * f->n + s.b * f->block;
    return s;
}

/* Pack the stored values of a span. Write what they decode to, or `from` less that, to `decoded` unless it is NULL. */
APART void pack(const Call *c, const float *x, Span s, uint8_t *row, const float *from, float *decoded)
{
    const Form *f = c->form;
    Grid grids[SPAN / LEAST];
    float draws[WIDEST];
    EACH_BLOCK(f, s) grids[b - s.b] = measure(f, x + j, n, c->drawn); /* first: these wait for divisions */
    EACH_BLOCK(f, s) {
        const Grid g = grids[b - s.b];
        uint8_t space[WIDEST + SLACK], *codes = space;
        if (f->bits == 8 && !(n & (SLACK - 1))) codes = row + plane_at(f, 0, 8, b); /* as they are packed */
        for (i64 i = 0; c->drawn && i < n; i++) draws[i] = uniform((uint64_t)(s.at + j + i), c->seed[0], c->seed[1]);
        write_header(f, g, row + f->header_at, b);
        encode(f, x + j, n, g, c->drawn ? draws : NULL, codes);
        if (decoded) {
            const Rows one = {f, codes, row + f->header_at, 1, NULL, from ? -1 : 1, b, {0}};
            add_planes(&one, 8, n, from ? (Start){from + j, 0} : NOTHING, decoded + j);
        }
        if (codes == space) join(f, codes, n, b, row);
    }
}

/* Return a buffer's values, which are those of x, with zeros up to a count. */
INLINE float *copied(float *buffer, const float *x, i64 n, i64 count)
{
    if (x != buffer) memcpy(buffer, x, (size_t)n * sizeof *x);
    memset(buffer + n, 0, (size_t)(count - n) * sizeof *x);
    return buffer;
}

static void compress_span(const Call *c, const Form *f, Span s)
{
    float values[WIDEST + SLACK], turned[WIDEST + SLACK], *residual = c->residual ? c->residual + s.at : NULL;
    uint8_t *row = c->sent + s.r * f->row;
    const float *x = load(c->values, c->dtype, s.at, s.n, values);
    if (s.all > s.n || s.n & (SLACK - 1)) x = copied(values, x, s.n, rounded_up(s.all));
    if (!f->rotated) {
        float *lost = residual && x == values ? turned : residual;
        pack(c, x, s, row, x, lost);
        if (lost != residual) memcpy(residual, lost, (size_t)s.n * sizeof *lost);
        return;
    }
    EACH_BLOCK(f, s) rotate(f, x + j, turned + j);
    pack(c, turned, s, row, NULL, residual ? turned : NULL);
    if (residual) EACH_BLOCK(f, s) restore(f, turned + j);
    for (i64 i = 0; residual && i < s.n; i++) residual[i] = x[i] - turned[i];
}

/* Return where to compute values of `c->values`: there, or in a buffer. */
INLINE float *place_of(const Call *c, Span s, float *buffer)
{
    if (c->dtype != FP32 || s.n < s.all || s.n & (SLACK - 1)) return buffer;
    float *values = (float *)c->values + s.at;
    if (c->form->bits < 8 || c->weights) /* caches do not guess what comes after stripes, or is also read */
        for (i64 i = 0; i < s.n; i += 16) __builtin_prefetch(values + s.n + i, 1);
    return values;
}

static void decompress_span(const Call *c, const Form *f, Span s)
{
    float space[WIDEST + SLACK], *values = place_of(c, s, space);
    EACH_BLOCK(f, s) {
        add_block(f, c->packed + s.r * f->row, 1, NULL, n, b, NOTHING, values + j);
        if (f->rotated) restore(f, values + j);
    }
    if (values == space) store(c->values, c->dtype, s.at, s.n, values);
    if (!c->ok) return;
    const float *kept = load(c->values, c->dtype, s.at, s.n, space); /* in their dtype they may be infinite */
    uint32_t carried = 0; /* into the sign, from exponents that are all ones */
    for (i64 i = 0; i < s.n; i++) carried |= (bits_of(kept[i]) & INT32_MAX) + 0x800000;
    if (carried >> 31) __atomic_store_n(c->ok, 0, __ATOMIC_RELAXED);
}

static void add_span(const Call *c, const Form *f, Span s)
{
    float space[WIDEST + SLACK], turned[WIDEST + SLACK], *values = place_of(c, s, space);
    if (values == space) copied(space, load(c->values, c->dtype, s.at, s.n, space), s.n, rounded_up(s.all));
    float *sums = f->rotated ? turned : values;
    EACH_BLOCK(f, s) {
        add_block(f, c->packed, c->rows, c->weights, n, b, f->rotated ? ZERO : (Start){values + j, 0}, sums + j);
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
    pack(c, mean, s, c->sent, mean, c->residual ? values : NULL);
    if (!c->residual) return;
    if (f->rotated) EACH_BLOCK(f, s) restore(f, values + j);
    for (i64 i = 0; i < s.n; i++) c->residual[s.at + i] += values[i] * count;
}

/* ---- what Python calls ---- */

typedef struct { const Call *call; void (*work)(const Call *, const Form *, Span); } Work;

static void work_on(const void *given, i64 job)
{
    const Work *w = given;
    w->work(w->call, w->call->form, span_of(w->call->form, job));
}

static void run(const Call *c, i64 rows, void (*work)(const Call *, const Form *, Span))
{
    Work w = {c, work};
    parallel(work_on, &w, rows * spans_per_row(c->form), c->threads);
}

void compress(const Call *c) { run(c, c->rows, compress_span); }
void decompress(const Call *c) { run(c, c->rows, decompress_span); }
void add(const Call *c) { run(c, 1, add_span); }
void reduce(const Call *c) { run(c, 1, reduce_span); }

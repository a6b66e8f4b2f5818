/* The operations of definition.py, span by span. */
#include "common.h"

enum { BLOCK = 4096, LINE = 256, LINES = 1, BITMAP = 2, ALL = 3, SPAN = 64 };

#ifdef __AVX2__
#include <immintrin.h>
#endif

/* Return the highest bits of 64 bytes that are 0 or 255. */
INLINE uint64_t signs(const uint8_t *bytes)
{
    uint64_t some = 0;
#ifdef __AVX2__
    for (int i = 0; i < 64; i += 32)
        some |= (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_loadu_si256((const void *)(bytes + i))) << i;
#else
    for (int i = 0; i < 64; i += 8) {
        uint64_t eight;
        memcpy(&eight, bytes + i, 8);
        some |= ((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56) << i;
    }
#endif
    return some;
}

#ifdef __AVX512VBMI2__
static const uint8_t from_0[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                   22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
                                   44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

/* Write the places, from `first` on, of the bits of `some` behind the m-th place; return how many there are then. */
INLINE int spread(uint64_t some, int first, uint16_t *restrict places, int m)
{
    __m512i places_0 = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)from_0));
    for (int i = 0; i < 64; i += 32, some >>= 32) {
        __m512i all = _mm512_add_epi16(places_0, _mm512_set1_epi16((short)(first + i)));
        _mm512_storeu_si512(places + m, _mm512_maskz_compress_epi16((uint32_t)some, all));
        m += __builtin_popcount((uint32_t)some);
    }
    return m;
}
#else
INLINE int spread(uint64_t some, int first, uint16_t *restrict places, int m)
{
    int count = __builtin_popcountll(some);
    for (int k = 0; k == 0 || k < count; k += 4) /* four at once: how often this repeats cannot be predicted */
        for (int j = k; j < k + 4; j++, some &= some - 1)
            places[m + j] = (uint16_t)(first + (some ? __builtin_ctzll(some) : 0));
    return m + count;
}
#endif

/* What is packed of a block: `count` places of m numbers of w bytes, or all of them. */
typedef struct { int m, w, count, all; const uint8_t *planes; uint16_t places[BLOCK + 64]; } Found;

/* Find what is packed of a block of n values. A place beyond it, which no encoder writes, ends them. */
static void find_packed(int n, int32_t head, const uint8_t *part, Found *f)
{
    int m = head & 0xffff, kind = head >> 20, count = 0;
    f->m = m, f->w = head >> 16 & 15, f->all = kind == ALL && m == n, f->planes = part;
    if (kind == LINES) {
        for (int line = 0; line < BLOCK / LINE; line++) {
            const uint8_t *in_line = part + BLOCK / LINE + count;
            int here = (int)least(m - count, part[line]);
#ifdef __AVX512VBMI2__
            for (int k = 0; k < here; k += 32) {
                __m256i some = _mm256_maskz_loadu_epi8(_bzhi_u32(~0u, (uint32_t)(here - k)), in_line + k);
                __m512i places = _mm512_add_epi16(_mm512_cvtepu8_epi16(some), _mm512_set1_epi16((short)(line * LINE)));
                _mm512_storeu_si512(f->places + count + k, places);
            }
#else
            for (int k = 0; k < here; k++) f->places[count + k] = (uint16_t)(line * LINE + in_line[k]);
#endif
            count += here;
        }
        f->planes += BLOCK / LINE + m;
    } else if (kind == BITMAP) {
        for (int i = 0; i < BLOCK; i += 64) {
            uint64_t some;
            memcpy(&some, part + i / 8, 8);
            count = spread(some, i, f->places, count);
        }
        count = (int)least(m, count);
        f->planes += BLOCK / 8;
    }
    f->count = count;
    for (int k = 0; k < f->count && n < BLOCK; k++)
        if (f->places[k] >= n) f->count = k;
}

#define JOINED(a, bits, b) a##bits##b
#define JOIN(a, bits, b) JOINED(a, bits, b)
#define NAMED(f) JOIN(f, BITS, )
#define WORD JOIN(int, BITS, _t)
#define DIFFERENCE int32_t
#define UNSIGNED uint32_t
#define BITS 8
#include "words.h"
#undef BITS
#define BITS 16
#include "words.h"
#undef BITS
#define BITS 32
#include "words.h"
#undef BITS
#undef DIFFERENCE
#undef UNSIGNED
#define DIFFERENCE int64_t
#define UNSIGNED uint64_t
#define BITS 64
#include "words.h"

typedef int32_t Encoder(const void *new, void *old, int n, uint8_t **end);
typedef struct { const uint8_t *new; uint8_t *old; int32_t *heads; uint8_t *slots; i64 *ends, n, size, threads; } Encode;

static i64 spans_of(i64 n) { return (n + SPAN * BLOCK - 1) / (SPAN * BLOCK); }

/* Pack the blocks from word `first` on, one behind the other; return how many bytes they have. */
static i64 encode_blocks(const Encode *c, i64 first, i64 last, uint8_t *begin)
{
    Encoder *encode = c->size == 1 ? encode8 : c->size == 2 ? encode16 : c->size == 4 ? encode32 : encode64;
    uint8_t *end = begin;
    for (; first < least(c->n, last); first += BLOCK)
        c->heads[first / BLOCK] =
            encode(c->new + first * c->size, c->old + first * c->size, (int)least(BLOCK, c->n - first), &end);
    return end - begin;
}

/* What is packed of a span begins where its values would; ends[i] is how many bytes it has. */
static void encode_span(const void *context, i64 i)
{
    const Encode *c = context;
    c->ends[i] = encode_blocks(c, i * SPAN * BLOCK, (i + 1) * SPAN * BLOCK, c->slots + i * SPAN * BLOCK * c->size);
}

/* Pack all spans, one behind the other; ends[0] then is how many bytes they have. */
void changes_encode(const Encode *c)
{
    if (c->threads == 1 || spans_of(c->n) < 2) { /* less memory is written */
        c->ends[0] = encode_blocks(c, 0, c->n, c->slots);
        return;
    }
    parallel(encode_span, c, spans_of(c->n), c->threads);
    for (i64 i = 1; i < spans_of(c->n); c->ends[0] += c->ends[i++])
        memmove(c->slots + c->ends[0], c->slots + i * SPAN * BLOCK * c->size, c->ends[i]);
}

enum { ROW = 256 }; /* words of 4 bytes */
typedef struct { const uint8_t *x; const uint32_t *keys; uint64_t *sums; i64 n, threads; } Fold;

static void fold_row(const void *context, i64 i)
{
    const Fold *c = context;
    uint32_t x[ROW] = {0};
    memcpy(x, c->x + 4 * ROW * i, least(4 * ROW, c->n - 4 * ROW * i));
    for (int one = 0; one < 2; one++) {
        const uint32_t *k = c->keys + one * ROW;
        uint64_t sum = 0;
        for (int j = 0; j < ROW / 2; j++) sum += (uint64_t)(x[j] + k[j]) * (x[j + ROW / 2] + k[j + ROW / 2]);
        c->sums[2 * i + one] = sum;
    }
}

void changes_fold(const Fold *c) { parallel(fold_row, c, (c->n + 4 * ROW - 1) / (4 * ROW), c->threads); }

typedef void Adder(void *x, const Found *f);
typedef struct { uint8_t *x; const int32_t *heads; const i64 *starts; const uint8_t *packed; i64 n, size, threads; } Add;

enum { FEW = 150 }; /* changed values of a block: of more, the processor fetches the lines by itself */

/* Memory takes long to answer, so the places of a block are found, and fetched, before the block before it is done. */
static void add_span(const void *context, i64 i)
{
    const Add *c = context;
    Adder *add = c->size == 1 ? add8 : c->size == 2 ? add16 : c->size == 4 ? add32 : add64;
    Found found[2];
    uint8_t *before = NULL;
    int k = 0;
    for (i64 first = i * SPAN * BLOCK; first < least(c->n, (i + 1) * SPAN * BLOCK); first += BLOCK) {
        int32_t head = c->heads[first / BLOCK];
        if (!head) continue;
        Found *here = &found[k];
        uint8_t *x = c->x + first * c->size;
        find_packed((int)least(BLOCK, c->n - first), head, c->packed + c->starts[first / BLOCK], here);
        for (int j = 0; j < here->count && here->count <= FEW; j++) __builtin_prefetch(x + here->places[j] * c->size, 1);
        k = 1 - k;
        if (before) add(before, &found[k]);
        before = x;
    }
    if (before) add(before, &found[1 - k]);
}

void changes_add(const Add *c) { parallel(add_span, c, spans_of(c->n), c->threads); }

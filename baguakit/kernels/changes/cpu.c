/* The operations of definition.py, span by span. */
#include "common.h"

enum { BLOCK = 4096, LINE = 256, LINES = 1, BITMAP = 2, ALL = 3, SPAN = 64 };

/* From a bit for each value of a block get places in lines, and the count of each line. Return how many there are. */
INLINE int spread(const uint8_t *restrict bits, uint8_t *restrict places, int *restrict counts)
{
    int m = 0;
    for (int line = 0; line < BLOCK / LINE; line++) {
        int before = m;
        for (int i = 0; i < LINE; i += 64) {
            uint64_t some;
            memcpy(&some, bits + (line * LINE + i) / 8, 8);
            for (; some; some &= some - 1) places[m++] = (uint8_t)(i + __builtin_ctzll(some));
        }
        counts[line] = m - before;
    }
    return m;
}

#define JOINED(f, bits) f##bits
#define DIFFERENCE int32_t
#define UNSIGNED uint32_t
#define NAMED(f) JOINED(f, 8)
#define WORD int8_t
#include "words.h"
#undef NAMED
#undef WORD
#define NAMED(f) JOINED(f, 16)
#define WORD int16_t
#include "words.h"
#undef NAMED
#undef WORD
#define NAMED(f) JOINED(f, 32)
#define WORD int32_t
#include "words.h"
#undef NAMED
#undef WORD
#undef DIFFERENCE
#undef UNSIGNED
#define DIFFERENCE int64_t
#define UNSIGNED uint64_t
#define NAMED(f) JOINED(f, 64)
#define WORD int64_t
#include "words.h"

typedef int32_t Encoder(const void *new, void *old, int n, uint8_t **end);
typedef struct { const uint8_t *new; uint8_t *old; int32_t *heads; uint8_t *slots; i64 n, size, threads; } Encode;

static i64 spans_of(i64 n) { return (n + SPAN * BLOCK - 1) / (SPAN * BLOCK); }

/* What is packed of a span begins where its values would. */
static void encode_span(const void *context, i64 i)
{
    const Encode *c = context;
    Encoder *encode = c->size == 1 ? encode8 : c->size == 2 ? encode16 : c->size == 4 ? encode32 : encode64;
    uint8_t *end = c->slots + i * SPAN * BLOCK * c->size;
    for (i64 first = i * SPAN * BLOCK; first < least(c->n, (i + 1) * SPAN * BLOCK); first += BLOCK)
        c->heads[first / BLOCK] =
            encode(c->new + first * c->size, c->old + first * c->size, (int)least(BLOCK, c->n - first), &end);
}

void changes_encode(const Encode *c) { parallel(encode_span, c, spans_of(c->n), c->threads); }

typedef void Adder(void *x, int n, int32_t head, const uint8_t *part);
typedef struct { uint8_t *x; const int32_t *heads; const i64 *starts; const uint8_t *packed; i64 n, size, threads; } Add;

static void add_span(const void *context, i64 i)
{
    const Add *c = context;
    Adder *add = c->size == 1 ? add8 : c->size == 2 ? add16 : c->size == 4 ? add32 : add64;
    for (i64 first = i * SPAN * BLOCK; first < least(c->n, (i + 1) * SPAN * BLOCK); first += BLOCK)
        if (c->heads[first / BLOCK])
            add(c->x + first * c->size, (int)least(BLOCK, c->n - first), c->heads[first / BLOCK],
                c->packed + c->starts[first / BLOCK]);
}

void changes_add(const Add *c) { parallel(add_span, c, spans_of(c->n), c->threads); }

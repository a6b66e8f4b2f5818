/* Repeat recorded calls of a family's functions, and compare what they write: see replay.py.

   It is linked with the family's C file; NAMES(X) lists its functions as X(name). Each region of memory gets an
   allocation of its own, which ends where the region ends, so that AddressSanitizer finds every access beyond it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INTEGERS = 24, ALIGNED = 64 };

typedef struct {
    char name[32];
    int32_t regions, links, threads; /* threads: the place of that argument */
    int32_t unused;
    int64_t integers[INTEGERS];
} Call;
typedef struct { int32_t region, target; int64_t at, offset; } Link; /* an address; region -1: among the integers */
typedef struct { int64_t size; int32_t dtype, shift; } Shape;        /* shift: of its start from aligned memory */
typedef struct { Shape shape; char *base, *memory, *expected; } Region;
static const struct { int width; uint64_t infinity; } dtypes[] = {
    {1, 0x7f}, {4, 0x7f800000}, {2, 0x7f80}, {2, 0x7c00}, {8, 0x7ff0000000000000}}; /* as in replay.py */

typedef void Function(const int64_t *);
#define DECLARED(name) Function name;
#define ENTRY(name) {#name, name},
NAMES(DECLARED)
static const struct { const char *name; Function *function; } functions[] = {NAMES(ENTRY)};

static void need(int truth, const char *name, const char *words)
{
    if (!truth) {
        fprintf(stderr, "%s: %s\n", name, words);
        exit(2);
    }
}

static void take(void *to, size_t size, FILE *file) { need(fread(to, 1, size, file) == size, "file", "ends early"); }

/* NaNs are equal, whatever their bits. */
static int equal(const char *a, const char *b, int dtype)
{
    uint64_t x = 0, y = 0, sign = 1ull << (8 * dtypes[dtype].width - 1), infinity = dtypes[dtype].infinity;
    memcpy(&x, a, dtypes[dtype].width);
    memcpy(&y, b, dtypes[dtype].width);
    return x == y || ((x & ~sign) > infinity && (y & ~sign) > infinity);
}

static void replay(Call *call, FILE *file, int64_t threads, long place)
{
    Region *regions = calloc(call->regions + 1, sizeof *regions), *end = regions + call->regions;
    Link *links = calloc(call->links + 1, sizeof *links);
    take(links, call->links * sizeof *links, file);
    for (Region *r = regions; r < end; r++) {
        take(&r->shape, sizeof r->shape, file);
        need(posix_memalign((void **)&r->base, ALIGNED, r->shape.shift + r->shape.size) == 0, call->name, "no memory");
        r->memory = r->base + r->shape.shift, r->expected = malloc(r->shape.size);
        take(r->memory, r->shape.size, file);
        take(r->expected, r->shape.size, file);
    }
    for (Link *l = links; l < links + call->links; l++) {
        int64_t address = (int64_t)(regions[l->target].memory + l->offset);
        if (l->region < 0)
            call->integers[l->at] = address;
        else {
            memcpy(regions[l->region].memory + l->at, &address, 8);
            memcpy(regions[l->region].expected + l->at, &address, 8);
        }
    }
    if (threads) call->integers[call->threads] = threads;
    size_t i = 0, known = sizeof functions / sizeof *functions;
    while (i < known && strcmp(functions[i].name, call->name)) i++;
    need(i < known, call->name, "is not in NAMES");
    functions[i].function(call->integers);
    for (Region *r = regions; r < end; r++) {
        int width = dtypes[r->shape.dtype].width;
        for (int64_t at = 0; at + width <= r->shape.size; at += width)
            if (!equal(r->memory + at, r->expected + at, r->shape.dtype)) {
                fprintf(stderr, "call %ld, %s: byte %ld of region %ld differs\n", place, call->name, (long)at,
                        (long)(r - regions));
                exit(1);
            }
        free(r->base), free(r->expected);
    }
    free(regions), free(links);
}

int main(int count, char **words)
{
    need(count == 3, "replay", "takes a file, and a number of threads, or 0 for that of each call");
    FILE *file = fopen(words[1], "rb");
    need(file != NULL, words[1], "cannot be opened");
    Call call;
    long place = 0;
    for (; fread(&call, sizeof call, 1, file) == 1; place++)
        replay(&call, file, atoi(words[2]), place);
    printf("%ld calls\n", place);
    return 0;
}

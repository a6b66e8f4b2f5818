/* The operations of definition.py on a block of words of BITS bits: cpu.c includes this file for each. WORD is the type
   of a word, DIFFERENCE a signed type that holds it, in whose size compilers vectorise, and NAMED(f) the name of f. */

/* What has changed in a block: a bit for each word, the count of each line, and of the changed ones the place and d. */
typedef struct {
    _Alignas(64) uint64_t bits[BLOCK / 64];
    int counts[BLOCK / LINE];
    uint8_t places[BLOCK + 64];
    WORD d[BLOCK + 64];
} NAMED(Changed);

/* Take what has changed in a whole block, and copy it; return how many words. */
static int NAMED(take)(const WORD *restrict new, WORD *restrict old, NAMED(Changed) *restrict c)
{
    int m = 0;
    memset(c->counts, 0, sizeof c->counts);
#ifdef __AVX512VBMI2__
    WORD unused[64];
    for (int i = 0; i < BLOCK; i += 64) {
        uint64_t some = 0;
        int before = m;
        for (int j = 0; j < 64; j += 512 / BITS) {
            __m512i a = _mm512_loadu_si512(new + i + j), b = _mm512_loadu_si512(old + i + j);
            uint64_t here = JOIN(_mm512_cmpneq_epi, BITS, _mask)(a, b);
            __m512i d = JOIN(_mm512_sub_epi, BITS, )(a, b);
            _mm512_storeu_si512(c->d + m, JOIN(_mm512_maskz_compress_epi, BITS, )(here, d));
            _mm512_storeu_si512(here ? old + i + j : unused, a); /* not a branch, which could not be predicted */
            some |= here << j;
            m += __builtin_popcountll(here);
        }
        __m512i all = _mm512_add_epi8(_mm512_loadu_si512(from_0), _mm512_set1_epi8((char)i));
        _mm512_storeu_si512(c->places + before, _mm512_maskz_compress_epi8(some, all));
        c->bits[i / 64] = some;
        c->counts[i / LINE] += m - before;
    }
#else
    uint16_t places[BLOCK + 64];
    for (int i = 0; i < BLOCK; i += 64) {
        uint8_t differs[64];
        for (int j = 0; j < 64; j++) differs[j] = new[i + j] != old[i + j] ? 255 : 0;
        uint64_t some = c->bits[i / 64] = signs(differs);
        c->counts[i / LINE] += spread(some, i, places, m) - m;
        m += __builtin_popcountll(some);
    }
    for (int k = 0; k < m; k++) {
        int at = places[k];
        c->places[k] = (uint8_t)at;
        c->d[k] = (WORD)((UNSIGNED)new[at] - (UNSIGNED)old[at]);
        old[at] = new[at];
    }
#endif
    return m;
}

/* Pack a whole block, of which n words are there; copy what has changed, and return the head. */
static int32_t NAMED(encode_whole)(const void *new, void *old, int n, uint8_t **end)
{
    NAMED(Changed) c;
    int m = NAMED(take)(new, old, &c), w = 1, most = 0;
    if (m == 0) return 0;
    for (int line = 0; line < BLOCK / LINE; line++) most = c.counts[line] > most ? c.counts[line] : most;
    WORD largest = 0;
    for (int k = 0; k < m; k++) largest |= c.d[k] ^ (c.d[k] < 0 ? -1 : 0);
    while (w < (int)sizeof(WORD) && largest >> (8 * w - 1)) w++;
    int kind = LINES, length = 16 + m * (1 + w);
    if (most == LINE || BLOCK / 8 + m * w < length) kind = BITMAP, length = BLOCK / 8 + m * w;
    if (n * w < length) kind = ALL;
    uint8_t *out = *end;
    if (kind == LINES) {
        for (int line = 0; line < BLOCK / LINE; line++) *out++ = (uint8_t)c.counts[line];
        memcpy(out, c.places, m);
        out += m;
    } else if (kind == BITMAP) {
        memcpy(out, c.bits, BLOCK / 8);
        out += BLOCK / 8;
    } else if (m < n) {
        for (int i = n - 1, k = m - 1; i >= 0; i--) /* what is read is never behind what is written: k <= i */
            c.d[i] = c.bits[i / 64] >> i % 64 & 1 ? c.d[k--] : 0;
        m = n;
    }
    for (int byte = 0; byte < w; byte++, out += m)
        for (int k = 0; k < m; k++) out[k] = (uint8_t)(c.d[k] >> 8 * byte);
    *end = out;
    return m + (w << 16) + (kind << 20);
}

/* Pack a block, copy what has changed, and return the head; *end then is behind what was packed. */
static int32_t NAMED(encode)(const void *new, void *old, int n, uint8_t **end)
{
    if (n < BLOCK) {
        WORD from[BLOCK] = {0}, to[BLOCK] = {0};
        memcpy(from, new, n * sizeof(WORD));
        memcpy(to, old, n * sizeof(WORD));
        memcpy(old, new, n * sizeof(WORD));
        return NAMED(encode_whole)(from, to, n, end);
    }
    return NAMED(encode_whole)(new, old, n, end);
}

/* Return the k-th of m signed numbers of w bytes; w is a constant where this is inlined. */
INLINE UNSIGNED NAMED(told)(const uint8_t *planes, int m, int k, int w)
{
    UNSIGNED d = 0;
    for (int byte = 0; byte < w; byte++) d |= (UNSIGNED)planes[byte * m + k] << 8 * byte;
    int rest = 8 * ((int)sizeof d - w);
    return (UNSIGNED)((DIFFERENCE)(d << rest) >> rest);
}

INLINE void NAMED(add_told)(WORD *x, const Found *f, int w)
{
    if (f->all)
        for (int i = 0; i < f->m; i++) x[i] = (WORD)((UNSIGNED)x[i] + NAMED(told)(f->planes, f->m, i, w));
    else
        for (int k = 0; k < f->count; k++)
            x[f->places[k]] = (WORD)((UNSIGNED)x[f->places[k]] + NAMED(told)(f->planes, f->m, k, w));
}

/* Add the d of a block. */
static void NAMED(add)(void *x, const Found *f)
{
    if (f->w == 1) NAMED(add_told)(x, f, 1);
    else if (f->w == 2) NAMED(add_told)(x, f, 2);
    else NAMED(add_told)(x, f, f->w);
}

/* The operations of definition.py on a block of words of BITS bits: cpu.c includes this file for each. WORD is the type
   of a word, DIFFERENCE a signed type that holds it, in whose size compilers vectorise, and NAMED(f) the name of f. */

/* Return a bit for each of 64 words: whether it differs. Of them n are there; none if n is negative. */
INLINE uint64_t NAMED(differing)(const WORD *restrict x, const WORD *restrict y, int n)
{
    uint64_t some = 0;
#ifdef __AVX512VBMI2__
    if (n >= 64) {
        for (int i = 0; i < 64; i += 512 / BITS) {
            __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(y + i);
            some |= (uint64_t)JOIN(_mm512_cmpneq_epi, BITS, _mask)(a, b) << i;
        }
        return some;
    }
#endif
    uint8_t flags[64] = {0};
    if (n >= 64)
        for (int i = 0; i < 64; i++) flags[i] = x[i] != y[i];
    else
        for (int i = 0; i < n; i++) flags[i] = x[i] != y[i];
    for (int i = 0; i < 64; i += 8) {
        uint64_t eight;
        memcpy(&eight, flags + i, 8);
        some |= (eight * 0x0102040810204080u >> 56) << i;
    }
    return some;
}

/* Pack a block, copy what has changed, and return the head; *end then is behind what was packed. */
static int32_t NAMED(encode)(const void *from, void *to, int n, uint8_t **end)
{
    _Alignas(64) uint64_t bits[BLOCK / 64];
    uint16_t places[BLOCK + 64];
    _Alignas(64) DIFFERENCE d[BLOCK + 64];
    uint8_t bytes[BLOCK + 64];
    const WORD *new = from;
    WORD *old = to;
    int counts[BLOCK / LINE], m = 0, w = 1, most = 0;
    for (int line = 0; line < BLOCK / LINE; line++) {
        int before = m;
        for (int i = line * LINE; i < (line + 1) * LINE; i += 64) {
            bits[i / 64] = NAMED(differing)(new + i, old + i, n - i);
            m = spread(bits[i / 64], i, places, m);
        }
        counts[line] = m - before;
        most = counts[line] > most ? counts[line] : most;
    }
    if (m == 0) return 0;
    int dense = 4 * m > n || n < LINE, told = dense ? n : m;
    if (dense)
        for (int i = 0; i < n; i++) d[i] = (WORD)(DIFFERENCE)((UNSIGNED)new[i] - (UNSIGNED)old[i]);
    else
        for (int k = 0; k < m; k++) {
            int at = places[k];
            d[k] = (WORD)(DIFFERENCE)((UNSIGNED)new[at] - (UNSIGNED)old[at]);
            old[at] = new[at];
        }
    DIFFERENCE largest = 0;
    memset(d + told, 0, 64 * sizeof d[0]); /* so loops may run in whole vectors */
    for (int k = 0; k < told; k += 64)
        for (int i = k; i < k + 64; i++) largest |= d[i] ^ (d[i] < 0 ? -1 : 0);
    while (w < (int)sizeof(WORD) && largest >> (8 * w - 1)) w++;
    int kind = LINES, length = 16 + m * (1 + w);
    if (most == LINE || BLOCK / 8 + m * w < length) kind = BITMAP, length = BLOCK / 8 + m * w;
    if (n * w < length) kind = ALL, m = n;
    uint8_t *restrict out = *end;
    if (kind == LINES) {
        for (int line = 0; line < BLOCK / LINE; line++) *out++ = (uint8_t)counts[line];
        for (int k = 0; k < m; k += 64)
            for (int i = k; i < k + 64; i++) bytes[i] = (uint8_t)places[i];
        memcpy(out, bytes, m);
        out += m;
    } else if (kind == BITMAP) {
        memcpy(out, bits, BLOCK / 8);
        out += BLOCK / 8;
    }
    if (kind != ALL && dense) /* only now: what is packed of a block that has all is not moved */
        for (int k = 0; k < m; k++) d[k] = d[places[k]];
    for (int byte = 0; byte < w; byte++, out += m) {
        for (int k = 0; k < m; k += 64)
            for (int i = k; i < k + 64; i++) bytes[i] = (uint8_t)(d[i] >> 8 * byte);
        memcpy(out, bytes, m);
    }
    if (dense) memcpy(old, new, n * sizeof(WORD));
    *end = out;
    return m + (w << 16) + (kind << 20);
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

/* The operations of definition.py on a block of words of one size: cpu.c includes this file for each. WORD is the type
   of a word, DIFFERENCE a signed type that holds it, in whose size compilers vectorise, and NAMED(f) the name of f. */

/* Pack a block, copy what has changed, and return the head; *end then is behind what was packed. */
static int32_t NAMED(encode)(const void *from, void *to, int n, uint8_t **end)
{
    _Alignas(64) uint8_t flags[BLOCK], bits[BLOCK / 8], places[BLOCK];
    _Alignas(64) DIFFERENCE d[BLOCK];
    const WORD *new = from;
    WORD *old = to;
    int counts[BLOCK / LINE], w = 1, most = 0;
    if (memcmp(new, old, n * sizeof(WORD)) == 0) return 0;
    for (int i = 0; i < n; i++) flags[i] = new[i] != old[i];
    for (int i = n; i < BLOCK; i++) flags[i] = 0;
    for (int i = 0; i < BLOCK / 8; i++) {
        uint64_t eight;
        memcpy(&eight, flags + 8 * i, 8);
        bits[i] = (uint8_t)(eight * 0x0102040810204080u >> 56);
    }
    int m = spread(bits, places, counts), dense = 4 * m > n || n < LINE, told = dense ? n : m;
    for (int line = 0; line < BLOCK / LINE; line++) most = counts[line] > most ? counts[line] : most;
    if (dense)
        for (int i = 0; i < n; i++) d[i] = (WORD)(DIFFERENCE)((UNSIGNED)new[i] - (UNSIGNED)old[i]);
    else
        for (int line = 0, k = 0; line < BLOCK / LINE; line++)
            for (int stop = k + counts[line], at = line * LINE; k < stop; k++)
                d[k] = (WORD)(DIFFERENCE)((UNSIGNED)new[at + places[k]] - (UNSIGNED)old[at + places[k]]);
    DIFFERENCE largest = 0;
    for (int i = 0; i < told; i++) largest |= d[i] ^ (d[i] < 0 ? -1 : 0);
    while (w < (int)sizeof(WORD) && largest >> (8 * w - 1)) w++;
    int kind = LINES, length = 16 + m * (1 + w);
    if (most == LINE || BLOCK / 8 + m * w < length) kind = BITMAP, length = BLOCK / 8 + m * w;
    if (n * w < length) kind = ALL, m = n;
    uint8_t *restrict out = *end;
    if (kind == LINES) {
        for (int line = 0; line < BLOCK / LINE; line++) *out++ = (uint8_t)counts[line];
        memcpy(out, places, m);
        out += m;
    } else if (kind == BITMAP) {
        memcpy(out, bits, BLOCK / 8);
        out += BLOCK / 8;
    }
    if (kind != ALL && dense) /* only now: what is packed of a block that has all is not moved */
        for (int line = 0, k = 0; line < BLOCK / LINE; line++)
            for (int stop = k + counts[line]; k < stop; k++) d[k] = d[line * LINE + places[k]];
    for (int byte = 0; byte < w; byte++, out += m)
        for (int i = 0; i < m; i++) out[i] = (uint8_t)(d[i] >> 8 * byte);
    if (kind == LINES)
        for (int line = 0, k = 0; line < BLOCK / LINE; line++)
            for (int stop = k + counts[line], at = line * LINE; k < stop; k++) old[at + places[k]] = new[at + places[k]];
    else
        memcpy(old, new, n * sizeof(WORD));
    *end = out;
    return m + (w << 16) + (kind << 20);
}

/* Return the k-th of m signed numbers of w bytes; w is a constant where this is inlined. */
INLINE DIFFERENCE NAMED(told)(const uint8_t *planes, int m, int k, int w)
{
    UNSIGNED d = 0;
    for (int byte = 0; byte < w; byte++) d |= (UNSIGNED)planes[byte * m + k] << 8 * byte;
    return (DIFFERENCE)(d << 8 * ((int)sizeof d - w)) >> 8 * ((int)sizeof d - w);
}

INLINE void NAMED(add_told)(WORD *x, int n, int m, const int *counts, const uint8_t *places, const uint8_t *planes, int w)
{
    if (!counts)
        for (int i = 0; i < n; i++) x[i] = (WORD)((UNSIGNED)x[i] + (UNSIGNED)NAMED(told)(planes, n, i, w));
    for (int line = 0, k = 0; counts && line < BLOCK / LINE; line++)
        for (int stop = (int)least(m, k + counts[line]); k < stop; k++) {
            int at = line * LINE + places[k];
            if (at < n) x[at] = (WORD)((UNSIGNED)x[at] + (UNSIGNED)NAMED(told)(planes, m, k, w));
        }
}

/* Add the d of a block of n values. Places beyond it, which no encoder writes, are left out. */
static void NAMED(add)(void *x, int n, int32_t head, const uint8_t *part)
{
    uint8_t found[BLOCK];
    const uint8_t *places = part + 16, *planes = part;
    int m = head & 0xffff, w = head >> 16 & 15, kind = head >> 20, counts[BLOCK / LINE];
    if (kind == LINES) {
        for (int line = 0; line < BLOCK / LINE; line++) counts[line] = part[line];
        planes = places + m;
    } else if (kind == BITMAP) {
        spread(part, found, counts);
        places = found, planes = part + BLOCK / 8;
    } else if (m != n)
        return;
    if (w == 1) NAMED(add_told)(x, n, m, kind == ALL ? NULL : counts, places, planes, 1);
    else if (w == 2) NAMED(add_told)(x, n, m, kind == ALL ? NULL : counts, places, planes, 2);
    else NAMED(add_told)(x, n, m, kind == ALL ? NULL : counts, places, planes, w);
}

// Matrix products with accumulators of type REAL, by a function named GEMM: products.h includes this file once for each
// accumulator type.

// Reads an element as REAL; the index counts elements of the matrix's type.
static inline REAL SUFFIXED(read)(const void *from, int type, size_t index) {
    switch (type) {
        case R32F: return ((const float *)from)[index];
        case R64F: return ((const double *)from)[index];
        case R16F: return of_half(((const uint16_t *)from)[index]);
        default: return of_bfloat16(((const uint16_t *)from)[index]);
    }
}
static inline void SUFFIXED(write)(void *to, int type, size_t index, REAL value) {
    switch (type) {
        case R32F: ((float *)to)[index] = value; return;
        case R64F: ((double *)to)[index] = value; return;
        case R16F: ((uint16_t *)to)[index] = to_half(value); return;
        default: ((uint16_t *)to)[index] = to_bfloat16(value);
    }
}

// A tile of sums, each in the order of k. Vector lanes are rows, so the vector width does not change the bits.
CLONES static void SUFFIXED(tile)(int k, const REAL (*a)[ROWS], const REAL (*b)[COLUMNS], REAL sums[COLUMNS][ROWS]) {
    REAL own[COLUMNS][ROWS] = {{0}};
    for (int p = 0; p < k; p++) {
        for (int column = 0; column < COLUMNS; column++) {
            for (int row = 0; row < ROWS; row++) own[column][row] += a[p][row] * b[p][column];
        }
    }
    memcpy(sums, own, sizeof own);
}

static void SUFFIXED(product)(const Product *of, const char *a, const char *b, char *c) {
    REAL(*rows)[ROWS] = calloc(of->k + 1, sizeof *rows), (*columns)[COLUMNS] = calloc(of->k + 1, sizeof *columns);
    for (int i = 0; i < of->m; i += ROWS) {
        int high = of->m - i < ROWS ? of->m - i : ROWS;
        for (int p = 0; p < of->k; p++) {
            for (int row = 0; row < high; row++) {
                rows[p][row] = SUFFIXED(read)(a, of->a.type, place(&of->a, i + row, p));
            }
        }
        for (int j = 0; j < of->n; j += COLUMNS) {
            int wide = of->n - j < COLUMNS ? of->n - j : COLUMNS;
            for (int p = 0; p < of->k; p++) {
                for (int column = 0; column < wide; column++) {
                    columns[p][column] = SUFFIXED(read)(b, of->b.type, place(&of->b, p, j + column));
                }
            }
            REAL sums[COLUMNS][ROWS];
            SUFFIXED(tile)(of->k, (const REAL(*)[ROWS])rows, (const REAL(*)[COLUMNS])columns, sums);
            for (int column = 0; column < wide; column++) {
                for (int row = 0; row < high; row++) {
                    size_t at = place(&of->c, i + row, j + column);
                    REAL value = (REAL)of->alpha * sums[column][row];
                    // c is read only if beta is not 0: it may be uninitialized and hold NaN.
                    if (of->beta != 0) value += (REAL)of->beta * SUFFIXED(read)(c, of->c.type, at);
                    SUFFIXED(write)(c, of->c.type, at, value);
                }
            }
        }
    }
    free(rows);
    free(columns);
}

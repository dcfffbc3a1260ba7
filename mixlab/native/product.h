/* Products of small matrices that lie in the cache: out (m x n) = adds out + left (m x k) right (k x n).

The rows of `right` and `out` are contiguous and n is a multiple of 16; elements of `left` may lie anywhere. */
#define PANEL 16
#define PARTS (PANEL / LANES)
#if LANES == 16
#define TALL 12
#else
#define TALL 6
#endif

/* sums (rows x 16) += left right */
INLINE void accumulate(int rows, vec (*sums)[PARTS], const float *left, ptrdiff_t left_row, ptrdiff_t left_column,
                       const float *right, ptrdiff_t right_row, int depth) {
    for (int k = 0; k < depth; k++) {
        vec line[PARTS];
        for (int p = 0; p < PARTS; p++) line[p] = load(right + k * right_row + p * LANES);
        for (int i = 0; i < rows; i++) {
            vec factor = all(left[i * left_row + k * left_column]);
            for (int p = 0; p < PARTS; p++) sums[i][p] += factor * line[p];
        }
    }
}

INLINE void tile(int rows, float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row, ptrdiff_t left_column,
                 const float *right, ptrdiff_t right_row, int depth, float adds) {
    vec sums[TALL][PARTS];
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < PARTS; p++) sums[i][p] = adds ? load(out + i * out_row + p * LANES) * adds : (vec){0};
    accumulate(rows, sums, left, left_row, left_column, right, right_row, depth);
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < PARTS; p++) store(out + i * out_row + p * LANES, sums[i][p]);
}

#define TILE(rows) \
    case rows: \
        tile(rows, out, out_row, left, left_row, left_column, right, right_row, depth, adds); \
        break;

static void low_tile(int rows, float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row,
                     ptrdiff_t left_column, const float *right, ptrdiff_t right_row, int depth, float adds) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5)
#if TALL > 6
        TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11)
#endif
    }
}

static __attribute__((noinline)) void multiply(float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row, ptrdiff_t left_column,
                     const float *right, ptrdiff_t right_row, int m, int n, int depth, float adds) {
    for (int column = 0; column < n; column += PANEL) {
        int row = 0;
        for (; row + TALL <= m; row += TALL)
            tile(TALL, out + row * out_row + column, out_row, left + row * left_row, left_row, left_column,
                 right + column, right_row, depth, adds);
        if (row < m)
            low_tile(m - row, out + row * out_row + column, out_row, left + row * left_row, left_row, left_column,
                     right + column, right_row, depth, adds);
    }
}

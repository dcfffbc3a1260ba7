/* Products of small matrices that lie in the cache: out (m x n) = adds out + left (m x k) right (k x n).

The rows of `right` and `out` are contiguous and n is a multiple of 16; elements of `left` may lie anywhere. */
#define PANEL 16
#if LANES == 16
#define TALL 12
#define WIDE 32 /* columns at once: enough sums that none waits for another */
#else
#define TALL 6
#define WIDE PANEL
#endif
#define PARTS (PANEL / LANES)
#define WIDE_PARTS (WIDE / LANES)

/* sums (rows x parts vectors) += left right */
INLINE void accumulate(int rows, int parts, vec *sums, const float *left, ptrdiff_t left_row, ptrdiff_t left_column,
                       const float *right, ptrdiff_t right_row, int depth) {
    for (int k = 0; k < depth; k++) {
        vec line[WIDE_PARTS];
        for (int p = 0; p < parts; p++) line[p] = load(right + k * right_row + p * LANES);
        for (int i = 0; i < rows; i++) {
            vec factor = all(left[i * left_row + k * left_column]);
            for (int p = 0; p < parts; p++) sums[i * parts + p] += factor * line[p];
        }
    }
}

INLINE void tile(int rows, int parts, float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row,
                 ptrdiff_t left_column, const float *right, ptrdiff_t right_row, int depth, float adds) {
    vec sums[TALL * WIDE_PARTS];
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < parts; p++) sums[i * parts + p] = adds ? load(out + i * out_row + p * LANES) * adds : (vec){0};
    accumulate(rows, parts, sums, left, left_row, left_column, right, right_row, depth);
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < parts; p++) store(out + i * out_row + p * LANES, sums[i * parts + p]);
}

#define TILE(rows) \
    case rows: \
        tile(rows, parts, out, out_row, left, left_row, left_column, right, right_row, depth, adds); \
        break;

INLINE void any_tile(int rows, int parts, float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row,
                     ptrdiff_t left_column, const float *right, ptrdiff_t right_row, int depth, float adds) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if TALL > 6
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
}

/* How many of the rows that are left make the next tile: none that are so few that sums wait for each other. */
INLINE int next_rows(long left) {
    if (left <= TALL) return left;
    return LANES == 16 && left < TALL + TALL / 2 ? (left + 1) / 2 : TALL;
}

static __attribute__((noinline)) void multiply(float *out, ptrdiff_t out_row, const float *left, ptrdiff_t left_row, ptrdiff_t left_column,
                     const float *right, ptrdiff_t right_row, int m, int n, int depth, float adds) {
    for (int column = 0, wide; column < n; column += wide) {
        wide = n - column >= WIDE ? WIDE : PANEL;
        for (int row = 0, rows; row < m; row += rows) {
            rows = next_rows(m - row);
            float *place = out + row * out_row + column;
            const float *part = left + row * left_row;
            if (wide == WIDE) any_tile(rows, WIDE_PARTS, place, out_row, part, left_row, left_column, right + column, right_row, depth, adds);
            else any_tile(rows, PARTS, place, out_row, part, left_row, left_column, right + column, right_row, depth, adds);
        }
    }
}

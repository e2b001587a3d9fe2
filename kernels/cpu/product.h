/* y = x W^T + bias, with W in panels; included once for each kind of CPU.
 *
 * An element of y is one chain of fused multiply-adds over k, from the bias on, whatever the number of
 * rows, the tile it is in, the kind of CPU or the thread. So a row's result is the same bit for bit
 * alone and among others.
 */

#undef PARTS
#undef EACH
#define PARTS (PANEL / LANES)
#define EACH(i, count) _Pragma("GCC unroll 14") for (int i = 0; i < (count); i++)

/* `rows` x `panels` of y, both constants where this is compiled into. `ahead`, unless it is null:
 * panels that will be wanted soon. */
TARGET INLINE void NAME(tile)(const int rows, const int panels, tile_t at, const float *ahead,
                              const int ahead_panels)
{
    VECTOR sum[ROWS][PANELS * PARTS], w[PANELS * PARTS];
    EACH(r, rows) EACH(j, panels * PARTS)
        sum[r][j] = LOAD(at.from + r * at.from_stride + j * LANES);
    for (int64_t k = 0; k < at.depth; k++) {
        EACH(j, panels * PARTS)
            w[j] = LOAD(at.w + (j / PARTS) * at.panel_stride + k * at.w_stride + j % PARTS * LANES);
        EACH(p, ahead_panels)
            __builtin_prefetch(ahead + p * at.panel_stride + k * PANEL, 0, 2);
        EACH(r, rows) {
            VECTOR x = ALL(at.x[r * at.x_stride + k]);
            EACH(j, panels * PARTS)
                sum[r][j] = FMA(x, w[j], sum[r][j]);
        }
    }
    EACH(r, rows) EACH(j, panels * PARTS)
        STORE(at.y + r * at.y_stride + j * LANES, sum[r][j]);
}

#undef CASE
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        if (n <= ROWS)                                                                             \
            NAME(tile)(n <= ROWS ? n : ROWS, panels, at, ahead, ahead_panels);                     \
        break;

TARGET INLINE void NAME(tile_of)(int64_t rows, const int panels, tile_t at, const float *ahead,
                                 const int ahead_panels)
{
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
    }
}

TARGET __attribute__((noinline)) static void NAME(any_tile)(int64_t rows, int panels, tile_t at)
{
    if (panels == 1)
        NAME(tile_of)(rows, 1, at, 0, 0);
    else
        NAME(tile_of)(rows, PANELS, at, 0, 0);
}

TARGET __attribute__((noinline)) static void
NAME(any_tile_ahead)(int64_t rows, int panels, tile_t at, const float *ahead, int ahead_panels)
{
    if (panels == 1)
        NAME(tile_of)(rows, 1, at, ahead, 1);
    else if (ahead_panels == 1)
        NAME(tile_of)(rows, PANELS, at, ahead, 1);
    else
        NAME(tile_of)(rows, PANELS, at, ahead, PANELS);
}

/* All rows of up to PANELS panels. The panels after them are fetched meanwhile. */
TARGET static void NAME(product_task)(const void *call, int64_t task, int worker)
{
    const product_t *p = call;
    int64_t first = task * PANELS, blocks = (p->rows + ROWS - 1) / ROWS;
    int panels = (int)(p->panels - first < PANELS ? p->panels - first : PANELS);
    int to_fetch = (int)(p->panels - first - panels < panels ? p->panels - first - panels : panels);
    tile_t at = {.x_stride = p->x_stride, .panel_stride = p->panel_stride, .w_stride = PANEL,
                 .depth = p->depth, .y_stride = p->y_stride, .w = p->w + first * p->panel_stride};
    float zero[PANELS * PANEL] = {0};
    at.from = p->bias ? p->bias + first * PANEL : zero;
    (void)worker;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t row = p->rows * i / blocks, rows = p->rows * (i + 1) / blocks - row;
        at.x = p->x + row * p->x_stride;
        at.y = p->y + row * p->y_stride + first * PANEL;
        if (i < to_fetch)
            NAME(any_tile_ahead)(rows, panels, at, at.w + (panels + i) * p->panel_stride,
                                 blocks == 1 ? to_fetch : 1);
        else
            NAME(any_tile)(rows, panels, at);
    }
}

TARGET static void NAME(product)(const product_t *p, int workers)
{
    int64_t tasks = (p->panels + PANELS - 1) / PANELS;
    run_tasks(NAME(product_task), p, tasks, workers);
}

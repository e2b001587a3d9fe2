/* Operations on rows of floats; included once for each kind of CPU. */

typedef struct {
    VECTOR part[PARTS];
} NAME(lanes_t); /* 16 lanes */

#define EACH_PART(i) EACH(i, PARTS)

/* The same order for both kinds of CPU. */
TARGET INLINE float NAME(sum_of)(NAME(lanes_t) value)
{
    __m256 eight = HALVES(_mm256_add_ps, value.part);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

TARGET INLINE float NAME(most_of)(NAME(lanes_t) value)
{
    __m256 eight = HALVES(_mm256_max_ps, value.part);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* e^x within 2 units in the last place; what is below e^-87 or above e^88 is taken for these. With
 * n = round(x / ln 2) it is 2^n e^r, |r| <= ln 2 / 2, e^r by its Taylor series to the 7th power. */
TARGET INLINE VECTOR NAME(exp_of)(VECTOR x)
{
    const float rounder = 0x1.8p23f;
    x = MIN(ALL(88.0f), MAX(ALL(-87.0f), x));
    VECTOR rounded = FMA(x, ALL(0x1.715476p0f), ALL(rounder));
    VECTOR n = SUB(rounded, ALL(rounder));
    VECTOR r = FMA(n, ALL(-0x1.62e4p-1f), x);
    r = FMA(n, ALL(-0x1.7f7d1cp-20f), r);
    VECTOR e = ALL(1.0f / 5040);
    e = FMA(e, r, ALL(1.0f / 720));
    e = FMA(e, r, ALL(1.0f / 120));
    e = FMA(e, r, ALL(1.0f / 24));
    e = FMA(e, r, ALL(1.0f / 6));
    e = FMA(e, r, ALL(0.5f));
    e = FMA(e, r, ALL(1.0f));
    e = FMA(e, r, ALL(1.0f));
    return MUL(e, TWO_TO(rounded));
}

/* What is left over of a row is computed in 16 places of their own. */
enum { NAME(WHOLE) = ~(PANEL - 1) };

TARGET INLINE void NAME(swiglu_lanes)(const float *gate, const float *up, float *y)
{
    EACH_PART(i) {
        VECTOR x = LOAD(gate + i * LANES);
        VECTOR unit = DIV(x, ADD(ALL(1.0f), NAME(exp_of)(SUB(ALL(0.0f), x))));
        STORE(y + i * LANES, MUL(unit, LOAD(up + i * LANES)));
    }
}

TARGET static void NAME(swiglu_row)(const float *gate, const float *up, float *y, int64_t size)
{
    int64_t whole = size & NAME(WHOLE);
    for (int64_t i = 0; i < whole; i += PANEL)
        NAME(swiglu_lanes)(gate + i, up + i, y + i);
    if (whole == size)
        return;
    float rest[3][PANEL] = {{0}};
    size_t nbytes = (size_t)(size - whole) * sizeof(float);
    memcpy(rest[0], gate + whole, nbytes);
    memcpy(rest[1], up + whole, nbytes);
    NAME(swiglu_lanes)(rest[0], rest[1], rest[2]);
    memcpy(y + whole, rest[2], nbytes);
}

/* weight * x / sqrt(mean(x^2) + eps) of one row. */
TARGET static void NAME(norm_of)(const float *x, const float *weight, float *y, int64_t size,
                                 float eps)
{
    int64_t whole = size & NAME(WHOLE), left = size - whole;
    NAME(lanes_t) squares;
    EACH_PART(i) squares.part[i] = ALL(0.0f);
    for (int64_t k = 0; k < whole; k += PANEL)
        EACH_PART(i) {
            VECTOR value = LOAD(x + k + i * LANES);
            squares.part[i] = FMA(value, value, squares.part[i]);
        }
    float rest[PANEL] = {0};
    memcpy(rest, x + whole, (size_t)left * sizeof(float));
    EACH_PART(i) {
        VECTOR value = LOAD(rest + i * LANES);
        squares.part[i] = FMA(value, value, squares.part[i]);
    }
    float by = 1.0f / sqrtf(NAME(sum_of)(squares) / (float)size + eps);
    for (int64_t k = 0; k < size; k++)
        y[k] = weight[k] * (x[k] * by);
}

TARGET static void NAME(norm_row)(const norm_t *p, int64_t row)
{
    const float *x = p->x + row * p->x_stride;
    if (p->residual) {
        const float *residual = p->residual + row * p->residual_stride;
        float *total = p->total + row * p->size;
        for (int64_t i = 0; i < p->size; i++)
            total[i] = residual[i] + x[i];
        x = total;
    }
    NAME(norm_of)(x, p->weight, p->y + row * p->size, p->size, p->eps);
}

/* A head at its position: normed if there is a weight, then its halves turned. */
TARGET static void NAME(turn)(const rotation_t *p, int64_t token, const float *restrict x,
                              const float *weight, float *restrict y)
{
    const float *restrict cos = p->batch->cos + token * p->half;
    const float *restrict sin = p->batch->sin + token * p->half;
    int64_t half = p->half, dim = p->cache->head_dim;
    float normed[MOST_HEAD_DIM];
    if (weight) {
        NAME(norm_of)(x, weight, normed, dim, p->eps);
        x = normed;
    }
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        y[i] = low * cos[i] - high * sin[i];
        y[i + half] = high * cos[i] + low * sin[i];
    }
    memcpy(y + 2 * half, x + 2 * half, (size_t)(dim - 2 * half) * sizeof(float));
}

/* One token of `rotation_t`. */
TARGET static void NAME(rotate_row)(const rotation_t *p, int64_t token)
{
    const cache_t *cache = p->cache;
    int64_t slot = p->batch->slots[token], dim = cache->head_dim;
    for (int64_t head = 0; head < p->q_heads; head++)
        NAME(turn)(p, token, p->q + token * p->q_stride + head * dim, p->q_norm,
                   p->out + (token * p->q_heads + head) * dim);
    if (slot < 0)
        return;
    int64_t at = slot / cache->block_size * cache->block_stride
                 + slot % cache->block_size * cache->token_stride;
    for (int64_t head = 0; head < cache->heads; head++, at += cache->head_stride) {
        float key[MOST_HEAD_DIM];
        int64_t scale = slot * cache->heads + head;
        NAME(turn)(p, token, p->k + token * p->k_stride + head * dim, p->k_norm, key);
        keep_head(cache->type, key, cache->k, at, cache->k_scale ? cache->k_scale + scale : 0, dim);
        keep_head(cache->type, p->v + token * p->v_stride + head * dim, cache->v, at,
                  cache->v_scale ? cache->v_scale + scale : 0, dim);
    }
}

/* Rows are shared out in runs of ROWS_PER_TASK. */
#define ROW_TASK(kind, type, of_row)                                                               \
    TARGET static void NAME(kind##_task)(const void *call, int64_t task, int worker)               \
    {                                                                                              \
        const type *p = call;                                                                      \
        int64_t end = least((task + 1) * ROWS_PER_TASK, ROWS_OF(p));                               \
        (void)worker;                                                                              \
        for (int64_t row = task * ROWS_PER_TASK; row < end; row++)                                 \
            of_row;                                                                                \
    }                                                                                              \
    static void NAME(kind)(const type *p, int workers)                                             \
    {                                                                                              \
        int64_t tasks = (ROWS_OF(p) + ROWS_PER_TASK - 1) / ROWS_PER_TASK;                          \
        run_tasks(NAME(kind##_task), p, tasks, workers);                                           \
    }

#define ROWS_OF(p) (p)->rows
ROW_TASK(norm, norm_t, NAME(norm_row)(p, row))
ROW_TASK(swiglu, swiglu_t,
         NAME(swiglu_row)(p->gate + row * p->gate_stride, p->up + row * p->up_stride,
                          p->y + row * p->size, p->size))
#undef ROWS_OF
#define ROWS_OF(p) (p)->batch->tokens
ROW_TASK(rotate, rotation_t, NAME(rotate_row)(p, row))
#undef ROWS_OF
#undef ROW_TASK

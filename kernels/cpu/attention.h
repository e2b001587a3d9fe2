/* Attention over the paged cache; included once for each kind of CPU.
 *
 * Keys are taken in tiles that begin at multiples of TILE, and the softmax is kept up to date from one
 * tile to the next (Milakov, Gimelshein, "Online normalizer calculation for softmax",
 * arXiv:1805.02867; Dao, "FlashAttention-2", arXiv:2307.08691). Keys that a query does not see have
 * the weight 0 and change no sum. So a query's result is the same bit for bit in a chunk of a prompt,
 * whatever its length, and in a decode step.
 *
 * Per worker, in floats: keys [TILE / 16, D, 16], values [D / 16, TILE, 16], weights
 * [MOST_TILE_ROWS, TILE], and per head and query row the scaled query [D], its output [D], the largest
 * score and the sum of weights.
 */

/* 16 floats of each of 16 rows, from `column` on, become the rows of `to`. */
TARGET INLINE void NAME(transpose)(const float *const *row, int64_t column, float *to)
{
    for (int first = 0; first < PANEL; first += 8)
        for (int64_t d = 0; d < PANEL; d += 4) {
            __m256 r[4], s[4];
            EACH(i, 4) {
                const float *at = row[first + i] + column + d;
                r[i] = _mm256_castps128_ps256(_mm_loadu_ps(at));
                at = row[first + i + 4] + column + d;
                r[i] = _mm256_insertf128_ps(r[i], _mm_loadu_ps(at), 1);
            }
            EACH(i, 2) {
                s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            EACH(i, 2) {
                float *at = to + (d + 2 * i) * PANEL + first;
                __m256 even = _mm256_shuffle_ps(s[i], s[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
                __m256 odd = _mm256_shuffle_ps(s[i], s[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
                _mm256_storeu_ps(at, even);
                _mm256_storeu_ps(at + PANEL, odd);
            }
        }
}

/* Elements of one head of a cache that is not of floats, as floats. */
TARGET static void NAME(floats_of)(int64_t type, const void *cache, int64_t at, const float *scale,
                                   float *restrict to, int64_t count)
{
    switch (type) {
    case BFLOAT16:
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = (uint32_t)((const uint16_t *)cache)[at + i] << 16;
            memcpy(to + i, &bits, sizeof bits);
        }
        break;
    case FLOAT16:
        for (int64_t i = 0; i < count; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(
                                         (const __m128i *)((const uint16_t *)cache + at + i))));
        break;
    case INT8:
        for (int64_t i = 0; i < count; i++)
            to[i] = (float)((const int8_t *)cache)[at + i] * *scale;
        break;
    case E4M3:
        for (int64_t i = 0; i < count; i++)
            to[i] = e4m3_value[((const uint8_t *)cache)[at + i]] * *scale;
    }
}

/* What is fetched early: the same place one panel on. */
TARGET INLINE void NAME(fetch)(const cache_t *cache, int64_t at)
{
    int64_t bytes = cache->type == FLOAT32 ? 4 : cache->type <= FLOAT16 ? 2 : 1;
    for (int64_t i = 0; i < cache->head_dim * bytes; i += 64) {
        __builtin_prefetch((const char *)cache->k + at * bytes + i, 0, 2);
        __builtin_prefetch((const char *)cache->v + at * bytes + i, 0, 2);
    }
}

/* Keys and values of one head as panels, of `count` tokens from `first` on. Panels of keys are filled
 * up with the last of them: nobody sees its scores there. */
TARGET static void NAME(load_tile)(const cache_t *cache, const int32_t *table, int64_t head,
                                   int64_t first, int64_t count, int64_t total, float *panels)
{
    int64_t dim = cache->head_dim, size = cache->block_size;
    float keys[PANEL][MOST_HEAD_DIM], floats[MOST_HEAD_DIM];
    const float *row[PANEL], *value;
    for (int64_t token = 0; token < count; token++) {
        int64_t block = table[(first + token) / size], place = (first + token) % size;
        int64_t at = block * cache->block_stride + place * cache->token_stride
                     + head * cache->head_stride;
        if (cache->type == FLOAT32) {
            row[token % PANEL] = (const float *)cache->k + at;
            value = (const float *)cache->v + at;
        } else {
            int64_t scale = (block * size + place) * cache->heads + head;
            const float *k_scale = cache->k_scale ? cache->k_scale + scale : 0;
            const float *v_scale = cache->v_scale ? cache->v_scale + scale : 0;
            NAME(floats_of)(cache->type, cache->k, at, k_scale, keys[token % PANEL], dim);
            NAME(floats_of)(cache->type, cache->v, at, v_scale, floats, dim);
            row[token % PANEL] = keys[token % PANEL];
            value = floats;
        }
        float *to = panels + TILE * dim + token * PANEL;
        for (int64_t d = 0; d < dim; d += PANEL, to += TILE * PANEL)
            EACH_PART(i) STORE(to + i * LANES, LOAD(value + d + i * LANES));
        int64_t soon = first + token + PANEL;
        if (soon < total)
            NAME(fetch)(cache, table[soon / size] * cache->block_stride
                                   + soon % size * cache->token_stride + head * cache->head_stride);
        if (token % PANEL < PANEL - 1 && token < count - 1)
            continue;
        for (int64_t i = token % PANEL + 1; i < PANEL; i++)
            row[i] = row[token % PANEL];
        for (int64_t d = 0; d < dim; d += PANEL)
            NAME(transpose)(row, d, panels + (token / PANEL * dim + d) * PANEL);
    }
}

/* The first `count` lanes, and `otherwise` in the others. */
TARGET INLINE NAME(lanes_t) NAME(first_of)(NAME(lanes_t) value, int64_t count, float otherwise)
{
    EACH_PART(i) value.part[i] = FIRST(value.part[i], i * LANES, count, otherwise);
    return value;
}

/* Scores of one query become weights; what was summed before is scaled to the new largest score. */
TARGET static void NAME(softmax_row)(float *scores, int64_t seen, float *output, int64_t dim,
                                     float *most, float *sum)
{
    NAME(lanes_t) value[TILE / PANEL], top, total;
    EACH_PART(i) top.part[i] = ALL(-INFINITY), total.part[i] = ALL(0.0f);
    int64_t panels = (seen + PANEL - 1) / PANEL;
    for (int64_t g = 0; g < panels; g++) {
        EACH_PART(i) value[g].part[i] = LOAD(scores + g * PANEL + i * LANES);
        value[g] = NAME(first_of)(value[g], least(seen - g * PANEL, PANEL), -INFINITY);
        EACH_PART(i) top.part[i] = MAX(top.part[i], value[g].part[i]);
    }
    float before = *most, now = NAME(most_of)(top);
    if (now > before) {
        float by[PANEL];
        EACH_PART(i) STORE(by + i * LANES, NAME(exp_of)(ALL(before - now)));
        for (int64_t d = 0; d < dim; d++)
            output[d] *= by[0];
        *sum *= by[0];
        *most = now;
    }
    for (int64_t g = 0; g < panels; g++) {
        EACH_PART(i) value[g].part[i] = NAME(exp_of)(SUB(value[g].part[i], ALL(*most)));
        value[g] = NAME(first_of)(value[g], least(seen - g * PANEL, PANEL), 0.0f);
        EACH_PART(i) {
            STORE(scores + g * PANEL + i * LANES, value[g].part[i]);
            total.part[i] = ADD(total.part[i], value[g].part[i]);
        }
    }
    *sum += NAME(sum_of)(total);
}

/* Up to ROWS queries and one tile. `seen`: keys of the tile that the last of them sees. */
TARGET static void NAME(attend)(const attention_t *p, const float *panels, state_t state,
                                int64_t rows, int64_t seen, float *weights)
{
    static const float zero[PANELS * PANEL];
    int64_t dim = p->cache->head_dim, key_panels = (seen + PANEL - 1) / PANEL;
    tile_t scores = {.x = state.q, .x_stride = dim, .panel_stride = dim * PANEL, .depth = dim,
                     .from = zero, .y_stride = TILE};
    for (int64_t i = 0; i < key_panels; i += PANELS) {
        scores.w = panels + i * dim * PANEL;
        scores.y = weights + i * PANEL;
        NAME(any_tile)(rows, (int)least(PANELS, key_panels - i), scores);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *row = weights + r * TILE;
        int64_t sees = least(state.seen + (state.row + r) / p->group, TILE);
        if (sees > 0)
            NAME(softmax_row)(row, least(sees, seen), state.output + r * dim, dim,
                              state.most + r, state.sum + r);
        for (int64_t key = sees > 0 ? sees : 0; key < seen; key++)
            row[key] = 0.0f;
    }
    tile_t output = {.x = weights, .x_stride = TILE, .panel_stride = TILE * PANEL, .depth = seen,
                     .from_stride = dim, .y_stride = dim};
    for (int64_t i = 0; i < dim / PANEL; i += PANELS) {
        output.w = panels + (TILE * dim + i * TILE * PANEL);
        output.from = output.y = state.output + i * PANEL;
        NAME(any_tile)(rows, (int)least(PANELS, dim / PANEL - i), output);
    }
}

/* The rows of one head: query by query, `group` of each. */
TARGET static void NAME(attend_head)(const attention_t *p, const span_t *span, state_t state,
                                     int64_t first, int64_t count, const float *panels,
                                     float *weights)
{
    int64_t rows = span->num_queries * p->group, blocks = (rows + ROWS - 1) / ROWS;
    int64_t dim = p->cache->head_dim;
    state.seen = span->position + 1 - first;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t row = rows * i / blocks, end = rows * (i + 1) / blocks;
        int64_t seen = least(state.seen + (end - 1) / p->group, count);
        state_t block = {state.q + row * dim, state.output + row * dim, state.most + row,
                         state.sum + row, row, state.seen};
        if (seen > 0)
            NAME(attend)(p, panels, block, end - row, seen, weights);
    }
}

/* Between `q` and `out` and the rows of a worker. */
TARGET static void NAME(begin_rows)(const attention_t *p, const span_t *span, state_t state)
{
    int64_t dim = p->cache->head_dim, stride = p->cache->heads * p->group * dim;
    for (int64_t head = span->head; head < span->head + span->num_heads; head++)
        for (int64_t query = span->query; query < span->query + span->num_queries; query++)
            for (int64_t g = 0; g < p->group; g++, state.q += dim, state.output += dim) {
                const float *q = p->q + query * stride + (head * p->group + g) * dim;
                for (int64_t d = 0; d < dim; d++)
                    state.q[d] = q[d] * p->scale, state.output[d] = 0.0f;
                *state.most++ = -INFINITY, *state.sum++ = 0.0f;
            }
}

TARGET static void NAME(end_rows)(const attention_t *p, const span_t *span, state_t state)
{
    int64_t dim = p->cache->head_dim, stride = p->cache->heads * p->group * dim;
    for (int64_t head = span->head; head < span->head + span->num_heads; head++)
        for (int64_t query = span->query; query < span->query + span->num_queries; query++)
            for (int64_t g = 0; g < p->group; g++, state.output += dim) {
                float *out = p->out + query * stride + (head * p->group + g) * dim;
                float by = 1.0f / *state.sum++;
                for (int64_t d = 0; d < dim; d++)
                    out[d] = state.output[d] * by;
            }
}

TARGET static void NAME(attention_task)(const void *call, int64_t task, int worker)
{
    const attention_t *p = call;
    const span_t *span = p->spans + task;
    int64_t dim = p->cache->head_dim, rows = span->num_queries * p->group;
    float *panels = p->scratch + worker * p->scratch_stride, *weights = panels + 2 * TILE * dim;
    state_t state = {.q = weights + MOST_TILE_ROWS * TILE};
    state.output = state.q + span->num_heads * rows * dim;
    state.most = state.output + span->num_heads * rows * dim;
    state.sum = state.most + span->num_heads * rows;
    NAME(begin_rows)(p, span, state);
    int64_t total = span->position + span->num_queries;
    const int32_t *table = p->tables + span->seq * p->table_stride;
    for (int64_t first = 0; first < total; first += TILE)
        for (int64_t i = 0; i < span->num_heads; i++) {
            int64_t count = least(TILE, total - first);
            state_t of_head = {state.q + i * rows * dim, state.output + i * rows * dim,
                               state.most + i * rows, state.sum + i * rows, 0, 0};
            NAME(load_tile)(p->cache, table, span->head + i, first, count, total, panels);
            NAME(attend_head)(p, span, of_head, first, count, panels, weights);
        }
    NAME(end_rows)(p, span, state);
}

TARGET static void NAME(attention)(const attention_t *p, int workers)
{
    run_tasks(NAME(attention_task), p, p->num_spans, workers);
}

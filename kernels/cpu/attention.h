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

/* The end of the tokens from `first` on whose values follow one another. */
TARGET INLINE int64_t NAME(end_of_run)(const kv_tile_t *tile, int64_t first, int64_t seen)
{
    int64_t end = first + 1;
    while (end < seen && tile->at[end] - tile->at[end - 1] == tile->token_stride)
        end++;
    return end;
}

/* weights @ values is added to some rows of output. */
TARGET static void NAME(add_values)(const cache_t *cache, places_t *places, const kv_tile_t *tile,
                                    const float *weights, float *output, int64_t rows, int64_t seen)
{
    int64_t dim = cache->head_dim;
    tile_t at = {.x_stride = TILE, .panel_stride = tile->panel_stride,
                 .w_stride = tile->token_stride, .from_stride = dim, .y_stride = dim};
    for (int64_t first = 0, end; first < seen; first = end) {
        end = tile->at ? NAME(end_of_run)(tile, first, seen) : seen;
        const float *values = tile->values + (tile->at ? tile->at[first] : 0);
        at.x = weights + first, at.depth = end - first;
        for (int64_t i = 0; i < dim / PANEL; i += PANELS) {
            NAME(fetch)(cache, places, (int)(end - first) / 8);
            at.w = values + i * tile->panel_stride;
            at.from = at.y = output + i * PANEL;
            NAME(any_tile)(rows, (int)least(PANELS, dim / PANEL - i), at);
        }
    }
}

/* Up to ROWS queries and one tile. `seen`: keys of the tile that the last of them sees. */
TARGET static void NAME(attend)(const attention_t *p, places_t *places, const kv_tile_t *tile,
                                state_t state, int64_t rows, int64_t seen, float *weights)
{
    static const float zero[PANELS * PANEL];
    int64_t dim = p->cache->head_dim, key_panels = (seen + PANEL - 1) / PANEL;
    tile_t scores = {.x = state.q, .x_stride = dim, .panel_stride = dim * PANEL, .w_stride = PANEL,
                     .depth = dim, .from = zero, .y_stride = TILE};
    for (int64_t i = 0; i < key_panels; i += PANELS) {
        NAME(fetch)(p->cache, places, 4);
        scores.w = tile->keys + i * dim * PANEL;
        scores.y = weights + i * PANEL;
        NAME(any_tile)(rows, (int)least(PANELS, key_panels - i), scores);
    }
    for (int64_t r = 0; r < rows; r++) {
        NAME(fetch)(p->cache, places, 4);
        float *row = weights + r * TILE;
        int64_t sees = least(state.seen + (state.row + r) / p->group, TILE);
        if (sees > 0)
            NAME(softmax_row)(row, least(sees, seen), state.output + r * dim, dim,
                              state.most + r, state.sum + r);
        for (int64_t key = sees > 0 ? sees : 0; key < seen; key++)
            row[key] = 0.0f;
    }
    NAME(add_values)(p->cache, places, tile, weights, state.output, rows, seen);
}

/* The rows of one head: query by query, `group` of each. */
TARGET static void NAME(attend_head)(const attention_t *p, const span_t *span, state_t state,
                                     int64_t first, places_t *places, const kv_tile_t *tile,
                                     float *weights)
{
    int64_t rows = span->num_queries * p->group, blocks = (rows + ROWS - 1) / ROWS;
    int64_t dim = p->cache->head_dim;
    state.seen = span->position + 1 - first;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t row = rows * i / blocks, end = rows * (i + 1) / blocks;
        int64_t seen = least(state.seen + (end - 1) / p->group, places->count);
        state_t block = {state.q + row * dim, state.output + row * dim, state.most + row,
                         state.sum + row, row, state.seen};
        if (seen > 0)
            NAME(attend)(p, places, tile, block, end - row, seen, weights);
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
    const batch_t *batch = p->batch;
    const span_t *span = batch->spans + task;
    int64_t dim = p->cache->head_dim, rows = span->num_queries * p->group;
    float *panels = batch->scratch + worker * batch->scratch_stride;
    float *weights = panels + 2 * TILE * dim;
    state_t state = {.q = weights + MOST_TILE_ROWS * TILE};
    state.output = state.q + span->num_heads * rows * dim;
    state.most = state.output + span->num_heads * rows * dim;
    state.sum = state.most + span->num_heads * rows;
    NAME(begin_rows)(p, span, state);
    int64_t total = span->position + span->num_queries;
    places_t places;
    for (int64_t first = 0; first < total; first += TILE) {
        NAME(find_places)(p, span, first, &places);
        for (int64_t i = 0; i < span->num_heads; i++) {
            state_t of_head = {state.q + i * rows * dim, state.output + i * rows * dim,
                               state.most + i * rows, state.sum + i * rows, 0, 0};
            kv_tile_t tile = NAME(load_tile)(p->cache, &places, span->head + i, rows, panels);
            NAME(attend_head)(p, span, of_head, first, &places, &tile, weights);
        }
    }
    NAME(end_rows)(p, span, state);
}

TARGET static void NAME(attention)(const attention_t *p, int workers)
{
    run_tasks(NAME(attention_task), p, p->batch->num_spans, workers);
}

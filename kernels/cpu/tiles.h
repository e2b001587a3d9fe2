/* Tiles of keys and values on their way out of the cache; included once for each kind of CPU. */

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

/* Up to TILE tokens of a sequence from `first` on: how many. */
TARGET INLINE int64_t NAME(find_tokens)(const cache_t *cache, const int32_t *table, int64_t first,
                                        int64_t total, int64_t *at, int64_t *slot)
{
    int64_t size = cache->block_size, block = first / size, place = first % size;
    int64_t count = least(TILE, total - first);
    for (int64_t i = 0; i < count; i++) {
        at[i] = table[block] * cache->block_stride + place * cache->token_stride;
        slot[i] = table[block] * size + place;
        if (++place == size)
            place = 0, block++;
    }
    return count;
}

/* Of a tile of a span, and of what comes after it: the next tile, or another span's first. */
TARGET static void NAME(find_places)(const attention_t *p, const span_t *span, int64_t first,
                                     places_t *places)
{
    const batch_t *batch = p->batch;
    int64_t slots[TILE], total = span->position + span->num_queries;
    places->count = NAME(find_tokens)(p->cache, batch->tables + span->seq * batch->table_stride,
                                      first, total, places->at, places->slot);
    places->fetched = places->end = 0;
    first += TILE;
    if (first >= total) {
        if (++span == batch->spans + batch->num_spans)
            return;
        first = 0, total = span->position + span->num_queries;
    }
    int64_t count = NAME(find_tokens)(p->cache, batch->tables + span->seq * batch->table_stride,
                                      first, total, places->next_at, slots);
    places->head = span->head, places->heads = span->num_heads;
    places->end = count * span->num_heads;
}

/* One head of the next tile, early: in the order of memory, which the processor follows ahead. */
TARGET INLINE void NAME(fetch)(const cache_t *cache, const int64_t bytes, places_t *places)
{
    if (places->fetched == places->end)
        return;
    int64_t token = places->fetched / places->heads, head = places->fetched % places->heads;
    int64_t at = places->next_at[token] + (places->head + head) * cache->head_stride;
    places->fetched++;
    for (int64_t i = 0; i < cache->head_dim * bytes; i += 64) {
        __builtin_prefetch((const char *)cache->k + at * bytes + i, 0, 2);
        __builtin_prefetch((const char *)cache->v + at * bytes + i, 0, 2);
    }
}

/* Panels of keys are filled up with the last of them: nobody sees its scores there. */
TARGET INLINE void NAME(load_tile_of)(const int64_t type, const cache_t *cache,
                                      places_t *places, int64_t head, float *panels,
                                      int keeps_values)
{
    int64_t dim = cache->head_dim, bytes = bytes_of(type), head_at = head * cache->head_stride;
    float keys[PANEL][MOST_HEAD_DIM], floats[MOST_HEAD_DIM];
    const float *row[PANEL], *value = floats;
    for (int64_t token = 0; token < places->count; token++) {
        int64_t at = places->at[token] + head_at, lane = token % PANEL;
        NAME(fetch)(cache, bytes, places);
        if (type == FLOAT32) {
            row[lane] = (const float *)cache->k + at;
            value = (const float *)cache->v + at;
        } else {
            int64_t scale = places->slot[token] * cache->heads + head;
            floats_of(type, (const char *)cache->k + at * bytes,
                      cache->k_scale ? cache->k_scale + scale : 0, keys[lane], dim);
            floats_of(type, (const char *)cache->v + at * bytes,
                      cache->v_scale ? cache->v_scale + scale : 0, floats, dim);
            row[lane] = keys[lane];
        }
        float *to = panels + TILE * dim + token * PANEL;
        for (int64_t d = 0; keeps_values && d < dim; d += PANEL, to += TILE * PANEL)
            EACH_PART(i) STORE(to + i * LANES, LOAD(value + d + i * LANES));
        if (lane < PANEL - 1 && token < places->count - 1)
            continue;
        for (int64_t i = lane + 1; i < PANEL; i++)
            row[i] = row[lane];
        for (int64_t d = 0; d < dim; d += PANEL)
            NAME(transpose)(row, d, panels + (token / PANEL * dim + d) * PANEL);
    }
}

/* One head of a tile of the span's, its keys in `panels`. Values of float32 are left where they are
 * for so few `rows` of queries that moving them would take longer than reading them there. */
TARGET static kv_tile_t NAME(load_tile)(const cache_t *cache, places_t *places, int64_t head,
                                        int64_t rows, float *panels)
{
    kv_tile_t tile = {panels, panels + TILE * cache->head_dim, TILE * PANEL, PANEL, 0};
    if (cache->type == FLOAT32 && rows <= ROWS)
        tile = (kv_tile_t){panels, (const float *)cache->v + head * cache->head_stride, PANEL,
                           cache->token_stride, places->at};
#define OF_TYPE(type)                                                                              \
    case type:                                                                                     \
        NAME(load_tile_of)(type, cache, places, head, panels, !tile.at);                              \
        break
    switch (cache->type) {
        OF_TYPE(FLOAT32);
        OF_TYPE(BFLOAT16);
        OF_TYPE(FLOAT16);
        OF_TYPE(INT8);
        OF_TYPE(E4M3);
    }
#undef OF_TYPE
    return tile;
}

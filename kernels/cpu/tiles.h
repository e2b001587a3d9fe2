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
    places->token = places->next_count = 0;
    first += TILE;
    if (first >= total) {
        if (++span == batch->spans + batch->num_spans)
            return;
        first = 0, total = span->position + span->num_queries;
    }
    places->next_count = NAME(find_tokens)(p->cache,
                                           batch->tables + span->seq * batch->table_stride, first,
                                           total, places->next_at, slots);
    places->head = places->first_head = span->head;
    places->end_head = span->head + span->num_heads;
}

/* Some heads of the next tile, early, in the order of memory. They are asked for a few at a time, all
 * through the work on this tile: a processor waits that has asked for too much at once. For three
 * queries the callers ask for 32 while a head is loaded, 8 at scores, 12 at weights and 16 at values:
 * all 64, in shares of about the time that each takes. */
TARGET INLINE void NAME(fetch)(const cache_t *cache, places_t *places, int count)
{
    int64_t bytes = bytes_of(cache->type), size = cache->head_dim * bytes;
    for (; count > 0 && places->token < places->next_count; count--) {
        int64_t at = places->next_at[places->token] + places->head * cache->head_stride;
        for (int64_t i = 0; i < size; i += 64) {
            __builtin_prefetch((const char *)cache->k + at * bytes + i, 0, 2);
            __builtin_prefetch((const char *)cache->v + at * bytes + i, 0, 2);
        }
        if (++places->head == places->end_head)
            places->head = places->first_head, places->token++;
    }
}

/* Panels of keys are filled up with the last of them: nobody sees its scores there. */
TARGET INLINE void NAME(load_tile_of)(const int64_t type, const cache_t *cache, places_t *places,
                                      int64_t head, float *panels, int moves_values)
{
    int64_t dim = cache->head_dim, bytes = bytes_of(type);
    float keys[PANEL][MOST_HEAD_DIM];
    const float *row[PANEL];
    for (int64_t token = 0; token < places->count; token++) {
        int64_t at = places->at[token] + head * cache->head_stride, lane = token % PANEL;
        int64_t scale = places->slot[token] * cache->heads + head;
        const char *key = (const char *)cache->k + at * bytes;
        const char *value = (const char *)cache->v + at * bytes;
        if (token % 2)
            NAME(fetch)(cache, places, 1);
        if (token + 4 < places->count) {
            const char *soon = key + (places->at[token + 4] - places->at[token]) * bytes;
            for (int64_t i = 0; i < dim * bytes; i += 64)
                __builtin_prefetch(soon + i, 0, 3);
        }
        row[lane] = type == FLOAT32 ? (const float *)key : keys[lane];
        if (type != FLOAT32)
            floats_of(type, key, cache->k_scale ? cache->k_scale + scale : 0, keys[lane], PANEL,
                      dim);
        if (moves_values)
            floats_of(type, value, cache->v_scale ? cache->v_scale + scale : 0,
                      panels + TILE * dim + token * PANEL, TILE * PANEL, dim);
        else
            for (int64_t i = 0; i < dim * bytes; i += 64)
                __builtin_prefetch(value + i, 0, 3);
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
        NAME(load_tile_of)(type, cache, places, head, panels, !tile.at);                           \
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

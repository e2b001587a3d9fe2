/* A tile between a cache and a slab of another element type. What is digested is what the slab holds:
 * it is made in memory of our own and copied from there, or copied to there and read once.
 */

#pragma once

#include "convert.h"
#include "paged.h"
#include "xxh3.h"

typedef struct {
    int32_t cache_type, wire_type;
    int64_t heads, head_dim; /* of a token in the range */
    float *scales;           /* memory for those of a tile of the slab; null if it has none */
} conversion_t;

/* Bytes of a token of one row of the slab, without scales. */
static int64_t wire_bytes(const conversion_t *by)
{
    return by->heads * by->head_dim * ELEMENT_BYTES[by->wire_type];
}

/* Heads that lie together in the cache, between there and `*slab`, which moves on, and `*scales`. */
static void convert_run(digest_t *digest, const conversion_t *by, heads_t cache, int64_t heads,
                        uint8_t **slab, float **scales, int is_gather)
{
    uint8_t wire[CHUNK * sizeof(float)] __attribute__((aligned(64)));
    const int64_t dim = by->head_dim, most = CHUNK / dim;
    while (heads > 0) {
        int64_t count = heads < most ? heads : most;
        int64_t nbytes = count * dim * ELEMENT_BYTES[by->wire_type];
        heads_t ours = {by->wire_type, wire, *scales};
        if (is_gather) {
            convert(&cache, &ours, count, dim);
            copy_digested(digest, (ends_t){wire, *slab}, (ends_t){wire, *slab + nbytes}, nbytes,
                          wire);
        } else {
            copy_digested(digest, (ends_t){*slab, wire}, (ends_t){*slab + nbytes, wire}, nbytes,
                          wire);
            convert(&ours, &cache, count, dim);
        }
        heads -= count, *slab += nbytes;
        cache.elements += count * dim * ELEMENT_BYTES[by->cache_type];
        if (cache.scales)
            cache.scales += count;
        if (*scales)
            *scales += count;
    }
}

/* `tensors`: of the cache; `parts`: of the slab, elements and scales, which move on. */
static void convert_tile(digest_t *digest, const tensor_t *tensors, int num_tensors,
                         const range_t *range, const conversion_t *by, const tile_t *tile,
                         uint8_t **parts, int is_gather)
{
    int64_t tokens = (tile->row_end - tile->row) * (tile->token_end - tile->token);
    int64_t nbytes = tokens * by->heads * (int64_t)sizeof(float);
    uint8_t *ours = (uint8_t *)by->scales;
    float *scales = by->scales;
    if (scales && !is_gather) {
        memcpy(ours, parts[1], (size_t)nbytes);
        READ_ONCE("r", ours);
        __asm__ volatile("" : : : "memory");
    }
    for (int64_t row = tile->row; row < tile->row_end; row++)
        for (int64_t token = tile->token, run; token < tile->token_end; token += run) {
            run = run_length(&tensors[0], range, token, tile->token_end);
            heads_t cache = {by->cache_type, place(&tensors[0], range, row, token), 0};
            if (num_tensors > 1)
                cache.scales = (float_t32 *)place(&tensors[1], range, row, token);
            convert_run(digest, by, cache, run * by->heads, &parts[0], &scales, is_gather);
        }
    if (scales) {
        uint8_t *target = is_gather ? parts[1] : ours;
        copy_digested(digest, (ends_t){ours, target}, (ends_t){ours, target}, nbytes, ours);
        parts[1] += nbytes;
    }
}

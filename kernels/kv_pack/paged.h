/* Where the tokens of a sequence stand in a paged cache. */

#pragma once

#include <stdint.h>

typedef struct {
    uint8_t *cache;      /* first byte of the range in its first row */
    int64_t row_stride;  /* bytes from row to row */
    int64_t slot_stride; /* bytes from slot to slot */
    int64_t token_bytes; /* bytes of a token in the range */
} tensor_t;

typedef struct {
    const int32_t *blocks; /* of the sequence, from its first token */
    int64_t num_blocks;    /* of the cache */
    int64_t block_size;
    int64_t begin; /* first token */
    int64_t tokens;
    int64_t rows;
    int64_t tokens_per_tile;
    int64_t rows_per_tile;
} range_t;

typedef struct {
    int64_t row, row_end, token, token_end;
} tile_t;

/* The place of a token of one row of the cache. */
static uint8_t *place(const tensor_t *tensor, const range_t *range, int64_t row, int64_t token)
{
    int64_t position = range->begin + token;
    int64_t slot = range->blocks[position / range->block_size] * range->block_size
                   + position % range->block_size;
    return tensor->cache + row * tensor->row_stride + slot * tensor->slot_stride;
}

/* How many tokens from this one on lie together, in a tile that ends at `end`. */
static int64_t run_length(const tensor_t *tensor, const range_t *range, int64_t token, int64_t end)
{
    if (tensor->token_bytes != tensor->slot_stride)
        return 1;
    int64_t run = range->block_size - (range->begin + token) % range->block_size;
    return run < end - token ? run : end - token;
}

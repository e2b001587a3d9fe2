/* Gather and scatter of paged KV on the CPU, with xxh3-64 on the way. host.py is the reference, bit
 * for bit.
 *
 * A slab has `rows` x `tokens` token rows. Its tiles, numbered in the order of their bytes, are runs
 * of `rows_per_tile` rows x `tokens_per_tile` tokens. Every tensor (elements, then the scales of a
 * quantised type) follows the one before it in the slab, and so it does in a tile's digest.
 */

#include "progress.h"
#include "xxh3.h"

enum { ABI = 2 };
enum { MOVED, OUTSIDE, GIVEN_UP };

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

/* The place of a token of one row of the cache. */
static uint8_t *place(const tensor_t *tensor, const range_t *range, int64_t row, int64_t token)
{
    int64_t position = range->begin + token;
    int64_t slot = range->blocks[position / range->block_size] * range->block_size
                   + position % range->block_size;
    return tensor->cache + row * tensor->row_stride + slot * tensor->slot_stride;
}

/* One token range of one row, between the cache and `*slab`, which moves on. */
static void move_tokens(digest_t *digest, const tensor_t *tensor, const range_t *range, int64_t row,
                        int64_t begin, int64_t end, uint8_t **slab, int is_gather)
{
    int is_whole = tensor->token_bytes == tensor->slot_stride;
    uint8_t *at = place(tensor, range, row, begin);
    for (int64_t token = begin; token < end;) {
        int64_t run = is_whole ? range->block_size - (range->begin + token) % range->block_size : 1;
        if (run > end - token)
            run = end - token;
        int64_t nbytes = run * tensor->token_bytes;
        token += run;
        uint8_t *next = token < end ? place(tensor, range, row, token) : at + nbytes;
        uint8_t *next_slab = *slab + nbytes;
        if (is_gather)
            copy_digested(digest, (ends_t){at, *slab}, (ends_t){next, next_slab}, nbytes, at);
        else
            copy_digested(digest, (ends_t){*slab, at}, (ends_t){next_slab, next}, nbytes, at);
        at = next, *slab = next_slab;
    }
}

/* Between the cache and a slab; `digests` has one number per tile. The seed of a tile is `seed` with
 * its number in the low half. A gather says in `progress`, unless that is null, which tiles it has
 * filled; a scatter waits for each there. Returns OUTSIDE, with nothing moved, for a block outside
 * the cache, GIVEN_UP when the gather did not go on. */
int kvferry_move(const tensor_t *tensors, int num_tensors, const range_t *range, uint8_t *slab,
                 uint64_t seed, uint64_t *digests, int is_gather, const progress_t *progress)
{
    int64_t end = range->begin + range->tokens;
    for (int64_t i = range->begin / range->block_size; i * range->block_size < end; i++)
        if (range->blocks[i] < 0 || range->blocks[i] >= range->num_blocks)
            return OUTSIDE;
    uint8_t *parts[2];
    int64_t token_bytes = 0;
    for (int i = 0; i < num_tensors; i++) {
        parts[i] = slab + range->rows * range->tokens * token_bytes;
        token_bytes += tensors[i].token_bytes;
    }
    uint64_t tile = 0;
    for (int64_t row = 0; row < range->rows; row += range->rows_per_tile) {
        int64_t row_end = row + range->rows_per_tile;
        if (row_end > range->rows)
            row_end = range->rows;
        for (int64_t token = 0; token < range->tokens; token += range->tokens_per_tile, tile++) {
            int64_t token_end = token + range->tokens_per_tile;
            if (token_end > range->tokens)
                token_end = range->tokens;
            if (progress && !is_gather && !wait_filled(progress, tile + 1)) {
                __sync_synchronize();
                return GIVEN_UP;
            }
            digest_t digest;
            begin_digest(&digest, seed | tile,
                         (row_end - row) * (token_end - token) * token_bytes, !is_gather);
            for (int i = 0; i < num_tensors; i++)
                for (int64_t r = row; r < row_end; r++)
                    move_tokens(&digest, &tensors[i], range, r, token, token_end, &parts[i],
                                is_gather);
            digests[tile] = end_digest(&digest);
            if (progress && is_gather)
                tell_filled(progress, tile + 1);
        }
    }
    if (!is_gather)
        __sync_synchronize(); /* streamed writes come in no order */
    return MOVED;
}

int kvferry_abi(void) { return ABI; }

int kvferry_lanes(void) { return lanes_used; }

/* Gather and scatter of paged KV on the CPU, with xxh3-64 on the way. host.py is the reference, bit
 * for bit.
 *
 * A slab has `rows` x `tokens` token rows. Its tiles, numbered in the order of their bytes, are runs
 * of `rows_per_tile` rows x `tokens_per_tile` tokens. Every tensor (elements, then the scales of a
 * quantised type) follows the one before it in the slab, and so it does in a tile's digest.
 */

#include "convert_tile.h"
#include "paged.h"
#include "progress.h"
#include "xxh3.h"

enum { ABI = 6 };
enum { MOVED, OUTSIDE, GIVEN_UP };

/* One token range of one row, between the cache and `*slab`, which moves on. */
static void move_tokens(digest_t *digest, const tensor_t *tensor, const range_t *range, int64_t row,
                        int64_t begin, int64_t end, uint8_t **slab, int is_gather)
{
    uint8_t *at = place(tensor, range, row, begin);
    for (int64_t token = begin; token < end;) {
        int64_t run = run_length(tensor, range, token, end);
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

static void move_tile(digest_t *digest, const tensor_t *tensors, int num_tensors,
                      const range_t *range, const tile_t *tile, uint8_t **parts, int is_gather)
{
    for (int i = 0; i < num_tensors; i++)
        for (int64_t row = tile->row; row < tile->row_end; row++)
            move_tokens(digest, &tensors[i], range, row, tile->token, tile->token_end, &parts[i],
                        is_gather);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Between the cache and a slab. `shared`: the range, all but its blocks and where it begins.
 * `digests` has one number per tile. The seed of a tile is `seed` with its number in the low half.
 * `by`: null unless the slab has another element type. A gather tells `progress`, unless that is null,
 * which tiles it has filled; a scatter waits for each there. Returns OUTSIDE, with nothing moved, for
 * a block outside the cache, GIVEN_UP when the gather did not go on.
 */
int kvferry_move(const tensor_t *tensors, int num_tensors, const range_t *shared,
                 const int32_t *blocks, int64_t begin, uint8_t *slab, uint64_t seed,
                 uint64_t *digests, int is_gather, const conversion_t *by, progress_t *progress)
{
    range_t own = *shared;
    const range_t *range = &own;
    own.blocks = blocks, own.begin = begin;
    int64_t end = range->begin + range->tokens;
    for (int64_t i = range->begin / range->block_size; i * range->block_size < end; i++)
        if (range->blocks[i] < 0 || range->blocks[i] >= range->num_blocks)
            return OUTSIDE;
    int64_t element_bytes = by ? wire_bytes(by) : tensors[0].token_bytes;
    int64_t scale_bytes = num_tensors > 1 ? tensors[1].token_bytes : 0;
    if (by)
        scale_bytes = by->scales ? by->heads * (int64_t)sizeof(float) : 0;
    uint8_t *parts[2] = {slab, slab + range->rows * range->tokens * element_bytes};
    uint64_t number = 0;
    tile_t tile;
    for (tile.row = 0; tile.row < range->rows; tile.row = tile.row_end) {
        tile.row_end = least(tile.row + range->rows_per_tile, range->rows);
        for (tile.token = 0; tile.token < range->tokens; tile.token = tile.token_end, number++) {
            tile.token_end = least(tile.token + range->tokens_per_tile, range->tokens);
            int64_t tokens = (tile.row_end - tile.row) * (tile.token_end - tile.token);
            /* What of a tile lies last in the slab. */
            uint8_t *last = scale_bytes ? parts[1] + tokens * scale_bytes
                                        : parts[0] + tokens * element_bytes;
            if (progress && !is_gather && !await_tile(progress, slab, number, last - slab)) {
                __sync_synchronize();
                return GIVEN_UP;
            }
            digest_t digest;
            begin_digest(&digest, seed | number, tokens * (element_bytes + scale_bytes),
                         !is_gather && !by);
            if (by)
                convert_tile(&digest, tensors, num_tensors, range, by, &tile, parts, is_gather);
            else
                move_tile(&digest, tensors, num_tensors, range, &tile, parts, is_gather);
            digests[number] = end_digest(&digest);
            if (progress && is_gather)
                tell_tile(progress, slab, number, parts[0] - slab);
        }
    }
    if (progress && !is_gather && progress->word && progress->has_seal)
        wait_filled(progress, number + 1); /* the caller looks whether it came */
    if (!is_gather)
        __sync_synchronize(); /* streamed writes come in no order */
    return MOVED;
}

int kvferry_abi(void) { return ABI; }

int kvferry_lanes(void) { return lanes_used; }

/* What the operations are given. */

#pragma once

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

enum { PANEL = 16 }; /* outputs of a panel, and lanes in which sums over a row are kept */

/* A few rows times one or two panels. */
typedef struct {
    const float *x; /* [rows, depth] */
    int64_t x_stride;
    const float *w; /* [panels, depth, PANEL] */
    int64_t panel_stride, w_stride;
    int64_t depth;
    const float *from; /* [rows, panels * PANEL]: what the sums begin with */
    int64_t from_stride;
    float *y;
    int64_t y_stride;
} tile_t;

typedef struct {
    const float *x; /* [rows, depth] */
    int64_t x_stride;
    const float *w; /* [panels, depth, PANEL] */
    int64_t panel_stride;
    const float *bias; /* [panels * PANEL], or null */
    float *y;          /* [rows, panels * PANEL] */
    int64_t y_stride;
    int64_t rows, depth, panels;
} product_t;

/* y = weight * x / sqrt(mean(x^2) + eps), of the sum with a residual unless that is null. */
typedef struct {
    const float *x; /* [rows, size] */
    int64_t x_stride;
    const float *residual;
    int64_t residual_stride;
    const float *weight; /* [size] */
    float *total;        /* [rows, size]: the sum */
    float *y;            /* [rows, size] */
    int64_t rows, size;
    float eps;
} norm_t;

typedef struct {
    const float *gate, *up; /* [rows, size] */
    int64_t gate_stride, up_stride;
    float *y; /* [rows, size] */
    int64_t rows, size;
} swiglu_t;

enum { TILE = 64 }; /* keys that attention takes at a time, from a multiple of it on */
enum { MOST_HEAD_DIM = 256, MOST_TILE_ROWS = 14 };
enum { FLOAT32, BFLOAT16, FLOAT16, INT8, E4M3 };

/* A layer of the paged cache: see kv_layer.py. Strides are in elements, those of scales too. */
typedef struct {
    void *k, *v;
    float *k_scale, *v_scale; /* null unless the type is quantised */
    int64_t block_stride, token_stride, head_stride;
    int64_t block_size, heads, head_dim;
    int64_t type;
} cache_t;

/* Some queries of one sequence over some heads of keys. */
typedef struct {
    int32_t seq;
    int32_t query, num_queries; /* the first, of the step's tokens */
    int32_t position;           /* of the first query in its sequence */
    int32_t head, num_heads;    /* of the cache */
} span_t;

/* What all layers of a step have in common. */
typedef struct {
    int64_t tokens;
    const float *cos, *sin; /* [tokens, half] */
    const int64_t *slots;   /* [tokens]: where keys and values go; those of negative ones nowhere */
    const span_t *spans;
    int64_t num_spans;
    const int32_t *tables; /* [seqs, table_stride] */
    int64_t table_stride;
    float *scratch; /* per worker */
    int64_t scratch_stride;
} batch_t;

/* Heads of tokens: normed, rotated by their positions, keys and values then kept in the cache. */
typedef struct {
    const batch_t *batch;
    const float *q, *k, *v; /* [tokens, heads, head_dim]; a token's are contiguous */
    int64_t q_stride, k_stride, v_stride;
    const float *q_norm, *k_norm; /* [head_dim], or null */
    float *out;                   /* the queries, [tokens, q_heads, head_dim] */
    const cache_t *cache;
    int64_t q_heads, half; /* what is past 2 * half of a head is not rotated */
    float eps;
} rotation_t;

typedef struct {
    const batch_t *batch;
    const float *q; /* [tokens, heads * group, head_dim] */
    float *out;     /* like q */
    const cache_t *cache;
    int64_t group; /* query heads per head of the cache */
    float scale;
} attention_t;

/* Where the tokens of a tile lie, and those of the tile that comes next: in elements from the start of
 * the cache to their first head, and in slots. */
typedef struct {
    int64_t count, next_count;
    int64_t at[TILE], slot[TILE], next_at[TILE];
    int64_t first_head, end_head; /* of the next */
    int64_t token, head;          /* of the next: what is fetched up to now ends before it */
} places_t;

/* One head's keys and values of a tile. */
typedef struct {
    const float *keys;   /* [TILE / PANEL, head_dim, PANEL] */
    const float *values; /* [head_dim / PANEL, TILE, PANEL]; or where they are in the cache */
    int64_t panel_stride, token_stride;
    const int64_t *at; /* in the cache: each token's from there; or null */
} kv_tile_t;

/* What a worker keeps of some query rows. */
typedef struct {
    float *q, *output; /* [rows, head_dim] */
    float *most, *sum; /* [rows] */
    int64_t row;       /* the first, of those of its head */
    int64_t seen;      /* keys from the tile's first on that the head's first query sees; may be < 0 */
} state_t;

/* One of several operations on the same tokens, in their order. */
enum { PRODUCT, NORM, SWIGLU, ROTATE, ATTENTION };

typedef struct {
    int64_t kind;
    const void *call;
} step_t;

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

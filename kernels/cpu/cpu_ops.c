/* float32 operations of a decoder on x86-64. The Python files beside this one are their interface.
 *
 * All are compiled for two kinds of CPU. The results are the same bit for bit: sums over a row are kept
 * in 16 lanes by both, and every product that is added is a fused one.
 */

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "types.h"

enum { ABI = 3 };
enum { NONE, AVX2, AVX512 };

/* NO_LANES: tests build what there is on another kind of CPU. */
#if defined(__x86_64__) && !defined(NO_LANES)
#include <immintrin.h>

#include "elements.h"
#include "pool.h"

enum { ROWS_PER_TASK = 8 };

#include "lanes_avx2.h"
#include "product.h"
#include "rows.h"
#include "tiles.h"
#include "attention.h"
#include "no_lanes.h"

#include "lanes_avx512.h"
#include "product.h"
#include "rows.h"
#include "tiles.h"
#include "attention.h"
#include "no_lanes.h"

static int most_lanes(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")
        || !__builtin_cpu_supports("f16c"))
        return NONE;
    int has_all = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")
                  && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    return has_all ? AVX512 : AVX2;
}

#define OPERATION(name, type)                                                                      \
    void kvferry_##name(const type *call, int lanes, int workers)                                  \
    {                                                                                              \
        (lanes == AVX512 ? name##_avx512 : name##_avx2)(call, workers);                            \
    }

/* `lanes`: at most what kvferry_lanes() returns. */
OPERATION(product, product_t)
OPERATION(norm, norm_t)
OPERATION(swiglu, swiglu_t)
OPERATION(rotate, rotation_t)
OPERATION(attention, attention_t)

/* A step's own call, with one field that is the batch's. */
#define RUN(kind, name, type, field, value)                                                        \
    case kind: {                                                                                   \
        type call = *(const type *)step->call;                                                     \
        call.field = value;                                                                        \
        kvferry_##name(&call, lanes, workers);                                                     \
        break;                                                                                     \
    }

static void run_step(const step_t *step, const batch_t *batch, int lanes, int workers)
{
    switch (step->kind) {
        RUN(PRODUCT, product, product_t, rows, batch->tokens)
        RUN(NORM, norm, norm_t, rows, batch->tokens)
        RUN(SWIGLU, swiglu, swiglu_t, rows, batch->tokens)
        RUN(ROTATE, rotate, rotation_t, batch, batch)
        RUN(ATTENTION, attention, attention_t, batch, batch)
    }
}

/* Operations on the tokens of a batch, whatever they say of rows or batches themselves. */
void kvferry_run(const step_t *steps, int64_t count, const batch_t *batch, int lanes, int workers)
{
    for (const step_t *step = steps; step < steps + count; step++)
        run_step(step, batch, lanes, workers);
}
#else
static int most_lanes(void)
{
    return NONE;
}
#endif

int kvferry_abi(void)
{
    return ABI;
}

/* The best kind of CPU that this one is. */
int kvferry_lanes(void)
{
    return most_lanes();
}

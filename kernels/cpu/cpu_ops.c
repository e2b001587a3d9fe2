/* float32 operations of a decoder on x86-64. The Python files beside this one are their interface.
 *
 * All are compiled for two kinds of CPU. The results are the same bit for bit: sums over a row are kept
 * in 16 lanes by both, and every product that is added is a fused one.
 */

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "types.h"

enum { ABI = 2 };
enum { NONE, AVX2, AVX512 };

/* NO_LANES: tests build what there is on another kind of CPU. */
#if defined(__x86_64__) && !defined(NO_LANES)
#include <immintrin.h>

#include "pool.h"

enum { ROWS_PER_TASK = 8 };

/* Of FP8's bytes. */
static float e4m3_value[256];

__attribute__((constructor)) static void find_e4m3_values(void)
{
    for (int byte = 0; byte < 256; byte++) {
        int exponent = byte >> 3 & 15, mantissa = byte & 7;
        float value = exponent ? ldexpf((float)(8 + mantissa), exponent - 10)
                               : ldexpf((float)mantissa, -9);
        value = (byte & 0x7F) == 0x7F ? NAN : value;
        e4m3_value[byte] = byte & 0x80 ? -value : value;
    }
}

#include "lanes_avx2.h"
#include "product.h"
#include "rows.h"
#include "attention.h"
#include "no_lanes.h"

#include "lanes_avx512.h"
#include "product.h"
#include "rows.h"
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

/* Operations on `rows` rows each, whatever their own number of rows says. */
void kvferry_run(const step_t *steps, int64_t count, int64_t rows, int lanes, int workers)
{
    for (const step_t *step = steps; step < steps + count; step++) {
        if (step->kind == PRODUCT) {
            product_t call = *(const product_t *)step->call;
            call.rows = rows;
            kvferry_product(&call, lanes, workers);
        } else if (step->kind == NORM) {
            norm_t call = *(const norm_t *)step->call;
            call.rows = rows;
            kvferry_norm(&call, lanes, workers);
        } else {
            swiglu_t call = *(const swiglu_t *)step->call;
            call.rows = rows;
            kvferry_swiglu(&call, lanes, workers);
        }
    }
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

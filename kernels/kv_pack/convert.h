/* Element types of KV, converted as kernels/kv_layer.py has it done by torch, bit for bit; only which
 * NaN a NaN becomes is left open there and here. The loops are plain for the compiler to vectorise,
 * which it does for each kind of CPU; -ffp-contract=off keeps products rounded before a sum.
 */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kinds.h"

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, E4M3 };
enum { CHUNK = 2048 }; /* elements that are converted at a time, and most of a head */
#define LEAST_SCALE 0x1p-126f

static const int ELEMENT_BYTES[] = {4, 2, 2, 1, 1};

typedef float __attribute__((may_alias)) float_t32;
typedef uint16_t __attribute__((may_alias)) half_t;

/* Elements of some heads, and a scale for each where the type is quantised. */
typedef struct {
    int type;
    uint8_t *elements;
    float_t32 *scales;
} heads_t;

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Both numbers have 31 bits. There is no branch, which would keep the compiler from vectorising. */
INLINE uint32_t if_below(uint32_t number, uint32_t bound, uint32_t first, uint32_t second)
{
    uint32_t mask = (uint32_t)((int32_t)(number - bound) >> 31);
    return (first & mask) | (second & ~mask);
}

INLINE int32_t lesser(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

INLINE int32_t greater(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* A float with fewer bits of exponent and mantissa: subnormal ones and those without a number are
 * apart. */
INLINE float from_half(uint32_t half)
{
    uint32_t sign = (half & 0x8000) << 16, rest = half & 0x7FFF;
    uint32_t normal = (rest << 13) + (112u << 23);
    uint32_t endless = rest << 13 | 0x7F800000 | if_below(rest, 0x7C01, 0, 0x400000);
    uint32_t subnormal = bits_of((float)(int32_t)rest * 0x1p-24f);
    uint32_t finite = if_below(rest, 0x400, subnormal, normal);
    return float_of(sign | if_below(rest, 0x7C00, finite, endless));
}

INLINE float from_e4m3(uint32_t byte)
{
    uint32_t sign = (byte & 0x80) << 24, rest = byte & 0x7F;
    uint32_t normal = (rest << 20) + (120u << 23);
    uint32_t subnormal = bits_of((float)(int32_t)rest * 0x1p-9f);
    uint32_t number = if_below(rest, 8, subnormal, normal);
    return float_of(sign | if_below(rest, 0x7F, number, 0x7FF00000));
}

/* All round to nearest even: half of the last bit kept is added, less one unless that bit is set. A
 * subnormal number is rounded by adding a power of two whose last bit is the least that is kept. */
INLINE uint32_t to_bfloat16(float value)
{
    uint32_t bits = bits_of(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return if_below(bits & 0x7FFFFFFF, 0x7F800001, rounded, 0xFFFF);
}

INLINE uint32_t to_half(float value)
{
    uint32_t bits = bits_of(value), rest = bits & 0x7FFFFFFF;
    int32_t normal = (int32_t)(rest + 0xFFF + (rest >> 13 & 1) - (112u << 23)) >> 13;
    int32_t subnormal = (int32_t)(bits_of(float_of(rest) + 0.5f) - bits_of(0.5f));
    /* The normal one is the lesser wherever it applies, and below that less than this. */
    int32_t half = lesser(lesser(subnormal, greater(normal, 0x400)), 0x7C00);
    uint32_t nan = 0x7E00 | (rest >> 13 & 0x3FF);
    return (bits >> 16 & 0x8000) | if_below(rest, 0x7F800001, (uint32_t)half, nan);
}

/* Of what rounds to 448, the largest, at most; or NaN, which is above that. */
INLINE uint32_t to_e4m3(float value)
{
    uint32_t bits = bits_of(value), rest = bits & 0x7FFFFFFF;
    int32_t normal = (int32_t)(rest + 0x7FFFF + (rest >> 20 & 1) - (120u << 23)) >> 20;
    int32_t subnormal = (int32_t)(bits_of(float_of(rest) + 0x1p14f) - bits_of(0x1p14f));
    int32_t byte = lesser(lesser(subnormal, greater(normal, 8)), 0x7F);
    return (bits >> 24 & 0x80) | (uint32_t)byte;
}

/* Of what rounds to 127 at most. The last bits of the sum are the number, rounded. */
INLINE uint32_t to_int8(float value)
{
    return bits_of(value + 0x1.8p23f);
}

typedef void convert_t(const heads_t *from, const heads_t *to, int64_t heads, int64_t dim);

#define FOR_CPU(name) name##_plain
#define TARGET
#include "convert_loops.h"
#undef FOR_CPU
#undef TARGET

static convert_t *convert = convert_plain;

#if defined(__x86_64__)
#define FOR_CPU(name) name##_avx2
#define TARGET __attribute__((target("avx2")))
#include "convert_loops.h"
#undef FOR_CPU
#undef TARGET

#define FOR_CPU(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
#include "convert_loops.h"
#undef FOR_CPU
#undef TARGET

__attribute__((constructor)) static void choose_convert(void)
{
    __builtin_cpu_init();
    if (MOST_LANES >= AVX512 && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl"))
        convert = convert_avx512;
    else if (MOST_LANES >= AVX2 && __builtin_cpu_supports("avx2"))
        convert = convert_avx2;
}
#endif

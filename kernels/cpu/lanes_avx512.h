/* Vectors of 16. See cpu_ops.c. */

#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")))
#define NAME(name) name##_avx512
#define LANES 16
#define ROWS 14 /* of a tile: 28 vectors of sums, and what is multiplied, fill the 32 registers */
#define PANELS 2
#define VECTOR __m512
#define LOAD(at) _mm512_loadu_ps(at)
#define STORE(at, value) _mm512_storeu_ps(at, value)
#define ALL(value) _mm512_set1_ps(value)
#define ADD(a, b) _mm512_add_ps(a, b)
#define SUB(a, b) _mm512_sub_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define DIV(a, b) _mm512_div_ps(a, b)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
/* The second where either is no number. */
#define MAX(a, b) _mm512_max_ps(a, b)
#define MIN(a, b) _mm512_min_ps(a, b)
/* 2 to the power of what was rounded to a whole number by adding ROUNDER. */
#define TWO_TO(rounded)                                                                            \
    _mm512_castsi512_ps(_mm512_slli_epi32(                                                         \
        _mm512_add_epi32(_mm512_castps_si512(rounded), _mm512_set1_epi32(127)), 23))
/* Those below `count` of the 16 lanes from `first` on. */
#define FIRST(value, first, count, otherwise)                                                      \
    _mm512_mask_blend_ps((__mmask16)((1u << (count)) - 1), ALL(otherwise), value)
#define HALVES(op, v) op(_mm512_castps512_ps256(v[0]), _mm512_extractf32x8_ps(v[0], 1))

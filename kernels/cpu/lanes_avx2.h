/* Vectors of 8: two of them are 16 lanes. See cpu_ops.c. */

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NAME(name) name##_avx2
#define LANES 8
#define ROWS 6  /* of a tile: 12 vectors of sums, and what is multiplied, fill the 16 registers */
#define PANELS 1
#define VECTOR __m256
#define LOAD(at) _mm256_loadu_ps(at)
#define STORE(at, value) _mm256_storeu_ps(at, value)
#define ALL(value) _mm256_set1_ps(value)
#define ADD(a, b) _mm256_add_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define DIV(a, b) _mm256_div_ps(a, b)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
/* The second where either is no number. */
#define MAX(a, b) _mm256_max_ps(a, b)
#define MIN(a, b) _mm256_min_ps(a, b)
/* 2 to the power of what was rounded to a whole number by adding ROUNDER. */
#define TWO_TO(rounded)                                                                            \
    _mm256_castsi256_ps(_mm256_slli_epi32(                                                         \
        _mm256_add_epi32(_mm256_castps_si256(rounded), _mm256_set1_epi32(127)), 23))
/* Those below `count` of the 16 lanes from `first` on. */
#define FIRST(value, first, count, otherwise)                                                      \
    _mm256_blendv_ps(ALL(otherwise), value,                                                        \
                     _mm256_castsi256_ps(_mm256_cmpgt_epi32(                                       \
                         _mm256_set1_epi32((int)(count) - (first)),                                \
                         _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))))
#define HALVES(op, v) op(v[0], v[1])

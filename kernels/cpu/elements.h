/* Elements of a cache and floats. */

/* A head of floats becomes elements `at` a place of the cache, in the type that this has, and their
 * scale. See elements.c. */
void keep_head(int64_t type, const float *values, void *cache, int64_t at, float *scale,
               int64_t count);

static inline int64_t bytes_of(int64_t type)
{
    return type == FLOAT32 ? 4 : type <= FLOAT16 ? 2 : 1;
}

/* The bits of FP8 E4M3 are those of a float16 that is 2^8 times as small, but for NaN. */
__attribute__((target("avx2,fma,f16c"))) INLINE __m256 eight_of_e4m3(const uint8_t *from)
{
    __m128i bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from));
    __m128i rest = _mm_and_si128(bytes, _mm_set1_epi16(0x7F));
    __m128i sign = _mm_slli_epi16(_mm_srli_epi16(bytes, 7), 15);
    __m256 value = _mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(rest, 7)));
    __m256i is_nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7F)));
    return _mm256_or_ps(_mm256_mul_ps(value, _mm256_set1_ps(256.0f)),
                        _mm256_castsi256_ps(is_nan));
}

/* Eight elements, before their scale. */
__attribute__((target("avx2,fma,f16c"))) INLINE __m256 eight_floats(int64_t type, const char *from)
{
    switch (type) {
    case FLOAT32:
        return _mm256_loadu_ps((const float *)from);
    case BFLOAT16: {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    case FLOAT16:
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    case INT8:
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
    default:
        return eight_of_e4m3((const uint8_t *)from);
    }
}

/* A head of `count` elements, a multiple of 16, as floats: 16 of them every `stride`. */
__attribute__((target("avx2,fma,f16c"))) INLINE void
floats_of(const int64_t type, const char *from, const float *scale, float *to, int64_t stride,
          int64_t count)
{
    __m256 by = _mm256_set1_ps(scale ? *scale : 1.0f);
    for (int64_t i = 0; i < count; i += 16, to += stride)
        for (int half = 0; half < 16; half += 8) {
            __m256 value = eight_floats(type, from + (i + half) * bytes_of(type));
            _mm256_storeu_ps(to + half, scale ? _mm256_mul_ps(value, by) : value);
        }
}

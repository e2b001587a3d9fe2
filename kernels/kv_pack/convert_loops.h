/* The loops of convert.h, included once for each kind of CPU. Each is a function of its own: gcc does
 * not vectorise them inside a larger one.
 */

#define LOOP TARGET __attribute__((noinline)) static void

LOOP FOR_CPU(floats_of_bfloat16)(const half_t *restrict from, float *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = float_of((uint32_t)from[i] << 16);
}

LOOP FOR_CPU(floats_of_half)(const half_t *restrict from, float *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from_half(from[i]);
}

LOOP FOR_CPU(floats_of_int8)(const uint8_t *restrict from, float *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (float)(int8_t)from[i];
}

LOOP FOR_CPU(floats_of_e4m3)(const uint8_t *restrict from, float *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from_e4m3(from[i]);
}

LOOP FOR_CPU(scale)(float *restrict values, float by, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        values[i] *= by;
}

LOOP FOR_CPU(bfloat16_of)(const float_t32 *restrict from, half_t *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint16_t)to_bfloat16(from[i]);
}

LOOP FOR_CPU(half_of)(const float_t32 *restrict from, half_t *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint16_t)to_half(from[i]);
}

LOOP FOR_CPU(int8_of)(const float_t32 *restrict from, uint8_t *restrict to, float by, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint8_t)to_int8(from[i] * by);
}

LOOP FOR_CPU(e4m3_of)(const float_t32 *restrict from, uint8_t *restrict to, float by, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint8_t)to_e4m3(from[i] * by);
}

/* The largest magnitude; NaN if there is one. */
LOOP FOR_CPU(find_most)(const float_t32 *restrict values, float *most, int64_t count)
{
    /* Of numbers without a sign the bits are in the same order, and NaN is above all. */
    int32_t bits = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t rest = (int32_t)(bits_of(values[i]) & 0x7FFFFFFF);
        bits = rest > bits ? rest : bits;
    }
    *most = float_of(bits > 0x7F800000 ? 0x7FC00000 : (uint32_t)bits);
}

#undef LOOP

TARGET static void FOR_CPU(to_floats)(int type, const uint8_t *from, float *to, int64_t count)
{
    if (type == BFLOAT16)
        FOR_CPU(floats_of_bfloat16)((const half_t *)from, to, count);
    else if (type == FLOAT16)
        FOR_CPU(floats_of_half)((const half_t *)from, to, count);
    else if (type == INT8)
        FOR_CPU(floats_of_int8)(from, to, count);
    else
        FOR_CPU(floats_of_e4m3)(from, to, count);
}

TARGET static void FOR_CPU(from_floats)(int type, const float_t32 *from, uint8_t *to, int64_t count)
{
    if (type == FLOAT32)
        memcpy(to, from, (size_t)count * sizeof *from);
    else if (type == BFLOAT16)
        FOR_CPU(bfloat16_of)(from, (half_t *)to, count);
    else
        FOR_CPU(half_of)(from, (half_t *)to, count);
}

/* One head; its scale. */
TARGET static float FOR_CPU(quantise)(int type, const float_t32 *from, uint8_t *to, int64_t count)
{
    float most;
    FOR_CPU(find_most)(from, &most, count);
    float scale = most / (type == INT8 ? 127.0f : 448.0f);
    if (scale < LEAST_SCALE)
        scale = 0.0f;
    /* The largest number becomes 127 or 448, but for the last bit of a float: no need to clamp. */
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    if (type == E4M3)
        FOR_CPU(e4m3_of)(from, to, inverse, count);
    else if (scale < HUGE_VALF)
        FOR_CPU(int8_of)(from, to, inverse, count);
    else
        memset(to, 0, (size_t)count);
    return scale;
}

/* heads * dim: CHUNK at most. */
TARGET static void FOR_CPU(convert)(const heads_t *from, const heads_t *to, int64_t heads,
                                    int64_t dim)
{
    float memory[CHUNK];
    const float_t32 *values = (const float_t32 *)from->elements;
    if (from->type != FLOAT32) {
        FOR_CPU(to_floats)(from->type, from->elements, memory, heads * dim);
        values = memory;
    }
    for (int64_t head = 0; from->scales && head < heads; head++)
        FOR_CPU(scale)(memory + head * dim, from->scales[head], dim);
    if (!to->scales)
        FOR_CPU(from_floats)(to->type, values, to->elements, heads * dim);
    for (int64_t head = 0; to->scales && head < heads; head++)
        to->scales[head] = FOR_CPU(quantise)(to->type, values + head * dim,
                                             to->elements + head * dim, dim);
}

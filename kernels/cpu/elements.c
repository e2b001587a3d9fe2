/* Heads of floats as caches keep them: by the loops that convert on the way to another worker. */

#include "../kv_pack/convert.h"

void keep_head(int64_t type, const float *values, void *cache, int64_t at, float *scale,
               int64_t count)
{
    const heads_t from = {.type = FLOAT32, .elements = (uint8_t *)values};
    const heads_t to = {.type = (int)type,
                        .elements = (uint8_t *)cache + at * ELEMENT_BYTES[type],
                        .scales = scale};
    convert(&from, &to, 1, count);
}

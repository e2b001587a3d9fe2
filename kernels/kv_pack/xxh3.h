/* XXH3-64 of bytes that are copied: each byte is read once, and what is digested is what is written,
 * whatever a peer does meanwhile to memory that it shares.
 *
 * XXH3 is Yann Collet's; this follows its specification for inputs above 240 bytes, here with a
 * length that is known before the first byte. Python's xxhash is the reference, bit for bit.
 */

#pragma once

#include <stdint.h>
#include <string.h>

#include "kinds.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "digests are defined over little-endian words; the Python path does without this file"
#endif

enum { STRIPE = 64, LANES = 8, STRIPES_PER_BLOCK = 16, SECRET = 192 };
enum { SCRAMBLE = SECRET - STRIPE, LAST = SCRAMBLE - 7 }; /* places in the secret */

typedef struct {
    uint64_t lanes[LANES];
    uint8_t secret[SECRET];
    int64_t total;   /* bytes */
    int64_t stripes; /* still to be taken, the last one left out */
    int in_block;    /* stripes of the block so far */
    int pending;     /* bytes of the stripe so far */
    int is_streamed; /* nobody reads soon what is written: keep it out of the caches */
    uint8_t stripe[STRIPE];
    uint8_t last[STRIPE]; /* the newest bytes */
} digest_t;

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F;
static const uint64_t PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63;
static const uint64_t PRIME64_5 = 0x27D4EB2F165667C5, AVALANCHE = 0x165667919E3779F9;

static const uint8_t SECRET_BYTES[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t word(const uint8_t *bytes)
{
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* After this the compiler cannot load the value again from memory that a peer may have changed. */
#define READ_ONCE(constraint, value) __asm__ volatile("" : "+" constraint(value))

/* Two ends of a copy. */
typedef struct {
    const uint8_t *source;
    uint8_t *target;
} ends_t;

/* Bytes between what is copied and what is asked for: blocks lie apart, and the hardware does not
 * look beyond a page. */
#define AHEAD 1024
#define PREFETCH(ends) (__builtin_prefetch((ends).source, 0), __builtin_prefetch((ends).target, 1))

static void step(ends_t *ends)
{
    ends->source += STRIPE, ends->target += STRIPE;
}

static void take_stripe(uint64_t *lanes, const uint8_t *secret, ends_t now)
{
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t value = word(now.source + 8 * lane);
        READ_ONCE("r", value);
        memcpy(now.target + 8 * lane, &value, sizeof value);
        uint64_t key = value ^ word(secret + 8 * lane);
        lanes[lane ^ 1] += value;
        lanes[lane] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

/* Copies `count` stripes and takes them into the digest. `soon`: what will be copied a little later. */
typedef void take_t(digest_t *digest, ends_t now, ends_t soon, int64_t count);

static void take_plain(digest_t *digest, ends_t now, ends_t soon, int64_t count)
{
    uint64_t lanes[LANES];
    int at = digest->in_block;
    memcpy(lanes, digest->lanes, sizeof lanes);
    for (; count > 0; count--, step(&now), step(&soon)) {
        PREFETCH(soon);
        take_stripe(lanes, digest->secret + 8 * at, now);
        if (++at < STRIPES_PER_BLOCK)
            continue;
        at = 0;
        for (int lane = 0; lane < LANES; lane++) {
            lanes[lane] ^= lanes[lane] >> 47 ^ word(digest->secret + SCRAMBLE + 8 * lane);
            lanes[lane] *= PRIME32_1;
        }
    }
    memcpy(digest->lanes, lanes, sizeof lanes);
    digest->in_block = at;
}

static take_t *take = take_plain;
static take_t *stream = 0; /* where there is one */
static int lanes_used = PLAIN;

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2"))) static void take_avx2(digest_t *digest, ends_t now,
                                                      ends_t soon, int64_t count)
{
    const __m256i prime = _mm256_set1_epi64x((int64_t)PRIME32_1);
    __m256i sum[2];
    int at = digest->in_block;
    for (int half = 0; half < 2; half++)
        sum[half] = _mm256_loadu_si256((const __m256i *)digest->lanes + half);
    for (; count > 0; count--, step(&now), step(&soon)) {
        const __m256i *secret = (const __m256i *)(digest->secret + 8 * at);
        PREFETCH(soon);
        for (int half = 0; half < 2; half++) {
            __m256i value = _mm256_loadu_si256((const __m256i *)now.source + half);
            READ_ONCE("x", value);
            _mm256_storeu_si256((__m256i *)now.target + half, value);
            __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256(secret + half));
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, swapped));
        }
        if (++at < STRIPES_PER_BLOCK)
            continue;
        at = 0;
        secret = (const __m256i *)(digest->secret + SCRAMBLE);
        for (int half = 0; half < 2; half++) {
            __m256i x = _mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47));
            x = _mm256_xor_si256(x, _mm256_loadu_si256(secret + half));
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
            sum[half] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
        }
    }
    for (int half = 0; half < 2; half++)
        _mm256_storeu_si256((__m256i *)digest->lanes + half, sum[half]);
    digest->in_block = at;
}

__attribute__((target("avx512f"), always_inline)) static inline void
copy_avx512(digest_t *digest, ends_t now, ends_t soon, int64_t count, const int is_streamed)
{
    const __m512i prime = _mm512_set1_epi64((int64_t)PRIME32_1);
    int at = digest->in_block;
    __m512i sum = _mm512_loadu_si512(digest->lanes);
    for (; count > 0; count--, step(&now), step(&soon)) {
        __builtin_prefetch(soon.source, 0);
        if (!is_streamed)
            __builtin_prefetch(soon.target, 1);
        __m512i value = _mm512_loadu_si512(now.source);
        READ_ONCE("v", value);
        if (is_streamed)
            _mm512_stream_si512((__m512i *)now.target, value);
        else
            _mm512_storeu_si512(now.target, value);
        __m512i secret = _mm512_loadu_si512(digest->secret + 8 * at);
        __m512i key = _mm512_xor_si512(value, secret);
        __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        __m512i swapped = _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
        if (++at < STRIPES_PER_BLOCK)
            continue;
        at = 0;
        __m512i x = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
        x = _mm512_xor_si512(x, _mm512_loadu_si512(digest->secret + SCRAMBLE));
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
        sum = _mm512_add_epi64(_mm512_mul_epu32(x, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(digest->lanes, sum);
    digest->in_block = at;
}

__attribute__((target("avx512f"))) static void take_avx512(digest_t *digest, ends_t now,
                                                           ends_t soon, int64_t count)
{
    copy_avx512(digest, now, soon, count, 0);
}

/* To whole cache lines, which are not read first, and do not drive out what is in use. */
__attribute__((target("avx512f"))) static void stream_avx512(digest_t *digest, ends_t now,
                                                             ends_t soon, int64_t count)
{
    copy_avx512(digest, now, soon, count, 1);
}

__attribute__((constructor)) static void choose(void)
{
    __builtin_cpu_init();
    if (MOST_LANES >= AVX512 && __builtin_cpu_supports("avx512f"))
        take = take_avx512, stream = stream_avx512, lanes_used = AVX512;
    else if (MOST_LANES >= AVX2 && __builtin_cpu_supports("avx2"))
        take = take_avx2, lanes_used = AVX2;
}
#endif

static void begin_digest(digest_t *digest, uint64_t seed, int64_t total, int is_streamed)
{
    const uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(digest->lanes, lanes, sizeof lanes);
    for (int at = 0; at < SECRET; at += 16) {
        uint64_t low = word(SECRET_BYTES + at) + seed, high = word(SECRET_BYTES + at + 8) - seed;
        memcpy(digest->secret + at, &low, sizeof low);
        memcpy(digest->secret + at + 8, &high, sizeof high);
    }
    digest->total = total;
    digest->is_streamed = is_streamed;
    digest->stripes = (total - 1) / STRIPE;
    digest->in_block = digest->pending = 0;
}

/* Stripes that lie together, `next` after them. */
static void take_run(digest_t *digest, ends_t now, ends_t next, int64_t count)
{
    const int64_t ahead = AHEAD / STRIPE;
    int is_streamed = digest->is_streamed && stream && (uintptr_t)now.target % STRIPE == 0;
    take_t *take_all = is_streamed ? stream : take;
    digest->stripes -= count;
    if (count > ahead) {
        int64_t first = count - ahead, nbytes = first * STRIPE;
        take_all(digest, now, (ends_t){now.source + AHEAD, now.target + AHEAD}, first);
        now = (ends_t){now.source + nbytes, now.target + nbytes};
        count = ahead;
    }
    take_all(digest, now, next, count);
}

/* Copies bytes and takes them into the digest. `own`: whichever end no peer can change. */
static void copy_digested(digest_t *digest, ends_t now, ends_t next, int64_t count,
                          const uint8_t *own)
{
    for (int64_t left = count; left > 0;) {
        int64_t whole = left / STRIPE, part;
        if (whole > digest->stripes)
            whole = digest->stripes;
        if (digest->pending == 0 && whole > 0) {
            take_run(digest, now, next, whole);
            part = whole * STRIPE;
        } else {
            part = STRIPE - digest->pending;
            if (part > left)
                part = left;
            uint8_t *stripe = digest->stripe + digest->pending;
            memcpy(stripe, now.source, (size_t)part);
            memcpy(now.target, stripe, (size_t)part);
            digest->pending += (int)part;
            if (digest->pending == STRIPE) {
                /* The last stripe of all is taken otherwise, in the end. */
                uint8_t copied[STRIPE];
                ends_t ends = {digest->stripe, copied};
                if (digest->stripes > 0)
                    take_run(digest, ends, ends, 1);
                digest->pending = 0;
            }
        }
        left -= part;
        now = (ends_t){now.source + part, now.target + part};
    }
    int64_t kept = count < STRIPE ? STRIPE - count : 0;
    memmove(digest->last, digest->last + STRIPE - kept, (size_t)kept);
    memcpy(digest->last + kept, own + count - (STRIPE - kept), (size_t)(STRIPE - kept));
}

static uint64_t end_digest(digest_t *digest)
{
    uint8_t copied[STRIPE];
    take_stripe(digest->lanes, digest->secret + LAST, (ends_t){digest->last, copied});
    uint64_t result = (uint64_t)digest->total * PRIME64_1;
    for (int lane = 0; lane < LANES; lane += 2) {
        const uint8_t *secret = digest->secret + 11 + 8 * lane;
        unsigned __int128 product = (unsigned __int128)(digest->lanes[lane] ^ word(secret))
                                    * (digest->lanes[lane + 1] ^ word(secret + 8));
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result ^= result >> 37;
    result *= AVALANCHE;
    return result ^ result >> 32;
}

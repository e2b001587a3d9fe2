/* How far a slab is filled: a word of memory that both sides of a link share. What a peer writes there
 * is not trusted: it decides when bytes are read, and the digests decide what they are worth. */

#include <stdint.h>
#include <time.h>

enum { TILE_BITS = 20 };
enum { SPINS = 2000, NAP_NS = 20000 };

typedef struct {
    uint64_t *word;     /* (grant, tiles that are filled) */
    uint64_t grant;     /* what the slab is used for now */
    int64_t patience_ns; /* without a tile for so long a scatter gives up */
} progress_t;

static void tell_filled(const progress_t *progress, uint64_t tiles)
{
    __atomic_store_n(progress->word, progress->grant << TILE_BITS | tiles, __ATOMIC_RELEASE);
}

static int is_filled(const progress_t *progress, uint64_t tiles)
{
    uint64_t now = __atomic_load_n(progress->word, __ATOMIC_ACQUIRE);
    return now >> TILE_BITS == progress->grant && (now & ((1 << TILE_BITS) - 1)) >= tiles;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether so many tiles are filled. Spins for some microseconds, about a tile's time, then naps: the
 * other side may have lost its processor, perhaps to us. */
static int wait_filled(const progress_t *progress, uint64_t tiles)
{
    for (int spin = 0; spin < SPINS; spin++) {
        if (is_filled(progress, tiles))
            return 1;
        relax();
    }
    const struct timespec nap = {0, NAP_NS};
    for (int64_t end = now_ns() + progress->patience_ns; now_ns() < end;) {
        nanosleep(&nap, 0);
        if (is_filled(progress, tiles))
            return 1;
    }
    return 0;
}

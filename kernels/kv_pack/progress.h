/* How far a slab is filled: told by a word of memory that both sides of a link share, or by the bytes
 * themselves, which go over a connection meanwhile. What a peer writes there is not trusted: it decides
 * when bytes are read, and the digests decide what they are worth. */

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

enum { TILE_BITS = 20 };
enum { SPINS = 2000, NAP_NS = 20000 };

typedef struct {
    uint64_t *word;     /* (grant, tiles that are filled); null for a connection */
    uint64_t grant;     /* what the slab is used for now */
    int64_t patience_ns; /* without a tile for so long a scatter gives up */
    int64_t connection; /* a socket */
    int64_t moved;      /* bytes of the slab that have gone, or come, over it */
    int64_t has_seal;   /* whether a scatter is to wait for the seal, which counts as a tile */
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

/* Send what is filled, as far as the kernel takes it. What fails here fails again for the caller. */
static void send_filled(progress_t *progress, const uint8_t *slab, int64_t filled)
{
    while (progress->moved < filled) {
        ssize_t sent = send((int)progress->connection, slab + progress->moved,
                            (size_t)(filled - progress->moved), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent <= 0)
            return;
        progress->moved += sent;
    }
}

/* Whether so much of the slab has come. */
static int receive_filled(progress_t *progress, uint8_t *slab, int64_t filled)
{
    int64_t left_ns = progress->patience_ns, end = now_ns() + left_ns;
    while (progress->moved < filled) {
        ssize_t came = recv((int)progress->connection, slab + progress->moved,
                            (size_t)(filled - progress->moved), MSG_DONTWAIT);
        if (came > 0) {
            progress->moved += came;
            continue;
        }
        left_ns = end - now_ns();
        if (came == 0 || errno != EAGAIN || left_ns <= 0)
            return 0;
        struct pollfd ready = {(int)progress->connection, POLLIN, 0};
        poll(&ready, 1, (int)(left_ns / 1000000) + 1);
    }
    return 1;
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

/* A tile is filled; the slab has no gap before `end`. */
static void tell_tile(progress_t *progress, const uint8_t *slab, uint64_t number, int64_t end)
{
    if (progress->word)
        tell_filled(progress, number + 1);
    else
        send_filled(progress, slab, end);
}

/* Whether a tile, whose bytes end at `end`, is filled, now or within the patience. */
static int await_tile(progress_t *progress, uint8_t *slab, uint64_t number, int64_t end)
{
    if (progress->word)
        return wait_filled(progress, number + 1);
    return receive_filled(progress, slab, end);
}

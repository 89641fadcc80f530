/* Moves chunks of pages into a buffer in one call, so that a worker thread does not take Python's lock for each.
 *
 * Checksums are XXH64 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), seed 0.
 */
#if ABI != 4 /* see build.py */
#error "these kernels belong to another version of OVAL"
#endif
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

static const uint64_t P1 = 0x9E3779B185EBCA87u, P2 = 0xC2B2AE3D27D4EB4Fu, P3 = 0x165667B19E3779F9u,
                      P4 = 0x85EBCA77C2B2AE63u, P5 = 0x27D4EB2F165667C5u;

static inline uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

static inline uint64_t load64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x); /* little endian, as every machine that this is compiled on */
    return x;
}

static inline uint32_t load32(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline uint64_t mix_in(uint64_t lane, uint64_t input) { return rotate(lane + input * P2, 31) * P1; }

static inline uint64_t fold(uint64_t hash, uint64_t lane) { return (hash ^ mix_in(0, lane)) * P1 + P4; }

uint64_t oval_checksum(const uint8_t *p, int64_t length) {
    const uint8_t *end = p + length;
    uint64_t hash = P5;
    if (length >= 32) {
        uint64_t a = P1 + P2, b = P2, c = 0, d = 0 - P1;
        for (; p + 32 <= end; p += 32) {
            a = mix_in(a, load64(p));
            b = mix_in(b, load64(p + 8));
            c = mix_in(c, load64(p + 16));
            d = mix_in(d, load64(p + 24));
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = fold(fold(fold(fold(hash, a), b), c), d);
    }
    hash += (uint64_t)length;
    for (; p + 8 <= end; p += 8) hash = rotate(hash ^ mix_in(0, load64(p)), 27) * P1 + P4;
    for (; p + 4 <= end; p += 4) hash = rotate(hash ^ load32(p) * P1, 23) * P2 + P3;
    for (; p < end; p++) hash = rotate(hash ^ *p * P5, 11) * P1;
    hash = (hash ^ (hash >> 33)) * P2;
    hash = (hash ^ (hash >> 29)) * P3;
    return hash ^ (hash >> 32);
}

/* K and V of a layer: `heads` KV heads, bytes of one token's key and value in one head. */
typedef struct {
    int64_t heads, key_bytes, value_bytes;
} chunk_shape;

/* Puts a chunk of `tokens` tokens, [heads][tokens] keys, then values, into K [heads][total] and V [heads][total], the
 * first of its tokens at place `first`. */
static void scatter(const uint8_t *chunk, chunk_shape shape, int64_t tokens, int64_t first, int64_t total,
                    uint8_t *out) {
    int64_t widths[2] = {shape.key_bytes, shape.value_bytes};
    for (int side = 0; side < 2; side++) {
        int64_t width = widths[side];
        for (int64_t head = 0; head < shape.heads; head++) {
            memcpy(out + (head * total + first) * width, chunk, (size_t)(tokens * width));
            chunk += tokens * width;
        }
        out += shape.heads * total * width;
    }
}

/* Copies `count` chunks of tokens[i] tokens from main memory to K and V of `total` tokens in `out`, from place `first`. */
void oval_copy_chunks(int64_t count, const int64_t *from, const int64_t *tokens, int64_t heads, int64_t key_bytes,
                      int64_t value_bytes, int64_t first, int64_t total, uint8_t *out) {
    chunk_shape shape = {heads, key_bytes, value_bytes};
    for (int64_t i = 0; i < count; i++) {
        scatter((const uint8_t *)(intptr_t)from[i], shape, tokens[i], first, total, out);
        first += tokens[i];
    }
}

/* Reads `count` chunks from a file likewise, each through `scratch`, which holds the largest.
 *
 * Returns the number of chunks that were read and are right. If that is not `count`, *why says what is wrong with the
 * next one: an errno, 0 for a wrong checksum, or -1 - (bytes got) for a file that ends too early. */
int64_t oval_read_chunks(int fd, int64_t count, const int64_t *offsets, const int64_t *tokens,
                         const uint64_t *checksums, int64_t heads, int64_t key_bytes, int64_t value_bytes,
                         int64_t first, int64_t total, uint8_t *scratch, uint8_t *out, int64_t *why) {
    chunk_shape shape = {heads, key_bytes, value_bytes};
    for (int64_t i = 0; i < count; i++) {
        int64_t got = 0, size = tokens[i] * heads * (key_bytes + value_bytes);
        while (got < size) {
            ssize_t n = pread(fd, scratch + got, (size_t)(size - got), (off_t)(offsets[i] + got));
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) {
                *why = n < 0 ? errno : -1 - got;
                return i;
            }
            got += n;
        }
        if (oval_checksum(scratch, size) != checksums[i]) {
            *why = 0;
            return i;
        }
        scatter(scratch, shape, tokens[i], first, total, out);
        first += tokens[i];
    }
    return count;
}

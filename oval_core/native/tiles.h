/* What kernels for few rows share: the ways to compute on this processor, bf16, and tiles for matrix products.
 *
 * A tile is SIDE rows of STEP bf16. As the right factor of a product it holds STEP columns of SIDE rows, packed in pairs
 * of columns: [STEP / 2][SIDE][2].
 */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;
enum { PLAIN = 0, AVX512 = 1, AMX = 2 };

#define SIDE 16
#define STEP 32            /* bf16 in a register, and columns of a tile */
#define TILE (SIDE * STEP) /* bf16 in a tile */

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define HAS_AVX512 1
#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#endif
#endif

/* UNROLL: only then do compilers keep sums in registers. */
#define UNROLL _Pragma("GCC unroll 16")

/* The best path that this process may take; the kernel is asked for AMX here, once. */
static inline int best_path(void) {
#ifdef HAS_AMX
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0) return AMX;
#endif
#ifdef HAS_AVX512
    return AVX512;
#else
    return PLAIN;
#endif
}

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline bf16 narrow(float value) { /* round to nearest, ties to even, as torch does */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0; /* NaN */
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef HAS_AVX512

static inline __m512i load_step(const bf16 *row, int64_t at, int64_t columns) {
    int64_t left = columns - at;
    __mmask32 mask = left >= STEP ? 0xffffffffu : left <= 0 ? 0 : (1u << left) - 1;
    return _mm512_maskz_loadu_epi16(mask, row + at);
}

static inline void transpose(__m512i r[SIDE]) { /* 16 x 16 of 32 bits */
    __m512i t[SIDE];
    UNROLL for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < SIDE; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    UNROLL for (int i = 0; i < 4; i++) { /* r[4 * a + i]: row quarter a, columns i, 4 + i, 8 + i, 12 + i */
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

/* packed: [M / SIDE][I / STEP] right tiles of M rows of x, `row_step` apart; zeros where there is no row or column. */
static inline void pack(const bf16 *x, bf16 *packed, int64_t rows, int64_t columns, int64_t row_step) {
    for (int64_t first = 0; first < rows; first += SIDE)
        for (int64_t at = 0; at < columns; at += STEP, packed += TILE) {
            __m512i lines[SIDE];
            for (int m = 0; m < SIDE; m++)
                lines[m] = first + m < rows ? load_step(x + (first + m) * row_step, at, columns)
                                            : _mm512_setzero_si512();
            transpose(lines);
            for (int p = 0; p < SIDE; p++) _mm512_store_si512(packed + p * STEP, lines[p]);
        }
}

#else

static inline void pack(const bf16 *x, bf16 *packed, int64_t rows, int64_t columns, int64_t row_step) {
    for (int64_t first = 0; first < rows; first += SIDE)
        for (int64_t at = 0; at < columns; at += STEP, packed += TILE)
            for (int m = 0; m < SIDE; m++)
                for (int i = 0; i < STEP; i++)
                    packed[i / 2 * STEP + 2 * m + i % 2] =
                        first + m < rows && at + i < columns ? x[(first + m) * row_step + at + i] : 0;
}

#endif
#ifdef HAS_AMX

#define FENCE __asm__ volatile("" ::: "memory") /* the tile instructions do not tell the compiler what they read */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} tile_config;

/* Eight whole tiles for this thread; `theirs` is what it had: other libraries use tiles too, and may keep their setting. */
static inline void take_tiles(tile_config *theirs) {
    _Alignas(64) tile_config ours = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        ours.row_bytes[tile] = 64;
        ours.num_rows[tile] = SIDE;
    }
    FENCE;
    _tile_storeconfig(theirs);
    _tile_loadconfig(&ours);
}

static inline void give_tiles_back(const tile_config *theirs) {
    FENCE;
    if (theirs->palette)
        _tile_loadconfig(theirs);
    else
        _tile_release();
}

#endif

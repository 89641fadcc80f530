/* Vectors of SIDE floats, and products of FOUR left tiles with right tiles (see tiles.h) on each path.
 *
 * Each number of a product takes the same steps in the same order wherever it lies in a tile.
 */
#pragma once
#include "tiles.h"

#define FOUR 4
#define QUAD (FOUR * SIDE) /* rows of four tiles */

typedef float floats __attribute__((vector_size(SIDE * sizeof(float))));
typedef int32_t ints __attribute__((vector_size(SIDE * sizeof(int32_t))));

static inline floats same(float x) { return x - (floats){0}; }

static inline floats choose(ints mask, floats yes, floats no) {
    return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
}

static inline floats larger(floats a, floats b) { /* b where either is NaN */
#ifdef HAS_AVX512
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

/* 2^x for x <= 0, relative error below 3e-7: 2^n by the exponent bits, 2^f on [-0.5, 0.5] by a polynomial. */
static inline floats exp2_lanes(floats x) {
    x = larger(same(-126.0f), x);
    floats shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f); /* 1.5 * 2^23: rounds to whole numbers */
    floats p = 1.0f + f * (0.693147181f + f * (0.240226507f + f * (0.0555041087f +
               f * (0.00961812911f + f * (0.00133335581f + f * 0.000154035304f)))));
#ifdef HAS_AVX512
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)(shifted - 12582912.0f));
#else
    return p * (floats)(((ints)shifted - 0x4b400000 + 127) << 23);
#endif
}

/* ---- sums[FOUR][SIDE][SIDE] (+)= FOUR left factors x one right factor, of `steps` tiles each ----
 *
 * Rows of a left factor are `row_step` bf16 apart, its tiles `tile_step`; right tiles are packed, side by side.
 */

static void product_plain(const bf16 *const left[FOUR], int64_t row_step, int64_t tile_step, const bf16 *right,
                          int64_t steps, floats *sums, int adds) {
    for (int row = 0; row < QUAD; row += FOUR) {
        const bf16 *at = left[row / SIDE] + row % SIDE * row_step;
        floats acc[FOUR] = {{0}};
        if (adds) memcpy(acc, sums + row, sizeof acc);
        for (int64_t k = 0; k < steps; k++)
            for (int p = 0; p < SIDE; p++) {
                ints pairs;
                memcpy(&pairs, right + k * TILE + p * STEP, sizeof pairs);
                floats even = (floats)(pairs << 16), odd = (floats)(pairs & ~0xffff);
                UNROLL for (int m = 0; m < FOUR; m++) {
                    const bf16 *pair = at + m * row_step + k * tile_step + 2 * p;
                    acc[m] += even * widen(pair[0]);
                    acc[m] += odd * widen(pair[1]);
                }
            }
        memcpy(sums + row, acc, sizeof acc);
    }
}

#ifdef HAS_AVX512

static void product_avx512(const bf16 *const left[FOUR], int64_t row_step, int64_t tile_step, const bf16 *right,
                           int64_t steps, floats *sums, int adds) {
    for (int tile = 0; tile < FOUR; tile++, sums += SIDE) {
        __m512 acc[SIDE];
        UNROLL for (int m = 0; m < SIDE; m++) acc[m] = adds ? (__m512)sums[m] : _mm512_setzero_ps();
        for (int64_t k = 0; k < steps; k++)
            for (int p = 0; p < SIDE; p++) {
                const bf16 *pairs = left[tile] + k * tile_step + 2 * p;
                __m512bh other = (__m512bh)_mm512_load_si512(right + k * TILE + p * STEP);
                UNROLL for (int m = 0; m < SIDE; m++) {
                    int pair;
                    memcpy(&pair, pairs + m * row_step, sizeof pair);
                    acc[m] = _mm512_dpbf16_ps(acc[m], (__m512bh)_mm512_set1_epi32(pair), other);
                }
            }
        UNROLL for (int m = 0; m < SIDE; m++) sums[m] = (floats)acc[m];
    }
}

#endif
#ifdef HAS_AMX

static void product_amx(const bf16 *const left[FOUR], int64_t row_step, int64_t tile_step, const bf16 *right,
                        int64_t steps, floats *sums, int adds) {
    int64_t stride = row_step * sizeof(bf16);
    FENCE;
    if (adds) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + SIDE, 64);
        _tile_loadd(2, sums + 2 * SIDE, 64);
        _tile_loadd(3, sums + 3 * SIDE, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < steps; k++) {
        _tile_loadd(7, right + k * TILE, 64);
        _tile_loadd(4, left[0] + k * tile_step, stride);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, left[1] + k * tile_step, stride);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(6, left[2] + k * tile_step, stride);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(4, left[3] + k * tile_step, stride);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + SIDE, 64);
    _tile_stored(2, sums + 2 * SIDE, 64);
    _tile_stored(3, sums + 3 * SIDE, 64);
    FENCE;
}

#endif

static inline void product(int path, const bf16 *first, int64_t apart, int64_t row_step, int64_t tile_step,
                           const bf16 *right, int64_t steps, floats *sums, int adds) {
    (void)path;
    const bf16 *left[FOUR] = {first, first + apart, first + 2 * apart, first + 3 * apart};
#ifdef HAS_AMX
    if (path == AMX) return product_amx(left, row_step, tile_step, right, steps, sums, adds);
#endif
#ifdef HAS_AVX512
    if (path == AVX512) return product_avx512(left, row_step, tile_step, right, steps, sums, adds);
#endif
    product_plain(left, row_step, tile_step, right, steps, sums, adds);
}

/* A linear layer for few rows (2..64), where reading the weights once is what costs.
 *
 * bf16 in, float32 inside, bf16 out: out[m][o] = sum_i weight[o][i] * x[m][i] (+ bias[o]), M rows of x, O of weight, I
 * columns. Weights are read where they lie, in their own order; x is repacked once a call. Three paths, chosen when the
 * library is loaded: AMX tiles, AVX512-BF16, and plain C. On each of them the sum of one row takes the same steps in
 * the same order whatever M is and wherever the row lies: its result does not depend on its neighbours.
 */
#define _GNU_SOURCE
#if ABI != 4 /* see build.py */
#error "these kernels belong to another version of OVAL"
#endif
#include "tiles.h"

/* The best path that this process may take. */
int oval_linear_path(void) { return best_path(); }

/* The most rows for which a path was measured to be faster than torch; 0: not measured on such a processor. */
int oval_linear_limit(int path) {
    if (path == AMX) return 64;
    if (path == AVX512) return 16;
#ifdef __AVX2__
    return 32;
#else
    return 0;
#endif
}

/* ---- plain C: LANES sums side by side, two rows of weight against four rows of x ---- */

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define PAIR 2
#define FOUR 4
typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t words __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef bf16 halves __attribute__((vector_size(LANES * sizeof(bf16))));

static inline floats widen_lanes(const bf16 *at) {
    halves narrow_lanes;
    memcpy(&narrow_lanes, at, sizeof narrow_lanes);
    words bits;
    floats value;
#if defined(__clang__) || __GNUC__ >= 9
    bits = __builtin_convertvector(narrow_lanes, words) << 16;
#else
    for (int lane = 0; lane < LANES; lane++) bits[lane] = (uint32_t)narrow_lanes[lane] << 16;
#endif
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void add_lanes(const bf16 *const weight[PAIR], const float *x, int64_t padded, floats acc[PAIR][FOUR]) {
    floats other[FOUR];
    UNROLL for (int m = 0; m < FOUR; m++) memcpy(&other[m], x + m * padded, sizeof other[m]);
    UNROLL for (int r = 0; r < PAIR; r++) {
        floats lanes = widen_lanes(weight[r]);
        UNROLL for (int m = 0; m < FOUR; m++) acc[r][m] += lanes * other[m];
    }
}

static inline float sum_lanes(floats acc) {
    float lanes[LANES];
    memcpy(lanes, &acc, sizeof lanes);
    UNROLL for (int half = LANES / 2; half; half /= 2)
        UNROLL for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* Rows of weight against the four rows of `x`, which are `padded` floats each, zeros at the end. */
static void dot_plain(const bf16 *const weight[PAIR], const float *x, int64_t columns, int64_t padded,
                      float sums[PAIR][FOUR]) {
    floats acc[PAIR][FOUR] = {{{0}}};
    int64_t whole = columns / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        const bf16 *at[PAIR] = {weight[0] + i, weight[1] + i};
        add_lanes(at, x + i, padded, acc);
    }
    if (whole < columns) {
        bf16 tails[PAIR][LANES] = {{0}};
        const bf16 *at[PAIR] = {tails[0], tails[1]};
        UNROLL for (int r = 0; r < PAIR; r++)
            memcpy(tails[r], weight[r] + whole, (columns - whole) * sizeof(bf16));
        add_lanes(at, x + whole, padded, acc);
    }
    UNROLL for (int r = 0; r < PAIR; r++)
        UNROLL for (int m = 0; m < FOUR; m++) sums[r][m] = sum_lanes(acc[r][m]);
}

static int linear_plain(const bf16 *weight, const bf16 *x, const bf16 *bias, bf16 *out, int64_t rows, int64_t outputs,
                        int64_t columns, int threads) {
    int64_t padded = (columns + LANES - 1) / LANES * LANES, groups = (rows + FOUR - 1) / FOUR;
    float *wide = calloc(groups * FOUR * padded, sizeof(float));
    if (!wide) return 1;
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < columns; i++) wide[m * padded + i] = widen(x[m * columns + i]);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < outputs; first += PAIR) {
        const bf16 *lines[PAIR]; /* past the last row the last one again, for nothing */
        for (int r = 0; r < PAIR; r++)
            lines[r] = weight + (first + r < outputs ? first + r : outputs - 1) * columns;
        for (int64_t g = 0; g < groups; g++) {
            float sums[PAIR][FOUR];
            dot_plain(lines, wide + g * FOUR * padded, columns, padded, sums);
            for (int64_t o = first; o < outputs && o < first + PAIR; o++)
                for (int64_t m = g * FOUR; m < rows && m < (g + 1) * FOUR; m++)
                    out[m * outputs + o] = narrow(sums[o - first][m - g * FOUR] + (bias ? widen(bias[o]) : 0.0f));
        }
    }
    free(wide);
    return 0;
}

#ifdef HAS_AVX512

/* ---- AVX512-BF16: four rows of weight against four rows of x ---- */

static void dot_avx512(const bf16 *const weight[FOUR], const bf16 *x, int64_t columns, int64_t padded,
                       float sums[FOUR][FOUR]) {
    __m512 acc[FOUR][FOUR];
    const char *ahead = (const char *)(weight[0] + FOUR * columns);
    for (int r = 0; r < FOUR; r++)
        for (int m = 0; m < FOUR; m++) acc[r][m] = _mm512_setzero_ps();
    for (int64_t i = 0; i < padded; i += STEP) {
        __mmask32 mask = columns - i >= STEP ? 0xffffffffu : (1u << (columns - i)) - 1;
        __m512bh other[FOUR];
        for (int m = 0; m < FOUR; m++) other[m] = (__m512bh)_mm512_loadu_si512(x + m * padded + i);
        for (int line = 0; line < FOUR; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
        UNROLL for (int r = 0; r < FOUR; r++) {
            __m512bh lanes = (__m512bh)_mm512_maskz_loadu_epi16(mask, weight[r] + i);
            UNROLL for (int m = 0; m < FOUR; m++) acc[r][m] = _mm512_dpbf16_ps(acc[r][m], lanes, other[m]);
        }
    }
    for (int r = 0; r < FOUR; r++)
        for (int m = 0; m < FOUR; m++) sums[r][m] = _mm512_reduce_add_ps(acc[r][m]);
}

static int linear_avx512(const bf16 *weight, const bf16 *x, const bf16 *bias, bf16 *out, int64_t rows, int64_t outputs,
                         int64_t columns, int threads) {
    int64_t padded = (columns + STEP - 1) / STEP * STEP, groups = (rows + FOUR - 1) / FOUR;
    bf16 *packed = calloc(groups * FOUR * padded, sizeof(bf16));
    if (!packed) return 1;
    for (int64_t m = 0; m < rows; m++) memcpy(packed + m * padded, x + m * columns, columns * sizeof(bf16));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < outputs; first += FOUR) {
        const bf16 *lines[FOUR]; /* past the last row the last one again, for nothing */
        for (int r = 0; r < FOUR; r++)
            lines[r] = weight + (first + r < outputs ? first + r : outputs - 1) * columns;
        for (int64_t g = 0; g < groups; g++) {
            float sums[FOUR][FOUR];
            dot_avx512(lines, packed + g * FOUR * padded, columns, padded, sums);
            for (int64_t o = first; o < outputs && o < first + FOUR; o++)
                for (int64_t m = g * FOUR; m < rows && m < (g + 1) * FOUR; m++)
                    out[m * outputs + o] = narrow(sums[o - first][m - g * FOUR] + (bias ? widen(bias[o]) : 0.0f));
        }
    }
    free(packed);
    return 0;
}

#endif
#ifdef HAS_AMX

/* ---- AMX: a tile of 16 rows of weight x 32 columns against a tile of 32 columns x 16 rows of x ---- */

/* sums [16 outputs][16 rows of x] to out [M, O]. */
static void store_tile(const float *sums, const bf16 *bias, bf16 *out, int64_t rows, int64_t outputs, int64_t count) {
    __m512i lines[SIDE];
    __mmask16 mask = count >= SIDE ? 0xffff : (1u << count) - 1;
    __m512 shift = _mm512_setzero_ps();
    for (int o = 0; o < SIDE; o++) lines[o] = _mm512_load_si512(sums + o * SIDE);
    transpose(lines);
    if (bias)
        shift = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias)), 16));
    for (int64_t m = 0; m < SIDE && m < rows; m++) {
        __m256bh narrowed = _mm512_cvtneps_pbh(_mm512_add_ps(_mm512_castsi512_ps(lines[m]), shift));
        _mm256_mask_storeu_epi16(out + m * outputs, mask, (__m256i)narrowed);
    }
}

/* Rows [first, first + 32) of weight, of which those below `outputs` exist, against all rows of x, 32 at a time. */
static void linear_tiles(const bf16 *weight, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t rows,
                         int64_t outputs, int64_t columns, int64_t first) {
    int64_t steps = (columns + STEP - 1) / STEP, whole = columns / STEP, groups = (rows + SIDE - 1) / SIDE;
    int64_t stride = columns * sizeof(bf16), exist = outputs - first;
    const bf16 *upper = weight + first * columns, *lower = upper + SIDE * columns;
    _Alignas(64) bf16 edge[2][TILE];
    _Alignas(64) float sums[4][SIDE * SIDE];
    for (int64_t g = 0; g < groups; g += 2) {
        const bf16 *left = packed + g * steps * TILE, *right = g + 1 < groups ? left + steps * TILE : left;
        const char *ahead = (const char *)(upper + 2 * SIDE * columns);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < steps; k++, left += TILE, right += TILE) {
            if (k < whole && exist >= 2 * SIDE) {
                _tile_loadd(4, upper + k * STEP, stride);
                _tile_loadd(5, lower + k * STEP, stride);
            } else { /* nothing past the end of a row or of the weights may be read */
                for (int r = 0; r < 2 * SIDE; r++)
                    _mm512_store_si512(edge[0] + r * STEP, r < exist ? load_step(upper + r * columns, k * STEP, columns)
                                                                     : _mm512_setzero_si512());
                FENCE;
                _tile_loadd(4, edge[0], 64);
                _tile_loadd(5, edge[1], 64);
                FENCE;
            }
            if (g == 0) /* the 32 rows after these, in the order of memory, which is not that of the tiles */
                for (int line = 0; line < 2 * SIDE; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
            _tile_loadd(6, left, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (g + 1 < groups) {
                _tile_loadd(7, right, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        FENCE;
        for (int part = 0; part < 4; part++) {
            int64_t o = first + part % 2 * SIDE, m = (g + part / 2) * SIDE;
            if (o < outputs && m < rows)
                store_tile(sums[part], bias ? bias + o : bias, out + m * outputs + o, rows - m, outputs, outputs - o);
        }
    }
}

static int linear_amx(const bf16 *weight, const bf16 *x, const bf16 *bias, bf16 *out, int64_t rows, int64_t outputs,
                      int64_t columns, int threads) {
    int64_t steps = (columns + STEP - 1) / STEP, groups = (rows + SIDE - 1) / SIDE;
    bf16 *packed = aligned_alloc(64, groups * steps * TILE * sizeof(bf16));
    if (!packed) return 1;
    pack(x, packed, rows, columns, columns);
#pragma omp parallel num_threads(threads)
    {
        _Alignas(64) tile_config theirs;
        take_tiles(&theirs);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outputs; first += 2 * SIDE)
            linear_tiles(weight, packed, bias, out, rows, outputs, columns, first);
        give_tiles_back(&theirs);
    }
    free(packed);
    return 0;
}

#endif

/* weight: [O, I], x: [M, I], bias: [O] or NULL, out: [M, O]. `path` is oval_linear_path()'s answer or a lower one.
 * Returns 0, 1 if there is no memory, or 2 if the library lacks the path.
 */
int oval_linear(const bf16 *weight, const bf16 *x, const bf16 *bias, bf16 *out, int64_t rows, int64_t outputs,
                int64_t columns, int path, int threads) {
    switch (path) {
    case PLAIN:
        return linear_plain(weight, x, bias, out, rows, outputs, columns, threads);
#ifdef HAS_AVX512
    case AVX512:
        return linear_avx512(weight, x, bias, out, rows, outputs, columns, threads);
#endif
#ifdef HAS_AMX
    case AMX:
        return linear_amx(weight, x, bias, out, rows, outputs, columns, threads);
#endif
    }
    return 2;
}

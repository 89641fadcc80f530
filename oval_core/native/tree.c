/* Attention of a few new tokens of one row (1..64): over all older keys, and among themselves by a mask.
 *
 * bf16 in, float32 inside, bf16 out. Shapes: K KV heads, G query heads a KV head, N new tokens, R = G * N queries of a KV
 * head, D head dim (HEAD_DIM), L keys. Keys and values are read once a KV head, where they lie in the pool, for all of
 * its queries, SIDE of them at a time: a query is a lane, and what is done to a lane does not depend on the others.
 * Older keys are cut into parts by their number alone, and weights of unseen keys are zeros that change no sum: a
 * query's result has the same bits whatever else is in the call and however many threads there are.
 */
#define _GNU_SOURCE
#if ABI != 4 /* see build.py */
#error "these kernels belong to another version of OVAL"
#endif
#include <float.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "products.h"
#include "tiles.h"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define KEY_WIDTH ((HEAD_DIM + STEP - 1) / STEP * STEP)     /* of a key in tiles */
#define OUT_WIDTH ((HEAD_DIM + QUAD - 1) / QUAD * QUAD)     /* of a value in tiles */
#define BLOCK 256                                           /* keys whose scores are held at a time */
#define PART 512                                            /* least keys of a part */
#define MOST_PARTS 16
#define MOST_NEW QUAD
#define LEAST (-FLT_MAX)
#define STRIP 8 /* sums that are kept in registers */

typedef struct {
    floats top;             /* largest score so far, times log2(e) */
    floats sum;             /* sum of weights, which are 2^(score - top) */
    floats acc[OUT_WIDTH];  /* sum of weight * value */
} part_state;

typedef struct { /* of one thread */
    _Alignas(64) bf16 keys[BLOCK * KEY_WIDTH];                     /* copies of those that no tile can read in place */
    _Alignas(64) union {
        bf16 tiles[OUT_WIDTH / SIDE][BLOCK / STEP][TILE];          /* [dims][keys]: left factors */
        float wide[MOST_NEW][OUT_WIDTH];
    } values;
    _Alignas(64) bf16 weights[BLOCK / STEP * TILE];                /* [key pairs][queries][2]: right factors */
    floats scores[BLOCK];
} workspace;

typedef struct {
    const bf16 *keys, *values; /* pool, heads `head_step` apart */
    int64_t head_step;
    const int64_t *slots;      /* [L], the new tokens' last */
    int64_t past, num_new, kv_heads, group, tiles, parts, part_size;
    const bf16 *queries;       /* [K][tiles][KEY_WIDTH / STEP] right tiles */
    const ints *seen;          /* [tiles][N]: by new key, -1 in the lanes of queries that see it */
    const int64_t *num_seen;   /* [tiles]: new keys up to the last one that a query of the tile sees */
    float factor;
    int path;
} call_plan;

/* ---- keys and values of a block ---- */

/* Copies keys from `place` on, which no tile can read in the pool, and zeros up to whole tiles; returns `place`. */
static int lay_keys(const bf16 *keys, const int64_t *slots, int count, workspace *work) {
    int place = HEAD_DIM == KEY_WIDTH ? count / QUAD * QUAD : 0, scattered = 0;
    for (int j = 1; j < count; j++) scattered |= slots[j] != slots[0] + j;
    if (scattered) place = 0;
    for (int j = place; j < (count + QUAD - 1) / QUAD * QUAD; j++) {
        bf16 *at = work->keys + j * KEY_WIDTH;
        if (j < count) memcpy(at, keys + slots[j] * HEAD_DIM, HEAD_DIM * sizeof(bf16));
        memset(at + (j < count ? HEAD_DIM : 0), 0, (KEY_WIDTH - (j < count ? HEAD_DIM : 0)) * sizeof(bf16));
    }
    return place;
}

/* Values [keys][dims] to tiles [dims][keys], zeros where there is no key or dim. */
static void lay_values(const bf16 *values, const int64_t *slots, int count, workspace *work) {
#ifdef HAS_AVX512
    static const int16_t low[STEP] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i to_low = _mm512_loadu_si512(low), to_high = _mm512_add_epi16(to_low, _mm512_set1_epi16(16));
    for (int step = 0; step * STEP < count; step++)
        for (int d = 0; d < OUT_WIDTH; d += STEP) {
            __m512i lower[SIDE], upper[SIDE];
            for (int p = 0; p < SIDE; p++) {
                int j = step * STEP + 2 * p;
                __m512i even = j < count ? load_step(values + slots[j] * HEAD_DIM, d, HEAD_DIM) : _mm512_setzero_si512();
                __m512i odd = j + 1 < count ? load_step(values + slots[j + 1] * HEAD_DIM, d, HEAD_DIM)
                                            : _mm512_setzero_si512();
                lower[p] = _mm512_permutex2var_epi16(even, to_low, odd);
                upper[p] = _mm512_permutex2var_epi16(even, to_high, odd);
            }
            transpose(lower);
            transpose(upper);
            for (int row = 0; row < SIDE; row++) {
                _mm512_store_si512(work->values.tiles[d / SIDE][step] + row * STEP, lower[row]);
                _mm512_store_si512(work->values.tiles[d / SIDE + 1][step] + row * STEP, upper[row]);
            }
        }
#else
    for (int j = 0; j < (count + STEP - 1) / STEP * STEP; j++)
        for (int d = 0; d < OUT_WIDTH; d++)
            work->values.tiles[d / SIDE][j / STEP][d % SIDE * STEP + j % STEP] =
                j < count && d < HEAD_DIM ? values[slots[j] * HEAD_DIM + d] : 0;
#endif
}

static void score(const call_plan *plan, const bf16 *keys, const int64_t *slots, int count, int place,
                  const bf16 *queries, workspace *work) {
    for (int j = 0; j < count; j += QUAD) {
        const bf16 *at = j < place ? keys + (slots[0] + j) * HEAD_DIM : work->keys + j * KEY_WIDTH;
        product(plan->path, at, SIDE * KEY_WIDTH, KEY_WIDTH, STEP, queries, KEY_WIDTH / STEP, work->scores + j, 0);
    }
}

/* ---- softmax ---- */

/* Scores of older keys to weights, in pairs of keys; the state's sum and largest score; returns what sums shrink to. */
static floats weigh(float factor, int count, part_state *state, workspace *work) {
    floats *scores = work->scores, tops[FOUR], sums[FOUR] = {{0}};
    for (int i = 0; i < FOUR; i++) tops[i] = state->top;
    for (int j = count; j % FOUR; j++) scores[j] = same(LEAST); /* 2^-126 changes no sum */
    for (int j = 0; j < count; j += FOUR)
        UNROLL for (int i = 0; i < FOUR; i++) tops[i] = larger(scores[j + i] * factor, tops[i]);
    floats top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
    for (int j = 0; j < count; j += FOUR) {
        UNROLL for (int i = 0; i < FOUR; i++) {
            floats weight = exp2_lanes(scores[j + i] * factor - top);
            sums[i] += weight;
            scores[j + i] = weight;
        }
        UNROLL for (int i = 0; i < FOUR; i += 2) { /* to bf16; weights are not negative */
            ints pair = (ints)(((ints)scores[j + i] + 0x8000) >> 16 & 0xffff) | (((ints)scores[j + i + 1] + 0x8000) & ~0xffff);
            memcpy(work->weights + (j + i) * SIDE, &pair, sizeof pair);
        }
    }
    int done = (count + FOUR - 1) / FOUR * FOUR, padded = (count + STEP - 1) / STEP * STEP;
    memset(work->weights + done * SIDE, 0, (padded - done) * SIDE * sizeof(bf16));
    floats keep = exp2_lanes(state->top - top);
    state->sum = state->sum * keep + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    state->top = top;
    return keep;
}

/* Older keys [first, last) of a KV head: the states of all its tiles of queries. */
static void attend_past(const call_plan *plan, int64_t head, int64_t first, int64_t last, part_state *states,
                        workspace *work) {
    const bf16 *keys = plan->keys + head * plan->head_step, *values = plan->values + head * plan->head_step;
    for (int64_t tile = 0; tile < plan->tiles; tile++) {
        states[tile].top = same(LEAST);
        states[tile].sum = same(0.0f);
    }
    for (int64_t start = first; start < last; start += BLOCK) {
        const int64_t *slots = plan->slots + start;
        int count = last - start < BLOCK ? (int)(last - start) : BLOCK, place;
        place = lay_keys(keys, slots, count, work);
        lay_values(values, slots, count, work);
        for (int64_t tile = 0; tile < plan->tiles; tile++) {
            part_state *state = states + tile;
            score(plan, keys, slots, count, place,
                  plan->queries + (head * plan->tiles + tile) * SIDE * KEY_WIDTH, work);
            floats keep = weigh(plan->factor, count, state, work);
            if (start > first)
                for (int d = 0; d < OUT_WIDTH; d++) state->acc[d] *= keep;
            for (int d = 0; d < OUT_WIDTH; d += QUAD)
                product(plan->path, work->values.tiles[d / SIDE][0], BLOCK / STEP * TILE, STEP, TILE, work->weights,
                        (count + STEP - 1) / STEP, state->acc + d, start > first);
        }
    }
}

/* The new keys, in their order and one at a time: a query that does not see one of them adds zeros. */
static void attend_new(const call_plan *plan, int64_t head, part_state *states, workspace *work) {
    const bf16 *keys = plan->keys + head * plan->head_step, *values = plan->values + head * plan->head_step;
    const int64_t *slots = plan->slots + plan->past;
    int count = (int)plan->num_new, place = lay_keys(keys, slots, count, work);
    for (int j = 0; j < count; j++)
        for (int d = 0; d < OUT_WIDTH; d++)
            work->values.wide[j][d] = d < HEAD_DIM ? widen(values[slots[j] * HEAD_DIM + d]) : 0.0f;
    for (int64_t tile = 0; tile < plan->tiles; tile++) {
        const ints *seen = plan->seen + tile * count;
        part_state *state = states + tile;
        floats *scores = work->scores, top = same(LEAST), sum = {0};
        int64_t num_seen = plan->num_seen[tile];
        score(plan, keys, slots, count, place, plan->queries + (head * plan->tiles + tile) * SIDE * KEY_WIDTH, work);
        for (int64_t j = 0; j < num_seen; j++)
            top = larger(choose(seen[j], scores[j] * plan->factor, same(LEAST)), top);
        for (int64_t j = 0; j < num_seen; j++) {
            scores[j] = (floats)((ints)exp2_lanes(scores[j] * plan->factor - top) & seen[j]);
            sum += scores[j];
        }
        state->top = top;
        state->sum = sum;
        for (int d = 0; d < OUT_WIDTH; d += STRIP) {
            floats acc[STRIP] = {{0}};
            for (int64_t j = 0; j < num_seen; j++)
                UNROLL for (int i = 0; i < STRIP; i++) acc[i] += scores[j] * work->values.wide[j][d + i];
            memcpy(state->acc + d, acc, sizeof acc);
        }
    }
}

/* ---- output ---- */

/* acc: [dims][lanes] of the queries from `first` on, to out [N, K * G, D]. */
static void store(const call_plan *plan, int64_t head, int64_t first, const floats *acc, bf16 *out) {
    int64_t rows = plan->group * plan->num_new - first;
    for (int d = 0; d < HEAD_DIM; d += SIDE) {
#ifdef HAS_AVX512
        __m512i lines[SIDE];
        __mmask16 mask = HEAD_DIM - d >= SIDE ? 0xffff : (1u << (HEAD_DIM - d)) - 1;
        for (int i = 0; i < SIDE; i++) lines[i] = (__m512i)acc[d + i];
        transpose(lines);
#endif
        for (int lane = 0; lane < SIDE && lane < rows; lane++) {
            int64_t g = (first + lane) / plan->num_new, n = (first + lane) % plan->num_new;
            bf16 *at = out + ((n * plan->kv_heads + head) * plan->group + g) * HEAD_DIM + d;
#ifdef HAS_AVX512
            _mm256_mask_storeu_epi16(at, mask, (__m256i)_mm512_cvtneps_pbh((__m512)lines[lane]));
#else
            for (int i = 0; i < SIDE && d + i < HEAD_DIM; i++) at[i] = narrow(acc[d + i][lane]);
#endif
        }
    }
}

/* Merges the parts of one tile of queries, the new keys last; zeros where a query sees nothing. */
static void merge(const call_plan *plan, int64_t head, int64_t tile, const part_state *states, bf16 *out) {
    floats top = same(LEAST), sum = {0}, acc[OUT_WIDTH] = {{0}};
    int64_t parts = plan->parts + 1;
    states += head * parts * plan->tiles + tile;
    for (int64_t part = 0; part < parts; part++) top = larger(states[part * plan->tiles].top, top);
    for (int64_t part = 0; part < parts; part++) {
        const part_state *state = states + part * plan->tiles;
        floats weight = exp2_lanes(state->top - top);
        sum += weight * state->sum;
        for (int d = 0; d < OUT_WIDTH; d++) acc[d] += weight * state->acc[d];
    }
    floats scale = 1.0f / choose(sum == 0.0f, same(1.0f), sum);
    for (int d = 0; d < OUT_WIDTH; d++) acc[d] *= scale;
    store(plan, head, tile * SIDE, acc, out);
}

/* ---- the call ---- */

static void run(const call_plan *plan, part_state *states, workspace *works, bf16 *out, int threads) {
    int64_t tasks = plan->kv_heads * (plan->parts + 1);
    (void)threads;
#pragma omp parallel num_threads(threads)
    {
#ifdef _OPENMP
        workspace *work = works + omp_get_thread_num();
#else
        workspace *work = works;
#endif
#ifdef HAS_AMX
        _Alignas(64) tile_config theirs;
        if (plan->path == AMX) take_tiles(&theirs);
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            int64_t head = task % plan->kv_heads, part = task / plan->kv_heads;
            int64_t first = part * plan->part_size, last = first + plan->part_size;
            part_state *own = states + (head * (plan->parts + 1) + part) * plan->tiles;
            if (part == plan->parts)
                attend_new(plan, head, own, work);
            else
                attend_past(plan, head, first, last < plan->past ? last : plan->past, own, work);
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < plan->kv_heads * plan->tiles; task++)
            merge(plan, task / plan->tiles, task % plan->tiles, states, out);
#ifdef HAS_AMX
        if (plan->path == AMX) give_tiles_back(&theirs);
#endif
    }
}

/* Right tiles of every KV head's queries; which lanes see which new keys. rows: room for R * D. */
static void lay_queries(const call_plan *plan, const bf16 *query, int64_t head_step, int64_t token_step, bf16 *rows,
                        bf16 *packed) {
    int64_t count = plan->num_new, group = plan->group;
    for (int64_t head = 0; head < plan->kv_heads; head++) {
        for (int64_t r = 0; r < group * count; r++)
            memcpy(rows + r * HEAD_DIM, query + (head * group + r / count) * head_step + r % count * token_step,
                   HEAD_DIM * sizeof(bf16));
        pack(rows, packed + head * plan->tiles * SIDE * KEY_WIDTH, group * count, HEAD_DIM, HEAD_DIM);
    }
}

static void lay_mask(const call_plan *plan, const uint8_t *mask, ints *seen, int64_t *num_seen) {
    int64_t count = plan->num_new;
    for (int64_t tile = 0; tile < plan->tiles; tile++) {
        num_seen[tile] = 0;
        for (int64_t j = 0; j < count; j++, seen++) {
            int32_t lanes[SIDE];
            int any = 0;
            for (int lane = 0; lane < SIDE; lane++) {
                int64_t n = (tile * SIDE + lane) % count; /* queries that do not exist see what others see */
                int sees = mask ? mask[n * count + j] != 0 : j <= n;
                lanes[lane] = -sees;
                any |= sees;
            }
            memcpy(seen, lanes, sizeof lanes);
            if (any) num_seen[tile] = j + 1;
        }
    }
}

static int64_t lay_slots(const int64_t *segments, int64_t num_segments, int64_t *slots) {
    int64_t total = 0;
    for (int64_t s = 0; s < num_segments; s++) {
        int64_t start = segments[3 * s], count = segments[3 * s + 1];
        const int64_t *listed = (const int64_t *)(intptr_t)segments[3 * s + 2];
        for (int64_t j = 0; slots && j < count; j++) slots[total + j] = listed ? listed[j] : start + j;
        total += count;
    }
    return total;
}

static inline int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* query: [K * G, N, D], heads and tokens any steps apart; keys, values: pool [K, S, D]; out: [N, K * G, D].
 * segments: [num_segments][3] where the row's keys lie, the N new ones last: first slot, number, and the address of a
 * list of slots or 0 where they lie side by side. mask: [N, N] or NULL for causal. `path` is oval_tree_path()'s answer
 * or a lower one. Returns 0, or 1 if there is no memory.
 */
int oval_tree(const bf16 *query, const bf16 *keys, const bf16 *values, bf16 *out, const int64_t *segments,
              const uint8_t *mask, int64_t num_segments, int64_t num_new, int64_t kv_heads, int64_t group,
              int64_t head_step, int64_t query_head_step, int64_t query_token_step, float scaling, int path,
              int threads) {
    int64_t length = lay_slots(segments, num_segments, NULL), past = length - num_new;
    int64_t tiles = (group * num_new + SIDE - 1) / SIDE, parts = (past + PART - 1) / PART;
    if (parts > MOST_PARTS) parts = MOST_PARTS;
    int64_t part_size = parts ? ((past + parts - 1) / parts + BLOCK - 1) / BLOCK * BLOCK : BLOCK;
    parts = (past + part_size - 1) / part_size;
    int64_t bytes[] = {lines(length * sizeof(int64_t)), lines(kv_heads * tiles * SIDE * KEY_WIDTH * sizeof(bf16)),
                       lines(group * num_new * HEAD_DIM * sizeof(bf16)), lines(tiles * num_new * sizeof(ints)),
                       lines(tiles * sizeof(int64_t)), lines(kv_heads * (parts + 1) * tiles * sizeof(part_state)),
                       lines(threads * sizeof(workspace))};
    int64_t total = 0, from[7];
    for (int i = 0; i < 7; total += bytes[i++]) from[i] = total;
    char *memory = aligned_alloc(64, total);
    if (!memory) return 1;
    int64_t *slots = (int64_t *)(memory + from[0]), *num_seen = (int64_t *)(memory + from[4]);
    bf16 *packed = (bf16 *)(memory + from[1]);
    ints *seen = (ints *)(memory + from[3]);
    call_plan plan = {keys, values, head_step, slots, past, num_new, kv_heads, group, tiles, parts, part_size,
                      packed, seen, num_seen, scaling * 1.44269504f, path};
    lay_slots(segments, num_segments, slots);
    lay_queries(&plan, query, query_head_step, query_token_step, (bf16 *)(memory + from[2]), packed);
    lay_mask(&plan, mask, seen, num_seen);
    run(&plan, (part_state *)(memory + from[5]), (workspace *)(memory + from[6]), out, threads);
    free(memory);
    return 0;
}

int oval_tree_path(void) { return best_path(); }

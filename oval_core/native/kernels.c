/* Decode kernels for CPUs, compiled for the machine and the model's head shape (see build.py).
 *
 * bf16 in, float32 inside, bf16 out. Shapes: B rows, K KV heads, G query heads a KV head (GROUP), D head dim
 * (HEAD_DIM), L keys. Keys and values are read once, where they lie in the pool.
 */
#if ABI != 4 /* see build.py */
#error "these kernels belong to another version of OVAL"
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef GROUP
#define GROUP 1
#endif
#define BLOCK 64 /* keys whose scores are held at a time */

typedef uint16_t bf16;

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

/* e^x for x <= 0, relative error below 3e-7: 2^n by the exponent bits, 2^f on [-0.5, 0.5] by a polynomial. */
static inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float scaled = x * 1.44269504f;
    float whole = __builtin_rintf(scaled);
    float f = (scaled - whole) * 0.693147181f;
    float p = 1.0f + f * (1.0f + f * (0.5f + f * (0.166666667f +
              f * (0.0416666667f + f * (0.00833333333f + f * 0.00138888889f)))));
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

typedef struct {
    float top[GROUP];             /* largest score so far */
    float sum[GROUP];             /* sum of exp(score - top) */
    float acc[GROUP][HEAD_DIM];   /* sum of exp(score - top) * value */
} part_state;

/* Attention of the GROUP queries of one KV head over keys [0, length), `step` elements apart, by online softmax. */
static void attend_part(const float query[GROUP][HEAD_DIM], const bf16 *keys, const bf16 *values, int64_t step,
                        int64_t length, part_state *state) {
    float scores[GROUP][BLOCK];
    for (int g = 0; g < GROUP; g++) {
        state->top[g] = -INFINITY;
        state->sum[g] = 0.0f;
        for (int d = 0; d < HEAD_DIM; d++) state->acc[g][d] = 0.0f;
    }
    for (int64_t start = 0; start < length; start += BLOCK) {
        int count = length - start < BLOCK ? (int)(length - start) : BLOCK;
        for (int j = 0; j < count; j++) {
            const bf16 *key = keys + (start + j) * step;
            float wide[HEAD_DIM];
            for (int d = 0; d < HEAD_DIM; d++) wide[d] = widen(key[d]);
            for (int g = 0; g < GROUP; g++) {
                float dot = 0.0f;
                for (int d = 0; d < HEAD_DIM; d++) dot += query[g][d] * wide[d];
                scores[g][j] = dot;
            }
        }
        for (int g = 0; g < GROUP; g++) {
            float top = state->top[g];
            for (int j = 0; j < count; j++) top = scores[g][j] > top ? scores[g][j] : top;
            float keep = exp_negative(state->top[g] - top);
            float sum = 0.0f;
            for (int j = 0; j < count; j++) {
                scores[g][j] = exp_negative(scores[g][j] - top);
                sum += scores[g][j];
            }
            state->sum[g] = state->sum[g] * keep + sum;
            state->top[g] = top;
            for (int d = 0; d < HEAD_DIM; d++) state->acc[g][d] *= keep;
        }
        for (int j = 0; j < count; j++) {
            const bf16 *value = values + (start + j) * step;
            float wide[HEAD_DIM];
            for (int d = 0; d < HEAD_DIM; d++) wide[d] = widen(value[d]);
            for (int g = 0; g < GROUP; g++) {
                float weight = scores[g][j];
                for (int d = 0; d < HEAD_DIM; d++) state->acc[g][d] += weight * wide[d];
            }
        }
    }
}

/* One query a row over keys that lie in the same way in every row; see oval_decode for the arguments. */
static part_state *attend(const bf16 *query, const bf16 *keys, const bf16 *values, int64_t batch, int64_t kv_heads,
                          int64_t length, int64_t row_stride, int64_t head_stride, int64_t step, float scaling,
                          int64_t parts, int threads) {
    int64_t heads = batch * kv_heads;
    part_state *states = malloc(heads * parts * sizeof(part_state));
    if (!states) return NULL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < heads * parts; task++) {
        int64_t head = task / parts, part = task % parts;
        int64_t first = length * part / parts, last = length * (part + 1) / parts;
        int64_t offset = head / kv_heads * row_stride + head % kv_heads * head_stride + first * step;
        float wide[GROUP][HEAD_DIM];
        for (int g = 0; g < GROUP; g++)
            for (int d = 0; d < HEAD_DIM; d++)
                wide[g][d] = widen(query[(head * GROUP + g) * HEAD_DIM + d]) * scaling;
        attend_part(wide, keys + offset, values + offset, step, last - first, &states[task]);
    }
    return states;
}

/* Merges the parts of one head: the output of query g to `out`; returns its log-sum-exp. */
static float merge_parts(const part_state *states, int64_t parts, int g, float out[HEAD_DIM]) {
    float top = -INFINITY, sum = 0.0f;
    for (int d = 0; d < HEAD_DIM; d++) out[d] = 0.0f;
    for (int64_t part = 0; part < parts; part++) top = states[part].top[g] > top ? states[part].top[g] : top;
    for (int64_t part = 0; part < parts; part++) {
        float weight = exp_negative(states[part].top[g] - top);
        sum += weight * states[part].sum[g];
        for (int d = 0; d < HEAD_DIM; d++) out[d] += weight * states[part].acc[g][d];
    }
    for (int d = 0; d < HEAD_DIM; d++) out[d] /= sum;
    return top + logf(sum);
}

/* One query a row. query, out: [B, K, G, D]. Row b of keys and values starts `row_stride` elements after row
 * b - 1, head k `head_stride` after head k - 1; keys lie side by side. Returns 0, or 1 if there is no memory.
 */
int oval_decode(const bf16 *query, const bf16 *keys, const bf16 *values, bf16 *out, int64_t batch, int64_t kv_heads,
                int64_t length, int64_t row_stride, int64_t head_stride, float scaling, int64_t parts, int threads) {
    part_state *states = attend(query, keys, values, batch, kv_heads, length, row_stride, head_stride, HEAD_DIM,
                                scaling, parts, threads);
    if (!states) return 1;
    for (int64_t head = 0; head < batch * kv_heads; head++)
        for (int g = 0; g < GROUP; g++) {
            float wide[HEAD_DIM];
            merge_parts(states + head * parts, parts, g, wide);
            for (int d = 0; d < HEAD_DIM; d++) out[(head * GROUP + g) * HEAD_DIM + d] = narrow(wide[d]);
        }
    free(states);
    return 0;
}

/* One row over some of its keys, `step` elements apart. query: [K, G, D]; out: [K, G, D] and lse: [K, G], float32. */
int oval_decode_part(const bf16 *query, const bf16 *keys, const bf16 *values, float *out, float *lse,
                     int64_t kv_heads, int64_t length, int64_t head_stride, int64_t step, float scaling,
                     int64_t parts, int threads) {
    part_state *states = attend(query, keys, values, 1, kv_heads, length, 0, head_stride, step, scaling, parts,
                                threads);
    if (!states) return 1;
    for (int64_t head = 0; head < kv_heads; head++)
        for (int g = 0; g < GROUP; g++) {
            int64_t at = head * GROUP + g;
            lse[at] = merge_parts(states + head * parts, parts, g, out + at * HEAD_DIM);
        }
    free(states);
    return 0;
}

/* Adds `count` keys that lie side by side to a part; page_lse[g] is what they got: log of the sum of exp(score). */
static void attend_page(const float query[GROUP][HEAD_DIM], const bf16 *keys, const bf16 *values, int count,
                        part_state *state, float page_lse[GROUP]) {
    float scores[GROUP][BLOCK], scale[GROUP];
    for (int j = 0; j < count; j++) {
        float wide[HEAD_DIM];
        for (int d = 0; d < HEAD_DIM; d++) wide[d] = widen(keys[j * HEAD_DIM + d]);
        for (int g = 0; g < GROUP; g++) {
            float dot = 0.0f;
            for (int d = 0; d < HEAD_DIM; d++) dot += query[g][d] * wide[d];
            scores[g][j] = dot;
        }
    }
    for (int g = 0; g < GROUP; g++) {
        float top = scores[g][0], sum = 0.0f;
        for (int j = 1; j < count; j++) top = scores[g][j] > top ? scores[g][j] : top;
        for (int j = 0; j < count; j++) {
            scores[g][j] = exp_negative(scores[g][j] - top);
            sum += scores[g][j];
        }
        page_lse[g] = top + logf(sum);
        float highest = state->top[g] > top ? state->top[g] : top;
        float keep = exp_negative(state->top[g] - highest);
        scale[g] = exp_negative(top - highest);
        state->sum[g] = state->sum[g] * keep + sum * scale[g];
        state->top[g] = highest;
        for (int d = 0; d < HEAD_DIM; d++) state->acc[g][d] *= keep;
    }
    for (int j = 0; j < count; j++) {
        float wide[HEAD_DIM];
        for (int d = 0; d < HEAD_DIM; d++) wide[d] = widen(values[j * HEAD_DIM + d]);
        for (int g = 0; g < GROUP; g++) {
            float weight = scores[g][j] * scale[g];
            for (int d = 0; d < HEAD_DIM; d++) state->acc[g][d] += weight * wide[d];
        }
    }
}

/* One row over some pages, read where they lie, and what each of them gets. query: [K, G, D]; out: [K, G, D], lse:
 * [K, G] and page_lse: [K, G, P], float32. Page p is slots [starts[p], starts[p] + counts[p]), 1..BLOCK of them.
 */
int oval_decode_pages(const bf16 *query, const bf16 *keys, const bf16 *values, float *out, float *lse, float *page_lse,
                      const int64_t *starts, const int64_t *counts, int64_t pages, int64_t kv_heads,
                      int64_t head_stride, float scaling, int64_t parts, int threads) {
    part_state *states = malloc(kv_heads * parts * sizeof(part_state));
    if (!states) return 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < kv_heads * parts; task++) {
        int64_t head = task / parts, part = task % parts;
        part_state *state = &states[task];
        float wide[GROUP][HEAD_DIM], got[GROUP];
        for (int g = 0; g < GROUP; g++) {
            state->top[g] = -INFINITY;
            state->sum[g] = 0.0f;
            for (int d = 0; d < HEAD_DIM; d++) {
                state->acc[g][d] = 0.0f;
                wide[g][d] = widen(query[(head * GROUP + g) * HEAD_DIM + d]) * scaling;
            }
        }
        for (int64_t p = pages * part / parts; p < pages * (part + 1) / parts; p++) {
            int64_t offset = head * head_stride + starts[p] * HEAD_DIM;
            attend_page(wide, keys + offset, values + offset, (int)counts[p], state, got);
            for (int g = 0; g < GROUP; g++) page_lse[(head * GROUP + g) * pages + p] = got[g];
        }
    }
    for (int64_t head = 0; head < kv_heads; head++)
        for (int g = 0; g < GROUP; g++) {
            int64_t at = head * GROUP + g;
            lse[at] = merge_parts(states + head * parts, parts, g, out + at * HEAD_DIM);
        }
    free(states);
    return 0;
}

/* Scores of one query a head against page sketches: log of the sum of exp(score) that a page has by its sketch, which is
 * mean, RANK directions, each of at most `most` tokens' places along them, noise variance and number of tokens (see
 * routing/key_signals.py). query: [heads, G, D]; out: [heads, G, P]; sketches of a head lie `width` apart, heads
 * `head_stride`.
 */
#define RANK 2
void oval_sketch(const bf16 *query, const bf16 *sketches, float *out, int64_t heads, int64_t pages,
                 int64_t head_stride, int64_t width, int64_t most, float scaling, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t head = 0; head < heads; head++) {
        float wide[GROUP][HEAD_DIM], energy[GROUP];
        for (int g = 0; g < GROUP; g++) {
            energy[g] = 0.0f;
            for (int d = 0; d < HEAD_DIM; d++) {
                wide[g][d] = widen(query[(head * GROUP + g) * HEAD_DIM + d]) * scaling;
                energy[g] += wide[g][d] * wide[g][d];
            }
        }
        for (int64_t page = 0; page < pages; page++) {
            const bf16 *axes = sketches + head * head_stride + page * width;
            const bf16 *places = axes + (1 + RANK) * HEAD_DIM;
            float noise = widen(places[RANK * most]), direction[1 + RANK][HEAD_DIM], at[RANK][BLOCK];
            int count = (int)widen(places[RANK * most + 1]);
            for (int a = 0; a <= RANK; a++)
                for (int d = 0; d < HEAD_DIM; d++) direction[a][d] = widen(axes[a * HEAD_DIM + d]);
            for (int a = 0; a < RANK; a++)
                for (int j = 0; j < count; j++) at[a][j] = widen(places[a * most + j]);
            for (int g = 0; g < GROUP; g++) {
                float along[1 + RANK], scores[BLOCK], top, sum = 0.0f;
                for (int a = 0; a <= RANK; a++) {
                    along[a] = 0.0f;
                    for (int d = 0; d < HEAD_DIM; d++) along[a] += wide[g][d] * direction[a][d];
                }
                for (int j = 0; j < count; j++) scores[j] = along[0] + along[1] * at[0][j] + along[2] * at[1][j];
                top = scores[0];
                for (int j = 1; j < count; j++) top = scores[j] > top ? scores[j] : top;
                for (int j = 0; j < count; j++) sum += exp_negative(scores[j] - top);
                out[(head * GROUP + g) * pages + page] = top + logf(sum) + 0.5f * energy[g] * noise;
            }
        }
    }
}

/* out[o] = sum_i weight[o][i] * x[i] (+ bias[o]): one token through a linear layer. Returns as oval_decode. */
int oval_gemv(const bf16 *weight, const bf16 *x, const bf16 *bias, bf16 *out, int64_t rows, int64_t columns,
              int threads) {
    float *wide = malloc(columns * sizeof(float));
    if (!wide) return 1;
    for (int64_t i = 0; i < columns; i++) wide[i] = widen(x[i]);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < rows; o++) {
        const bf16 *row = weight + o * columns;
        float dot = bias ? widen(bias[o]) : 0.0f;
        for (int64_t i = 0; i < columns; i++) dot += widen(row[i]) * wide[i];
        out[o] = narrow(dot);
    }
    free(wide);
    return 0;
}

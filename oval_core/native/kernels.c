/* Decode kernels for CPUs, compiled for the machine and the model's head shape (see build.py).
 *
 * bf16 in, float32 inside, bf16 out. Shapes: B rows, K KV heads, G query heads a KV head (GROUP), D head dim
 * (HEAD_DIM), L keys. Keys and values are read once, where they lie in the pool.
 */
#if ABI != 2 /* see build.py */
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

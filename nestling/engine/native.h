/* One step of decoding in C: what the files of this folder share.

   A step takes one token a row through every block of a model. Rows with the same slots are one sequence: they stand
   one after the other, in the order of their positions, and each sees those before it. That is how a prompt is read:
   its tokens give the same numbers in one step, in several, or one by one. Rows are independent: each number of a row is computed
   by the same operations in the same order whatever the other rows are, how many there are, and how many threads run.
   Weights are read where they lie (base pointer and row stride), so a member of a nest needs no copy of its own.

   Activations are float32 buffers. In a bf16 model they hold values rounded to bf16 wherever the stock model rounds. */

#ifndef NESTLING_NATIVE_H
#define NESTLING_NATIVE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define GROUP 16  /* rows that one pass over a weight serves */
#define LANES 16  /* floats that are summed side by side in a dot product */
#define PANEL 64  /* outputs that one call of `multiply` may ask for */

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

typedef struct {
    const void *data; /* null: there is none */
    int32_t is_bf16, stride;
} Vector;

typedef struct {
    const void *data; /* [rows, cols] of one step's worth; null: there is none */
    int64_t stride;   /* values from one row to the next */
    int64_t leap;     /* values from one expert to the next */
    int32_t rows, cols, is_bf16, pad;
    Vector bias;
} Matrix;

enum { ATTENTION = 1, MAMBA = 2, DENSE = 3, EXPERTS = 4 };

typedef struct {
    int32_t kind;
    int32_t slot; /* which of a row's slots holds the state of this block; -1: none */
    Vector norm;
    float eps;
    int32_t heads, kv_heads, head, window, has_rope; /* attention; window 0: everything is seen */
    float scale;
    int32_t mambas, mdim, groups, state, conv; /* Mamba-2 */
    float gate_eps;
    float least_dt; /* time step of a token of a prompt */
    int32_t is_gated;                                             /* silu(gate) * up, else relu(up) squared */
    int32_t experts, active, is_sigmoid, is_normed, node_groups, node_active; /* router */
    int32_t rounds_weights; /* the router's weights are rounded to bf16 */
    float routed_scale;
    Vector q_norm, k_norm;
    Vector conv_weight, conv_bias, a_log, d, dt_bias, gate_norm;
    Vector correction;
    Matrix q, k, v, out; /* attention; Mamba: q is in_proj */
    Matrix gate, up, down;
    Matrix router, expert_gate, expert_up, expert_down, latent_in, latent_out;
} Block;

typedef struct {
    int32_t num_blocks, num_slots, hidden, vocab, is_bf16, rounds_norm; /* rounds_norm: before the weight, as Llama */
    float eps;
    int32_t table; /* positions in the tables of cosines */
    Vector norm;
    Matrix embedding, head;
    const Block *blocks;
    const float *cosines, *sines; /* [table, head] */
} Model;

typedef struct {
    void *first, *second; /* keys and values [kv, capacity, head], or conv [channel, kernel] and ssm [mamba, mdim, state] */
    int64_t capacity;
    int32_t first_is_bf16, second_is_bf16;
} Slot;

typedef struct {
    int64_t token, position;
    const Slot *slots;
    int32_t is_prompt, wants_logits;
} Row;

/* What every thread sees in a step. */
typedef struct {
    const Model *model;
    const Row *rows;
    int num_rows, num_threads;
    int has_prompts; /* some rows are of one sequence */
    float *logits;  /* [row that wants them, vocab] */
    float *hidden;  /* [row, hidden] */
    float *wide;    /* [row, width]: projections of a block */
    float *mixed;   /* [row, width]: what the block's last projection reads */
    float *parts;   /* [row, active, hidden]: what each expert gives */
    float *inner;   /* [row, active, effn]: what each expert's last projection reads */
    float *scores;  /* [row, expert] */
    float *shared, *routed; /* [row, hidden]: what the shared expert gives, and the others together */
    int64_t width, part, effn, longest;
} Step;

/* What one thread has for itself. */
typedef struct {
    const Step *step;
    int thread;
    void *packed;    /* activations as the kernel wants them */
    float *normed;   /* [row, hidden] */
    float *scratch;  /* [GROUP, PANEL] twice, or a row's scores */
    int32_t *chosen; /* [row, active] */
    float *shares;   /* [row, active] */
    int tiles; /* rows that the tile registers are set up for; 0: not set up */
} Worker;

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float x) { /* to nearest, ties to even; not for NaN with a payload in the low half */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 64);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static inline float rounded(float x, int is_bf16) { return is_bf16 ? from_bf16(to_bf16(x)) : x; }

static inline float at(Vector v, int64_t i) {
    i *= v.stride;
    return v.is_bf16 ? from_bf16(((const uint16_t *)v.data)[i]) : ((const float *)v.data)[i];
}

static inline float load(const void *data, int64_t i, int is_bf16) {
    return is_bf16 ? from_bf16(((const uint16_t *)data)[i]) : ((const float *)data)[i];
}

static inline void store(void *data, int64_t i, float x, int is_bf16) {
    if (is_bf16) ((uint16_t *)data)[i] = to_bf16(x);
    else ((float *)data)[i] = x;
}

/* e^x to about one unit in the last place: a function of ours gives one number whether it is vectorized or not. */
static inline float exponential(float x) {
    x = x > 88.7f ? 88.7f : x;
    x = x < -87.3f ? -87.3f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

typedef int32_t picks __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (picks){__VA_ARGS__})
#endif

/* LANES values of a weight or a cache as float32. */
static inline __attribute__((always_inline)) lanes widened(const void *data, int64_t i, int is_bf16) {
    if (!is_bf16) return *(const lanes *)((const float *)data + i);
#ifdef __AVX512F__ /* gcc 12 widens in two halves */
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)((const uint16_t *)data + i))), 16);
#endif
    return (lanes)(__builtin_convertvector(*(const halves *)((const uint16_t *)data + i), words) << 16);
}

/* Each lane rounded to bf16, as `rounded`. */
static inline __attribute__((always_inline)) lanes rounded_lanes(lanes x, int is_bf16) {
    if (!is_bf16) return x;
    words bits = (words)x;
    words near = (bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u;
    words is_nan = (words)(x != x);
    return (lanes)((near & ~is_nan) | (bits & is_nan));
}

static inline float total(lanes given) { /* one order of addition, whatever the compiler makes of loops */
    float x[LANES];
    memcpy(x, &given, sizeof x);
    for (int i = 0; i < 8; i++) x[i] += x[i + 8];
    for (int i = 0; i < 4; i++) x[i] += x[i + 4];
    return (x[0] + x[2]) + (x[1] + x[3]);
}

/* Lane i is the total of x[i], added in the same order as `total`. */
static inline __attribute__((always_inline)) lanes totals(const lanes *x) {
    lanes y[8], z[4], u[2];
    for (int i = 0; i < 8; i++)
        y[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        z[i] = SHUFFLE(y[2 * i], y[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(y[2 * i], y[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        u[i] = SHUFFLE(z[2 * i], z[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               SHUFFLE(z[2 * i], z[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return SHUFFLE(u[0], u[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(u[0], u[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Rows become columns. */
static inline __attribute__((always_inline)) void transpose(lanes *x) {
    lanes y[16];
    for (int step = 0; step < 4; step++) { /* each step interleaves row i with row i + 8 */
        for (int i = 0; i < 8; i++) {
            y[2 * i] = SHUFFLE(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            y[2 * i + 1] = SHUFFLE(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(x, y, sizeof y);
    }
}

/* pool.c */
void run_threads(int num_threads, void (*work)(void *, int), void *argument);
void barrier(int num_threads);

/* matmul.c */
enum { ADD = 1, RAW = 2 }; /* add to what is there, as a residual; do not round to the model's width */
int64_t packed_bytes(int64_t cols);
void pack(Worker *own, const float *const *x, int num, int cols, int is_bf16);
void dot_products(
    const void *w, int64_t stride, int is_bf16, int64_t num_w, int cols, const float *x, int padded, int num_x, float *to,
    int64_t to_stride
);
void multiply(Worker *own, const Matrix *w, int64_t expert, int num, int begin, int end, float *const *y, int flags);
void share(const Worker *own, int size, int *begin, int *end);
void project(Worker *own, const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t y_stride, int flags);
void normalize(Worker *own, const float *x, Vector weight, float eps);

/* attention.c, mamba.c, feedforward.c */
void attend(Worker *own, const Block *block);
void scan(Worker *own, const Block *block);
void feed(Worker *own, const Block *block);
void route(Worker *own, const Block *block);

#endif

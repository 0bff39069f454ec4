/* Products of a weight with the activations of up to GROUP rows: y[row, out] = sum over k of w[out, k] x[row, k].

   Two kernels. With tile registers (AMX) bf16 weights are the left operand as they lie, and the activations, laid in
   pairs, the right one; a column of the result sees nothing of the others. Everywhere else a dot product is a vector of
   LANES sums along k, four outputs and up to four rows at a time, so that a weight is loaded once for four rows. In both,
   a number is summed in one order, whatever stands beside it. */

#define _GNU_SOURCE
#include "native.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_TILES 0
#endif

#define DEPTH 32 /* values of k in one tile */

static int use_tiles;

/* Choose the kernel for bf16 weights, for the whole process. Returns 1 for tiles, 0 for lanes. */
int choose_kernel(int wants_tiles) {
#if HAS_TILES
    use_tiles = wants_tiles && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    (void)wants_tiles;
#endif
    return use_tiles;
}

/* Bytes of one group's activations, laid out. */
int64_t packed_bytes(int64_t cols) {
    int64_t padded = (cols + DEPTH - 1) / DEPTH * DEPTH;
    return padded * GROUP * sizeof(float);
}

/* Lay out the activations of `num` rows for the products with one kind of weight. x: num pointers to [cols]. */
void pack(Worker *own, const float *const *x, int num, int cols, int is_bf16) {
    if (use_tiles && is_bf16) { /* [k / 2, row, 2] */
        uint16_t *packed = own->packed;
        int padded = (cols + DEPTH - 1) / DEPTH * DEPTH;
        for (int row = 0; row < num; row++) {
            const float *from = x[row];
            uint32_t *to = (uint32_t *)packed + row;
            int pair = 0;
            for (; pair < cols / 2; pair++)
                to[(int64_t)pair * num] = to_bf16(from[2 * pair]) | (uint32_t)to_bf16(from[2 * pair + 1]) << 16;
            for (; pair < padded / 2; pair++) to[(int64_t)pair * num] = 2 * pair < cols ? to_bf16(from[2 * pair]) : 0;
        }
        return;
    }
    int padded = (cols + LANES - 1) / LANES * LANES;
    for (int row = 0; row < num; row++) {
        float *to = (float *)own->packed + (int64_t)row * padded;
        memcpy(to, x[row], sizeof(float) * cols);
        memset(to + cols, 0, sizeof(float) * (padded - cols));
    }
}

#if HAS_TILES

static void set_up(Worker *own, int num) {
    if (own->tiles == num) return;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = 16;
        config.bytes[i] = i == 5 || i == 6 ? 64 : 4 * num; /* 0-3 sums, 4 activations, 5 and 6 weights */
    }
    _tile_loadconfig(&config);
    own->tiles = num;
}

/* Where 16 rows of a weight from `out` on lie for one tile: in place, or copied with zeros where there is nothing. */
static const uint16_t *rows_of(const uint16_t *w, const Matrix *shape, int out, int k, uint16_t *spare, int64_t *stride) {
    if (out + 16 <= shape->rows && k + DEPTH <= shape->cols) {
        *stride = shape->stride * 2;
        return w + out * shape->stride + k;
    }
    int rows = shape->rows - out < 16 ? shape->rows - out : 16, cols = shape->cols - k < DEPTH ? shape->cols - k : DEPTH;
    memset(spare, 0, 16 * DEPTH * 2);
    for (int i = 0; i < rows; i++) memcpy(spare + i * DEPTH, w + (out + i) * shape->stride + k, 2 * cols);
    *stride = DEPTH * 2;
    return spare;
}

#define SUM(sums, half)                                                 \
    {                                                                   \
        from = rows_of(w, shape, out + 16 * sums, k, spare, &stride);   \
        _tile_loadd(half, from, stride);                                \
        _tile_dpbf16ps(sums, half, 4);                                  \
    }

/* sums: [PANEL, num] */
static void with_tiles(Worker *own, const Matrix *shape, const uint16_t *w, int num, int out, int size, float *sums) {
    uint16_t spare[16 * DEPTH] __attribute__((aligned(64)));
    const uint16_t *x = own->packed, *from;
    int64_t stride;
    set_up(own, num);
    int num_blocks = (size + 15) / 16, k = 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (num_blocks == 4 && out + PANEL <= shape->rows) {
        const uint16_t *at = w + out * shape->stride;
        int64_t step = shape->stride * 16;
        stride = shape->stride * 2;
        for (; k + DEPTH <= shape->cols; k += DEPTH, at += DEPTH) {
            _tile_loadd(4, x + (int64_t)k * num, 4 * num);
            _tile_loadd(5, at, stride);
            _tile_dpbf16ps(0, 5, 4);
            _tile_loadd(6, at + step, stride);
            _tile_dpbf16ps(1, 6, 4);
            _tile_loadd(5, at + 2 * step, stride);
            _tile_dpbf16ps(2, 5, 4);
            _tile_loadd(6, at + 3 * step, stride);
            _tile_dpbf16ps(3, 6, 4);
        }
    }
    for (; k < shape->cols; k += DEPTH) {
        _tile_loadd(4, x + (int64_t)k * num, 4 * num);
        SUM(0, 5)
        if (num_blocks > 1) SUM(1, 6)
        if (num_blocks > 2) SUM(2, 5)
        if (num_blocks > 3) SUM(3, 6)
    }
    _tile_stored(0, sums, 4 * num);
    if (num_blocks > 1) _tile_stored(1, sums + 16 * num, 4 * num);
    if (num_blocks > 2) _tile_stored(2, sums + 32 * num, 4 * num);
    if (num_blocks > 3) _tile_stored(3, sums + 48 * num, 4 * num);
}

void release_tiles(Worker *own) {
    if (own->tiles) _tile_release();
    own->tiles = 0;
}

#else

void release_tiles(Worker *own) { own->tiles = 0; }

#endif

/* The dot products of `outs` weights with `rows` rows, to[row, out]. cols: what a weight has; x has zeros up to `padded`. */
static inline __attribute__((always_inline)) void block(
    const void *w, int64_t stride, int is_bf16, int cols, const float *x, int padded, int outs, int rows, float *to,
    int64_t to_stride
) {
    lanes acc[16] = {{0}}; /* [row, out] */
    int k = 0;
    for (; k + LANES <= cols; k += LANES)
        for (int o = 0; o < outs; o++) {
            lanes here = widened(w, o * stride + k, is_bf16);
            for (int r = 0; r < rows; r++) acc[4 * r + o] += here * *(const lanes *)(x + (int64_t)r * padded + k);
        }
    if (k < cols) {
        int width = is_bf16 ? 2 : 4;
        for (int o = 0; o < outs; o++) {
            char spare[LANES * 4] __attribute__((aligned(64))) = {0};
            memcpy(spare, (const char *)w + (o * stride + k) * width, (size_t)(cols - k) * width);
            lanes here = widened(spare, 0, is_bf16);
            for (int r = 0; r < rows; r++) acc[4 * r + o] += here * *(const lanes *)(x + (int64_t)r * padded + k);
        }
    }
    if (outs == 1 && rows == 1) {
        *to = total(acc[0]);
        return;
    }
    float sums[16];
    *(lanes *)sums = totals(acc);
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outs; o++) to[r * to_stride + o] = sums[4 * r + o];
}

static inline __attribute__((always_inline)) void blocks(
    const char *w, int64_t stride, int is_bf16, int64_t num_w, int cols, const float *x, int padded, int num_x, float *to,
    int64_t to_stride
) {
    for (int64_t o = 0; o < num_w;) {
        const char *here = w + o * stride * (is_bf16 ? 2 : 4);
        int outs = num_w - o >= 4 ? 4 : 1;
        for (int r = 0; r < num_x;) {
            const float *from = x + (int64_t)r * padded;
            float *there = to + r * to_stride + o;
            int rows = num_x - r >= 4 ? 4 : num_x - r == 3 ? 3 : 1;
            if (outs == 4 && rows == 4) block(here, stride, is_bf16, cols, from, padded, 4, 4, there, to_stride);
            else if (outs == 4 && rows == 3) block(here, stride, is_bf16, cols, from, padded, 4, 3, there, to_stride);
            else if (outs == 4) block(here, stride, is_bf16, cols, from, padded, 4, 1, there, to_stride);
            else if (rows == 4) block(here, stride, is_bf16, cols, from, padded, 1, 4, there, to_stride);
            else if (rows == 3) block(here, stride, is_bf16, cols, from, padded, 1, 3, there, to_stride);
            else block(here, stride, is_bf16, cols, from, padded, 1, 1, there, to_stride);
            r += rows;
        }
        o += outs;
    }
}

/* Dot products of num_w weights [num_w, cols] with num_x rows [num_x, padded]: to[x, w]. */
void dot_products(
    const void *w, int64_t stride, int is_bf16, int64_t num_w, int cols, const float *x, int padded, int num_x, float *to,
    int64_t to_stride
) {
    if (is_bf16) blocks(w, stride, 1, num_w, cols, x, padded, num_x, to, to_stride);
    else blocks(w, stride, 0, num_w, cols, x, padded, num_x, to, to_stride);
}

/* What a product becomes: with its bias, rounded, added to what is there. */
static inline __attribute__((always_inline)) void finish(
    float *to, const float *sums, const Matrix *w, int first, int size, int is_bf16, int adds
) {
    int i = 0;
    for (; i + LANES <= size && !w->bias.data; i += LANES) {
        lanes value = rounded_lanes(*(const lanes *)(sums + i), is_bf16);
        *(lanes *)(to + i) = adds ? rounded_lanes(*(lanes *)(to + i) + value, is_bf16) : value;
    }
    for (; i < size; i++) {
        float value = sums[i];
        if (w->bias.data) value += at(w->bias, first + i);
        value = rounded(value, is_bf16);
        to[i] = adds ? rounded(to[i] + value, is_bf16) : value;
    }
}

/* Outputs begin to end (at most PANEL) of the packed rows. y: num pointers, each to where output `begin` goes. */
void multiply(Worker *own, const Matrix *w, int64_t expert, int num, int begin, int end, float *const *y, int flags) {
    float sums[PANEL * GROUP + LANES] __attribute__((aligned(64))), turned[PANEL * GROUP] __attribute__((aligned(64)));
    const float *from = turned; /* [row, PANEL] */
    const char *data = (const char *)w->data + expert * w->leap * (w->is_bf16 ? 2 : 4);
    int size = end - begin, is_bf16 = own->step->model->is_bf16 && !(flags & RAW);
#if HAS_TILES
    if (use_tiles && w->is_bf16) {
        with_tiles(own, w, (const uint16_t *)data, num, begin, size, sums); /* [PANEL, num] */
        if (num == 1) from = sums;
        else
            for (int i = 0; i < size; i += 16) {
                lanes block[16];
                for (int j = 0; j < 16; j++)
                    memcpy(&block[j], sums + (i + j) * num, sizeof(lanes)); /* lanes from `num` on are the next row's */
                transpose(block);
                for (int row = 0; row < num; row++) *(lanes *)(turned + row * PANEL + i) = block[row];
            }
    } else
#endif
    {
        int padded = (w->cols + LANES - 1) / LANES * LANES;
        const char *here = data + begin * w->stride * (w->is_bf16 ? 2 : 4);
        dot_products(here, w->stride, w->is_bf16, size, w->cols, own->packed, padded, num, turned, PANEL);
    }
    for (int row = 0; row < num; row++) {
        if (flags & ADD) finish(y[row], from + row * PANEL, w, begin, size, is_bf16, 1);
        else finish(y[row], from + row * PANEL, w, begin, size, is_bf16, 0);
    }
}

/* This thread's part of `size` outputs: whole blocks of 16. */
void share(const Worker *own, int size, int *begin, int *end) {
    int64_t blocks = (size + 15) / 16, threads = own->step->num_threads;
    *begin = (int)(blocks * own->thread / threads * 16);
    *end = (int)(blocks * (own->thread + 1) / threads * 16);
    if (*end > size) *end = size;
}

/* This thread's part of y = w x for all rows of the step. A panel of weights is read once and used for every group. */
void project(Worker *own, const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t y_stride, int flags) {
    int begin, end, num_rows = own->step->num_rows;
    int64_t bytes = packed_bytes(w->cols);
    char *packed = own->packed;
    share(own, w->rows, &begin, &end);
    for (int first = 0; first < num_rows && begin < end; first += GROUP) {
        int num = num_rows - first < GROUP ? num_rows - first : GROUP;
        const float *from[GROUP];
        for (int i = 0; i < num; i++) from[i] = x + (first + i) * x_stride;
        own->packed = packed + first / GROUP * bytes;
        pack(own, from, num, w->cols, w->is_bf16);
    }
    for (int out = begin; out < end; out += PANEL)
        for (int first = 0; first < num_rows; first += GROUP) {
            int num = num_rows - first < GROUP ? num_rows - first : GROUP;
            float *to[GROUP];
            for (int i = 0; i < num; i++) to[i] = y + (first + i) * y_stride + out;
            own->packed = packed + first / GROUP * bytes;
            multiply(own, w, 0, num, out, out + PANEL < end ? out + PANEL : end, to, flags);
        }
    own->packed = packed;
}

/* The norm of every row, into what is this thread's own. */
void normalize(Worker *own, const float *x, Vector weight, float eps) {
    const Model *model = own->step->model;
    int hidden = model->hidden, is_bf16 = model->is_bf16;
    for (int row = 0; row < own->step->num_rows; row++) {
        const float *from = x + (int64_t)row * hidden;
        float *to = own->normed + (int64_t)row * hidden;
        lanes sums = {0};
        int i = 0;
        for (; i + LANES <= hidden; i += LANES) {
            lanes value = *(const lanes *)(from + i);
            sums += value * value;
        }
        float sum = total(sums);
        for (; i < hidden; i++) sum += from[i] * from[i];
        float scale = 1.0f / sqrtf(sum / hidden + eps);
        int rounds = is_bf16 && model->rounds_norm;
        if (weight.stride != 1)
            for (int j = 0; j < hidden; j++) to[j] = rounded(at(weight, j) * rounded(from[j] * scale, rounds), is_bf16);
        else if (weight.is_bf16)
            for (int j = 0; j < hidden; j++)
                to[j] = rounded(from_bf16(((const uint16_t *)weight.data)[j]) * rounded(from[j] * scale, rounds), is_bf16);
        else
            for (int j = 0; j < hidden; j++)
                to[j] = rounded(((const float *)weight.data)[j] * rounded(from[j] * scale, rounds), is_bf16);
    }
}

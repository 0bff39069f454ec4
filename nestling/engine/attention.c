/* Attention of one token a row over the keys and values that its row has kept.

   A task is some query heads of one row that share keys and values. The new key and value are worked out by every task
   that needs them, because that is cheaper than a barrier; the one with the first of the heads writes the cache. Only
   where rows are of one sequence, and see each other's, all are written before any is read. */

#include "native.h"

static void norm_head(float *x, int size, Vector weight, float eps, const Model *model) {
    float sum = 0;
    for (int i = 0; i < size; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / size + eps);
    for (int i = 0; i < size; i++) {
        float value = rounded(x[i] * scale, model->is_bf16 && model->rounds_norm);
        x[i] = rounded(at(weight, i) * value, model->is_bf16);
    }
}

/* Rotary positions: the first half of a head turns against the second. */
static void rotate(float *x, int size, const float *cosines, const float *sines, int is_bf16) {
    int half = size / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        float first = rounded(a * cosines[i], is_bf16), second = rounded(-b * sines[i], is_bf16);
        float third = rounded(b * cosines[i + half], is_bf16), fourth = rounded(a * sines[i + half], is_bf16);
        x[i] = rounded(first + second, is_bf16);
        x[i + half] = rounded(third + fourth, is_bf16);
    }
}

/* to[head] += sum over t of p[head, t] rows[t], for `num` heads (at most 4) and one stretch of their dims. */
static inline __attribute__((always_inline)) void gather(
    float *to, int64_t size, const float *p, int64_t p_stride, const void *data, int64_t start, int64_t times, int is_bf16, int num
) {
    lanes acc[4];
    for (int h = 0; h < num; h++) acc[h] = (lanes){0};
    for (int64_t t = 0; t < times; t++) {
        lanes here = widened(data, start + t * size, is_bf16);
        for (int h = 0; h < num; h++) acc[h] += p[h * p_stride + t] * here;
    }
    for (int h = 0; h < num; h++) *(lanes *)(to + h * size) += acc[h];
}

static inline __attribute__((always_inline)) void gather_all(
    float *to, int64_t size, const float *p, int64_t p_stride, const void *data, int64_t start, int64_t times, int is_bf16, int num
) {
    for (int h = 0; h < num;) {
        int heads = num - h >= 4 ? 4 : 1;
        float *there = to + h * size;
        const float *shares = p + h * p_stride;
        int i = 0;
        for (; i + LANES <= size; i += LANES) {
            if (heads == 4) gather(there + i, size, shares, p_stride, data, start + i, times, is_bf16, 4);
            else gather(there + i, size, shares, p_stride, data, start + i, times, is_bf16, 1);
        }
        for (; i < size; i++)
            for (int j = 0; j < heads; j++)
                for (int64_t t = 0; t < times; t++)
                    there[j * size + i] += shares[j * p_stride + t] * load(data, start + t * size + i, is_bf16);
        h += heads;
    }
}

/* What weighs each of `num` scores after the softmax, not yet divided by their sum, which is returned. */
static float soften(float *p, int64_t num, float scale) {
    float most = -INFINITY;
    int64_t t = 0;
    for (int64_t i = 0; i < num; i++) {
        p[i] *= scale;
        most = p[i] > most ? p[i] : most;
    }
    for (int64_t i = 0; i < num; i++) p[i] = exponential(p[i] - most);
    lanes sums = {0};
    for (; t + LANES <= num; t += LANES) sums += *(lanes *)(p + t);
    float sum = total(sums);
    for (; t < num; t++) sum += p[t];
    return sum;
}

/* The new key and value of one row, worked out into k and v. wide: [q + k + v, head]. */
static void make_key(const Model *model, const Block *block, const Row *row, const float *wide, int kv, float *k, float *v) {
    int size = block->head;
    memcpy(k, wide + (block->heads + kv) * size, sizeof(float) * size);
    memcpy(v, wide + (block->heads + block->kv_heads + kv) * size, sizeof(float) * size);
    if (block->k_norm.data) norm_head(k, size, block->k_norm, block->eps, model);
    if (block->has_rope)
        rotate(k, size, model->cosines + row->position * size, model->sines + row->position * size, model->is_bf16);
}

static void keep_key(const Block *block, const Row *row, int kv, const float *k, const float *v) {
    const Slot *slot = row->slots + block->slot;
    int64_t start = (kv * slot->capacity + row->position) * block->head;
    for (int i = 0; i < block->head; i++) {
        store(slot->first, start + i, k[i], slot->first_is_bf16);
        store(slot->second, start + i, v[i], slot->second_is_bf16);
    }
}

/* Query heads head to head + num of one row, which share keys and values. wide: [q + k + v, head], to: [num, head]. */
static void attend_heads(Worker *own, const Block *block, const Row *row, const float *wide, int head, int num, float *to) {
    const Model *model = own->step->model;
    const Slot *slot = row->slots + block->slot;
    int size = block->head, padded = (size + LANES - 1) / LANES * LANES, is_bf16 = model->is_bf16;
    int share_of = block->heads / block->kv_heads, kv = head / share_of;
    int64_t now = row->position, start = kv * slot->capacity * size, p_stride = (own->step->longest + LANES) / LANES * LANES;
    float *k = own->scratch, *v = k + size, *q = v + size, *p = q + (int64_t)num * padded; /* p: [num, p_stride] */
    make_key(model, block, row, wide, kv, k, v);
    memset(q, 0, sizeof(float) * num * padded);
    const float *cosines = model->cosines + now * size, *sines = model->sines + now * size;
    for (int h = 0; h < num; h++) {
        float *x = q + h * padded;
        memcpy(x, wide + (head + h) * size, sizeof(float) * size);
        if (block->q_norm.data) norm_head(x, size, block->q_norm, block->eps, model);
        if (block->has_rope) rotate(x, size, cosines, sines, is_bf16);
    }
    if (head % share_of == 0 && !own->step->has_prompts) keep_key(block, row, kv, k, v);
    int64_t first = block->window && now + 1 > block->window ? now + 1 - block->window : 0, times = now - first;
    const char *keys = (const char *)slot->first + (start + first * size) * (slot->first_is_bf16 ? 2 : 4);
    dot_products(keys, size, slot->first_is_bf16, times, size, q, padded, num, p, p_stride);
    dot_products(k, size, 0, 1, size, q, padded, num, p + times, p_stride);
    float sums[GROUP];
    for (int h = 0; h < num; h++) sums[h] = soften(p + h * p_stride, times + 1, block->scale);
    for (int h = 0; h < num; h++)
        for (int i = 0; i < size; i++) to[h * size + i] = p[h * p_stride + times] * v[i];
    if (slot->second_is_bf16) gather_all(to, size, p, p_stride, slot->second, start + first * size, times, 1, num);
    else gather_all(to, size, p, p_stride, slot->second, start + first * size, times, 0, num);
    for (int h = 0; h < num; h++)
        for (int i = 0; i < size; i++) to[h * size + i] = rounded(to[h * size + i] / sums[h], is_bf16);
}

void attend(Worker *own, const Block *block) {
    const Step *step = own->step;
    int hidden = step->model->hidden, size = block->head;
    int64_t width = step->width;
    normalize(own, step->hidden, block->norm, block->eps);
    project(own, &block->q, own->normed, hidden, step->wide, width, 0);
    project(own, &block->k, own->normed, hidden, step->wide + block->heads * size, width, 0);
    project(own, &block->v, own->normed, hidden, step->wide + (block->heads + block->kv_heads) * size, width, 0);
    barrier(step->num_threads);
    if (step->has_prompts) {
        int64_t pairs = (int64_t)step->num_rows * block->kv_heads;
        for (int64_t i = pairs * own->thread / step->num_threads; i < pairs * (own->thread + 1) / step->num_threads; i++) {
            const Row *row = step->rows + i / block->kv_heads;
            int kv = (int)(i % block->kv_heads);
            float *k = own->scratch, *v = k + size;
            make_key(step->model, block, row, step->wide + i / block->kv_heads * width, kv, k, v);
            keep_key(block, row, kv, k, v);
        }
        barrier(step->num_threads);
    }
    int share_of = block->heads / block->kv_heads;
    int64_t tasks = (int64_t)step->num_rows * block->heads;
    int64_t task = tasks * own->thread / step->num_threads, end = tasks * (own->thread + 1) / step->num_threads;
    while (task < end) { /* as many heads at once as share a key, unless the others are another thread's */
        int64_t row = task / block->heads, head = task % block->heads;
        int64_t num = share_of - head % share_of < end - task ? share_of - head % share_of : end - task;
        num = num < GROUP ? num : GROUP;
        float *to = step->mixed + row * width + head * size;
        attend_heads(own, block, step->rows + row, step->wide + row * width, (int)head, (int)num, to);
        task += num;
    }
    barrier(step->num_threads);
    project(own, &block->out, step->mixed, width, step->hidden, hidden, ADD);
    barrier(step->num_threads);
}

/* Attention of one token a row over the keys and values that its row has kept.

   A task is one query head of one row. The new key and value are worked out by every head that shares them, because that
   is cheaper than a barrier; the first of them writes the cache. */

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

static inline lanes widened(const void *data, int64_t i, int is_bf16) {
    if (!is_bf16) return *(const lanes *)((const float *)data + i);
    typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
    typedef uint32_t words __attribute__((vector_size(LANES * 4)));
    return (lanes)(__builtin_convertvector(*(const halves *)((const uint16_t *)data + i), words) << 16);
}

static inline float dot(const float *x, const void *data, int64_t start, int size, int is_bf16) {
    lanes sums = {0};
    int i = 0;
    for (; i + LANES <= size; i += LANES) sums += *(const lanes *)(x + i) * widened(data, start + i, is_bf16);
    float sum = total(sums);
    for (; i < size; i++) sum += x[i] * load(data, start + i, is_bf16);
    return sum;
}

static inline void add(float *to, float p, const void *data, int64_t start, int size, int is_bf16) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) *(lanes *)(to + i) += p * widened(data, start + i, is_bf16);
    for (; i < size; i++) to[i] += p * load(data, start + i, is_bf16);
}

static void attend_head(Worker *own, const Block *block, const Row *row, const float *wide, int head, float *to) {
    const Model *model = own->step->model;
    const Slot *slot = row->slots + block->slot;
    int size = block->head, is_bf16 = model->is_bf16, share_of = block->heads / block->kv_heads, kv = head / share_of;
    float *q = own->scratch, *k = q + size, *v = k + size, *p = v + size;
    int64_t now = row->position, start = kv * slot->capacity * size;
    memcpy(q, wide + head * size, sizeof(float) * size);
    memcpy(k, wide + (block->heads + kv) * size, sizeof(float) * size);
    memcpy(v, wide + (block->heads + block->kv_heads + kv) * size, sizeof(float) * size);
    if (block->q_norm.data) norm_head(q, size, block->q_norm, block->eps, model);
    if (block->k_norm.data) norm_head(k, size, block->k_norm, block->eps, model);
    if (block->has_rope) {
        const float *cosines = model->cosines + now * size, *sines = model->sines + now * size;
        rotate(q, size, cosines, sines, is_bf16);
        rotate(k, size, cosines, sines, is_bf16);
    }
    if (head % share_of == 0)
        for (int i = 0; i < size; i++) {
            store(slot->first, start + now * size + i, k[i], slot->first_is_bf16);
            store(slot->second, start + now * size + i, v[i], slot->second_is_bf16);
        }
    int64_t first = block->window && now + 1 > block->window ? now + 1 - block->window : 0, num = now - first;
    float most = 0;
    for (int64_t t = 0; t <= num; t++) {
        p[t] = t < num ? dot(q, slot->first, start + (first + t) * size, size, slot->first_is_bf16) : dot(q, k, 0, size, 0);
        p[t] *= block->scale;
        most = t && most > p[t] ? most : p[t];
    }
    float sum = 0;
    for (int64_t t = 0; t <= num; t++) p[t] = exponential(p[t] - most);
    for (int64_t t = 0; t <= num; t++) sum += p[t];
    memset(to, 0, sizeof(float) * size);
    for (int64_t t = 0; t < num; t++) add(to, p[t], slot->second, start + (first + t) * size, size, slot->second_is_bf16);
    add(to, p[num], v, 0, size, 0);
    for (int i = 0; i < size; i++) to[i] = rounded(to[i] / sum, is_bf16);
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
    int64_t tasks = (int64_t)step->num_rows * block->heads;
    int64_t from = tasks * own->thread / step->num_threads, end = tasks * (own->thread + 1) / step->num_threads;
    for (int64_t task = from; task < end; task++) {
        int64_t row = task / block->heads, head = task % block->heads;
        attend_head(own, block, step->rows + row, step->wide + row * width, (int)head, step->mixed + row * width + head * size);
    }
    barrier(step->num_threads);
    project(own, &block->out, step->mixed, width, step->hidden, hidden, ADD);
    barrier(step->num_threads);
}

/* One step of Mamba-2: a short convolution over the last few tokens, then the state of every head decays and takes in
   the new token. The rounding follows the stock model's single-token path; for tokens of a prompt its path for several,
   which computes in float32 from the convolution to the last projection and has a least time step. */

#include "native.h"

/* The convolution of one channel: what falls out of the window is forgotten, the newest comes last. */
static inline __attribute__((always_inline)) float take_in(void *kept, int64_t num, const void *w, int taps, float x, int w_is_bf16, int is_bf16) {
    float sum = 0;
    for (int64_t i = 1; i < num; i++) {
        float value = load(kept, i, is_bf16);
        store(kept, i - 1, value, is_bf16);
        if (i > num - taps) sum += load(w, i - 1 - num + taps, w_is_bf16) * value;
    }
    store(kept, num - 1, x, is_bf16);
    return sum + load(w, taps - 1, w_is_bf16) * x;
}

/* The convolution of channels begin to end of one row. */
static void convolve(const Model *model, const Block *block, const Slot *slot, float *x, int begin, int end) {
    int taps = block->conv, is_bf16 = model->is_bf16, wide = block->conv_weight.is_bf16;
    int64_t kept = slot->capacity, step = slot->first_is_bf16 ? 2 : 4, w_step = wide ? 2 : 4;
    for (int c = begin; c < end; c++) {
        char *window = (char *)slot->first + c * kept * step;
        const char *w = (const char *)block->conv_weight.data + (int64_t)c * taps * w_step;
        if (slot->first_is_bf16 && wide && kept == 4 && taps == 4) x[c] = take_in(window, 4, w, 4, x[c], 1, 1);
        else if (slot->first_is_bf16 && wide) x[c] = take_in(window, kept, w, taps, x[c], 1, 1);
        else x[c] = take_in(window, kept, w, taps, x[c], wide, slot->first_is_bf16);
    }
    if (block->conv_bias.data)
        for (int c = begin; c < end; c++) x[c] += at(block->conv_bias, c);
    for (int c = begin; c < end; c++) x[c] = rounded(silu(rounded(x[c], is_bf16)), is_bf16);
}

/* One head of one row. projected: [z + x + B + C + dt], of which x, B and C are convolved. to: [mdim]. */
static void scan_head(const Model *model, const Block *block, const Row *row, const float *projected, int head, float *to) {
    const Slot *slot = row->slots + block->slot;
    int size = block->mdim, state = block->state, inner = block->mambas * size, is_bf16 = model->is_bf16;
    int group = head / (block->mambas / block->groups);
    const float *x = projected + inner + head * size;
    const float *b = projected + 2 * inner + group * state, *c = b + block->groups * state;
    float dt = projected[2 * inner + 2 * block->groups * state + head];
    dt = rounded(dt + rounded(at(block->dt_bias, head), is_bf16), is_bf16);
    dt = rounded(dt > 20.0f ? dt : log1pf(expf(dt)), is_bf16);
    if (row->is_prompt) {
        dt = dt < block->least_dt ? block->least_dt : dt;
        is_bf16 = 0;
    }
    float decay = expf(dt * -expf(at(block->a_log, head)));
    float d = at(block->d, head);
    int d_is_bf16 = block->d.is_bf16;
    float taken[1024];
    for (int j = 0; j < state; j++) taken[j] = rounded(dt * b[j], is_bf16);
    for (int i = 0; i < size; i++) {
        int64_t start = ((int64_t)head * size + i) * state;
        lanes sums = {0};
        float *kept = (float *)slot->second + start, sum = 0;
        int j = 0;
        if (!slot->second_is_bf16) {
            for (; j + LANES <= state; j += LANES) {
                lanes value = *(lanes *)(kept + j) * decay + rounded_lanes(*(lanes *)(taken + j) * x[i], is_bf16);
                *(lanes *)(kept + j) = value;
                sums += rounded_lanes(value, is_bf16) * *(const lanes *)(c + j);
            }
            sum = total(sums);
        }
        for (; j < state; j++) {
            float value = load(slot->second, start + j, slot->second_is_bf16) * decay + rounded(taken[j] * x[i], is_bf16);
            store(slot->second, start + j, value, slot->second_is_bf16);
            sum += rounded(value, is_bf16) * c[j];
        }
        sum = rounded(sum, is_bf16);
        to[i] = rounded(sum + rounded(x[i] * d, is_bf16 && d_is_bf16), is_bf16);
    }
}

/* The gated norm over one group of one row, in place. */
static void norm_group(
    const Model *model, const Block *block, const Row *row, const float *gate, float *x, int begin, int end
) {
    int rounds = model->is_bf16 && !row->is_prompt;
    lanes sums = {0};
    float sum = 0;
    for (int i = begin; i < end; i++) x[i] = x[i] * silu(gate[i]);
    int i = begin;
    for (; i + LANES <= end; i += LANES) sums += *(lanes *)(x + i) * *(lanes *)(x + i);
    sum = total(sums);
    for (; i < end; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (end - begin) + block->gate_eps);
    for (int j = begin; j < end; j++)
        x[j] = rounded(at(block->gate_norm, j) * rounded(x[j] * scale, rounds), model->is_bf16);
}

void scan(Worker *own, const Block *block) {
    const Step *step = own->step;
    const Model *model = step->model;
    int64_t width = step->width, threads = step->num_threads;
    int inner = block->mambas * block->mdim, channels = inner + 2 * block->groups * block->state;
    int in_group = block->mambas / block->groups;
    normalize(own, step->hidden, block->norm, block->eps);
    project(own, &block->q, own->normed, model->hidden, step->wide, width, 0);
    barrier(step->num_threads);
    int first = (int)(channels * own->thread / threads), last = (int)(channels * (own->thread + 1) / threads);
    for (int64_t row = 0; row < step->num_rows; row++) {
        const Slot *slot = step->rows[row].slots + block->slot;
        convolve(model, block, slot, step->wide + row * width + inner, first, last);
    }
    barrier(step->num_threads);
    int64_t tasks = (int64_t)step->num_rows * block->groups; /* a group has one norm, so its heads stay together */
    int64_t task = tasks * own->thread / threads, end = tasks * (own->thread + 1) / threads;
    if (step->has_prompts) task = 0, end = tasks; /* the tokens of a sequence stay together too: whole groups */
    for (; task < end; task++) {
        int64_t row = task / block->groups;
        int group = (int)(task % block->groups);
        if (step->has_prompts && group % threads != own->thread) continue;
        const float *projected = step->wide + row * width;
        float *to = step->mixed + row * width;
        for (int head = group * in_group; head < (group + 1) * in_group; head++)
            scan_head(model, block, step->rows + row, projected, head, to + head * block->mdim);
        norm_group(
            model, block, step->rows + row, projected, to, group * in_group * block->mdim, (group + 1) * in_group * block->mdim
        );
    }
    barrier(step->num_threads);
    project(own, &block->out, step->mixed, width, step->hidden, model->hidden, ADD);
    barrier(step->num_threads);
}

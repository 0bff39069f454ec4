/* Feed-forward blocks: one for all tokens, or routed experts beside a shared one.

   Rows that chose the same expert are multiplied together, so an expert's weights are read once a step. What an expert
   gives a row is kept apart and added in the order in which the row ranked its experts: a sum that does not depend on
   the other rows. */

#include "native.h"

/* Outputs begin to end of silu(gate) * up or relu(up) squared for the packed rows; to: num pointers to output `begin`. */
static void expand(
    Worker *own, const Block *block, const Matrix *gate, const Matrix *up, int64_t expert, int num, int begin, int end,
    float *const *to
) {
    int is_bf16 = own->step->model->is_bf16, size = end - begin;
    float *gates[GROUP];
    if (block->is_gated) {
        for (int i = 0; i < num; i++) gates[i] = own->scratch + i * PANEL;
        multiply(own, gate, expert, num, begin, end, gates, 0);
    }
    multiply(own, up, expert, num, begin, end, to, 0);
    for (int row = 0; row < num; row++) {
        float *x = to[row];
        if (block->is_gated)
            for (int i = 0; i < size; i++) x[i] = rounded(rounded(silu(gates[row][i]), is_bf16) * x[i], is_bf16);
        else
            for (int i = 0; i < size; i++) {
                float value = x[i] > 0 ? x[i] : 0;
                x[i] = rounded(value * value, is_bf16);
            }
    }
}

/* This thread's part of the inner activations of a dense feed-forward, into `mixed`. */
static void expand_all(Worker *own, const Block *block, const float *x, int64_t x_stride) {
    const Step *step = own->step;
    int begin, end;
    int64_t bytes = packed_bytes(block->up.cols);
    char *packed = own->packed;
    share(own, block->up.rows, &begin, &end);
    for (int first = 0; first < step->num_rows && begin < end; first += GROUP) {
        int num = step->num_rows - first < GROUP ? step->num_rows - first : GROUP;
        const float *from[GROUP];
        for (int i = 0; i < num; i++) from[i] = x + (first + i) * x_stride;
        own->packed = packed + first / GROUP * bytes;
        pack(own, from, num, block->up.cols, block->up.is_bf16);
    }
    for (int out = begin; out < end; out += PANEL)
        for (int first = 0; first < step->num_rows; first += GROUP) {
            int num = step->num_rows - first < GROUP ? step->num_rows - first : GROUP;
            float *to[GROUP];
            for (int i = 0; i < num; i++) to[i] = step->mixed + (first + i) * step->width + out;
            own->packed = packed + first / GROUP * bytes;
            expand(own, block, &block->gate, &block->up, 0, num, out, out + PANEL < end ? out + PANEL : end, to);
        }
    own->packed = packed;
}

void feed(Worker *own, const Block *block) {
    const Step *step = own->step;
    int hidden = step->model->hidden;
    normalize(own, step->hidden, block->norm, block->eps);
    expand_all(own, block, own->normed, hidden);
    barrier(step->num_threads);
    project(own, &block->down, step->mixed, step->width, step->hidden, hidden, ADD);
    barrier(step->num_threads);
}

/* The experts of a row, best first, and their shares. scores: [expert], overwritten. */
static void choose(const Block *block, float *scores, int32_t *chosen, float *shares) {
    int num = block->experts, active = block->active;
    float ranked[1024];
    if (block->is_sigmoid) {
        for (int i = 0; i < num; i++) scores[i] = sigmoid(scores[i]);
        for (int i = 0; i < num; i++) ranked[i] = scores[i] + at(block->correction, i);
        int groups = block->node_groups, size = num / groups;
        if (block->node_active < groups) { /* only experts of the best groups; a group counts as its two best */
            float heights[256];
            for (int g = 0; g < groups; g++) {
                float best = -INFINITY, second = -INFINITY;
                for (int i = g * size; i < (g + 1) * size; i++) {
                    if (ranked[i] > best) second = best, best = ranked[i];
                    else if (ranked[i] > second) second = ranked[i];
                }
                heights[g] = best + second;
            }
            for (int g = 0; g < groups; g++) {
                int above = 0;
                for (int other = 0; other < groups; other++)
                    above += heights[other] > heights[g] || (heights[other] == heights[g] && other < g);
                if (above >= block->node_active)
                    for (int i = g * size; i < (g + 1) * size; i++) ranked[i] = -INFINITY;
            }
        }
    } else {
        float most = scores[0], sum = 0;
        for (int i = 1; i < num; i++) most = scores[i] > most ? scores[i] : most;
        for (int i = 0; i < num; i++) scores[i] = exponential(scores[i] - most);
        for (int i = 0; i < num; i++) sum += scores[i];
        for (int i = 0; i < num; i++) ranked[i] = scores[i] = scores[i] / sum;
    }
    float sum = 0;
    for (int j = 0; j < active; j++) {
        int best = -1;
        for (int i = 0; i < num; i++) {
            int is_taken = 0;
            for (int before = 0; before < j; before++) is_taken |= chosen[before] == i;
            if (!is_taken && (best < 0 || ranked[i] > ranked[best])) best = i;
        }
        chosen[j] = best;
        sum += shares[j] = scores[best];
    }
    for (int j = 0; j < active; j++) {
        if (block->is_normed) shares[j] /= sum + (block->is_sigmoid ? 1e-20f : 0.0f);
        shares[j] = rounded(shares[j] * block->routed_scale, block->rounds_weights);
    }
}

/* Call the expert's product for this thread's part of all outputs of all chosen experts: blocks of 16 outputs, counted
   through the experts that somebody chose. up: from `x` into `inner`, else from `inner` into `parts`. */
static void for_experts(Worker *own, const Block *block, const float *x, int64_t x_stride, int is_up) {
    const Step *step = own->step;
    const Matrix *shape = is_up ? &block->expert_up : &block->expert_down;
    int active = block->active, num_pairs = step->num_rows * active, blocks = (shape->rows + 15) / 16;
    uint8_t is_chosen[1024] = {0};
    int64_t num_chosen = 0;
    for (int pair = 0; pair < num_pairs; pair++) {
        num_chosen += !is_chosen[own->chosen[pair]];
        is_chosen[own->chosen[pair]] = 1;
    }
    int64_t begin = num_chosen * blocks * own->thread / step->num_threads;
    int64_t end = num_chosen * blocks * (own->thread + 1) / step->num_threads, passed = 0;
    for (int expert = 0; expert < block->experts; expert++) {
        if (!is_chosen[expert]) continue;
        int64_t low = begin - passed > 0 ? begin - passed : 0, high = end - passed < blocks ? end - passed : blocks;
        passed += blocks;
        if (low >= high) continue;
        int from_out = (int)low * 16, to_out = (int)high * 16 < shape->rows ? (int)high * 16 : shape->rows;
        for (int pair = 0; pair < num_pairs;) {
            const float *from[GROUP];
            int mine[GROUP], num = 0;
            for (; pair < num_pairs && num < GROUP; pair++)
                if (own->chosen[pair] == expert) mine[num++] = pair;
            if (!num) break;
            for (int i = 0; i < num; i++)
                from[i] = is_up ? x + mine[i] / active * x_stride : step->inner + mine[i] * step->effn;
            pack(own, from, num, shape->cols, shape->is_bf16);
            for (int out = from_out; out < to_out; out += PANEL) {
                int stop = out + PANEL < to_out ? out + PANEL : to_out;
                float *to[GROUP];
                for (int i = 0; i < num; i++)
                    to[i] = is_up ? step->inner + mine[i] * step->effn + out : step->parts + mine[i] * step->part + out;
                if (is_up) expand(own, block, &block->expert_gate, shape, expert, num, out, stop, to);
                else multiply(own, shape, expert, num, out, stop, to, 0);
            }
        }
    }
}

/* What the experts give each row, times its share, summed: [row, size] of this thread's columns. */
static void combine(Worker *own, const Block *block, int size, float *to, int64_t to_stride, int flags) {
    const Step *step = own->step;
    int active = block->active, is_bf16 = step->model->is_bf16, begin, end;
    share(own, size, &begin, &end);
    for (int row = 0; row < step->num_rows; row++)
        for (int i = begin; i < end; i++) {
            float sum = 0;
            for (int j = 0; j < active; j++) {
                int64_t pair = (int64_t)row * active + j;
                sum += rounded(step->parts[pair * step->part + i] * own->shares[pair], block->rounds_weights);
            }
            float *at_to = to + row * to_stride + i;
            sum = rounded(sum, is_bf16);
            *at_to = flags & ADD ? rounded(*at_to + sum, is_bf16) : sum;
        }
}

void route(Worker *own, const Block *block) {
    const Step *step = own->step;
    const Model *model = step->model;
    int hidden = model->hidden, is_bf16 = model->is_bf16, has_latent = block->latent_in.data != NULL;
    int has_shared = block->up.data != NULL;
    normalize(own, step->hidden, block->norm, block->eps);
    project(own, &block->router, own->normed, hidden, step->scores, block->experts, block->is_sigmoid ? RAW : 0);
    if (has_latent) project(own, &block->latent_in, own->normed, hidden, step->wide, step->width, 0);
    if (has_shared) expand_all(own, block, own->normed, hidden);
    barrier(step->num_threads);
    float scores[1024];
    for (int row = 0; row < step->num_rows; row++) {
        memcpy(scores, step->scores + (int64_t)row * block->experts, sizeof(float) * block->experts);
        choose(block, scores, own->chosen + row * block->active, own->shares + row * block->active);
    }
    if (has_latent) for_experts(own, block, step->wide, step->width, 1);
    else for_experts(own, block, own->normed, hidden, 1);
    barrier(step->num_threads);
    for_experts(own, block, NULL, 0, 0);
    if (!has_latent && !has_shared) {
        barrier(step->num_threads);
        combine(own, block, hidden, step->hidden, hidden, ADD);
        barrier(step->num_threads);
        return;
    }
    /* The experts' sum and the shared expert's output are added before the residual. */
    if (has_shared) project(own, &block->down, step->mixed, step->width, own->step->shared, hidden, 0);
    barrier(step->num_threads);
    if (has_latent) {
        combine(own, block, block->latent_in.rows, step->wide, step->width, 0);
        barrier(step->num_threads);
        project(own, &block->latent_out, step->wide, step->width, step->routed, hidden, 0);
    } else {
        combine(own, block, hidden, step->routed, hidden, 0);
    }
    barrier(step->num_threads);
    int64_t values = (int64_t)step->num_rows * hidden;
    for (int64_t i = values * own->thread / step->num_threads; i < values * (own->thread + 1) / step->num_threads; i++) {
        float sum = step->routed[i] + (has_shared ? step->shared[i] : 0);
        step->hidden[i] = rounded(step->hidden[i] + rounded(sum, is_bf16), is_bf16);
    }
    barrier(step->num_threads);
}

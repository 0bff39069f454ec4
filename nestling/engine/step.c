/* A whole step: embedding, every block, the last norm and the head. */

#include "native.h"

void release_tiles(Worker *own);

enum { ALIGN = 64 };

static int64_t aligned(int64_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* How wide the buffers of a step must be. */
typedef struct {
    int64_t width, part, effn, experts, active, cols, scratch;
} Widths;

static Widths widths(const Model *model, int64_t longest) {
    Widths w = {.width = model->hidden, .cols = model->hidden, .scratch = GROUP * PANEL, .part = 1, .effn = 1, .active = 1};
    for (int i = 0; i < model->num_blocks; i++) {
        const Block *b = model->blocks + i;
        if (b->kind == ATTENTION) {
            w.width = larger(w.width, (int64_t)(b->heads + 2 * b->kv_heads) * b->head);
            w.cols = larger(w.cols, b->out.cols);
            w.scratch = larger(w.scratch, 2 * b->head + GROUP * (b->head + LANES + longest + LANES));
        } else if (b->kind == MAMBA) {
            w.width = larger(w.width, b->q.rows);
            w.cols = larger(w.cols, b->out.cols);
        } else {
            w.width = larger(w.width, b->up.rows);
            w.width = larger(w.width, b->latent_in.rows);
            w.cols = larger(w.cols, larger(b->down.cols, b->expert_down.cols));
            w.cols = larger(w.cols, b->expert_up.cols);
            w.part = larger(w.part, b->expert_down.rows);
            w.effn = larger(w.effn, b->expert_up.rows);
            w.experts = larger(w.experts, b->experts);
            w.active = larger(w.active, b->active);
        }
    }
    w.width = (w.width + 15) / 16 * 16;
    return w;
}

static char *cut(char **rest, int64_t bytes) {
    char *here = *rest;
    *rest += aligned(bytes);
    return here;
}

/* Lay the buffers out from `rest` on. Returns where they end. */
static char *lay_out(Step *step, Worker *workers, const Widths *w, char *rest) {
    int64_t rows = step->num_rows, hidden = step->model->hidden, f = sizeof(float);
    step->width = w->width, step->part = w->part, step->effn = w->effn;
    step->hidden = (float *)cut(&rest, rows * hidden * f);
    step->wide = (float *)cut(&rest, rows * w->width * f);
    step->mixed = (float *)cut(&rest, rows * w->width * f);
    step->parts = (float *)cut(&rest, rows * w->active * w->part * f);
    step->inner = (float *)cut(&rest, rows * w->active * w->effn * f);
    step->scores = (float *)cut(&rest, rows * w->experts * f);
    step->shared = (float *)cut(&rest, rows * hidden * f);
    step->routed = (float *)cut(&rest, rows * hidden * f);
    for (int i = 0; i < step->num_threads; i++) {
        workers[i] = (Worker){.step = step, .thread = i};
        workers[i].packed = cut(&rest, (rows + GROUP - 1) / GROUP * packed_bytes(w->cols));
        workers[i].normed = (float *)cut(&rest, rows * hidden * f);
        workers[i].scratch = (float *)cut(&rest, w->scratch * f);
        workers[i].chosen = (int32_t *)cut(&rest, rows * w->active * sizeof(int32_t));
        workers[i].shares = (float *)cut(&rest, rows * w->active * f);
    }
    return rest;
}

/* Bytes that a step with so many rows needs beside the model; longest: tokens of the longest row, the new one included. */
int64_t workspace_bytes(const Model *model, int num_rows, int num_threads, int64_t longest) {
    Step step = {.model = model, .num_rows = num_rows, .num_threads = num_threads};
    Worker workers[num_threads];
    Widths w = widths(model, longest);
    char *base = (char *)(uintptr_t)ALIGN;
    return lay_out(&step, workers, &w, base) - base + ALIGN;
}

static void work(void *given, int thread) {
    Worker *own = (Worker *)given + thread;
    const Step *step = own->step;
    const Model *model = step->model;
    int hidden = model->hidden;
    for (int row = thread; row < step->num_rows; row += step->num_threads)
        for (int i = 0; i < hidden; i++)
            step->hidden[(int64_t)row * hidden + i] =
                load(model->embedding.data, step->rows[row].token * model->embedding.stride + i, model->embedding.is_bf16);
    barrier(step->num_threads);
    for (int i = 0; i < model->num_blocks; i++) {
        const Block *block = model->blocks + i;
        if (block->kind == ATTENTION) attend(own, block);
        else if (block->kind == MAMBA) scan(own, block);
        else if (block->kind == DENSE) feed(own, block);
        else route(own, block);
    }
    normalize(own, step->hidden, model->norm, model->eps);
    Step last = *step;
    last.num_rows = 0;
    for (int row = 0; row < step->num_rows; row++)
        if (step->rows[row].wants_logits)
            memmove(own->normed + (int64_t)last.num_rows++ * hidden, own->normed + (int64_t)row * hidden, hidden * sizeof(float));
    own->step = &last;
    project(own, &model->head, own->normed, hidden, step->logits, model->vocab, 0);
    release_tiles(own);
}

/* Every row reads its token. logits: [row that wants them, vocab]; workspace: as many bytes as `workspace_bytes` says. */
void take_step(const Model *model, const Row *rows, int num_rows, int num_threads, int64_t longest, float *logits, char *workspace) {
    Step step = {.model = model, .rows = rows, .num_rows = num_rows, .num_threads = num_threads, .longest = longest, .logits = logits};
    for (int row = 1; row < num_rows; row++) step.has_prompts |= rows[row].slots == rows[row - 1].slots;
    Worker workers[num_threads];
    Widths w = widths(model, longest);
    lay_out(&step, workers, &w, (char *)aligned((int64_t)(uintptr_t)workspace));
    run_threads(num_threads, work, workers);
}

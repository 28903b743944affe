// The step of a whole model (model_step.h): what each thread does. Between two phases all threads meet.
#include <math.h>

#include "kernels.h"
#include "model_attend.h"
#include "model_product.h"
#include "model_sample.h"
#include "model_step.h"
#include "model_work.h"
#include "pool.h"
#include "simd.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

// One thread's view of the work: its own rows, and its own copies where rows are few.
struct Worker {
    ModelWork* w;
    int index, count;
    float *x, *h, *cosines;  // rows of the residual stream, of what a product reads, and of rotary angles
    int64_t begin, end;      // this thread's rows: all of them, where it has copies

    explicit Worker(ModelWork* work, int i, int n) : w(work), index(i), count(n) {
        const int64_t copy = w->copies ? i : 0, rows = w->run->rows;
        x = w->x + copy * rows * w->width;
        h = w->h + copy * rows * w->width;
        cosines = w->cosines + copy * rows * w->rotary_width;
        divide();
    }

    void divide() {
        begin = w->copies ? 0 : w->num_active * index / count;
        end = w->copies ? w->num_active : w->num_active * (index + 1) / count;
    }

    void meet() const { pool_barrier(count); }
    void meet_unless_copied() const {
        if (!w->copies) pool_barrier(count);
    }
};

// --- rows -----------------------------------------------------------------------------------------------------------

template <class F>
LINATTN_INLINE void each_vector(int64_t n, F f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, LANES);
    if (i < n) f(i, static_cast<int>(n - i));
}

LINATTN_INLINE vec load_up_to(const float* p, int n) { return n == LANES ? load(p) : load(p, n); }

LINATTN_INLINE void store_up_to(float* p, vec x, int n) {
    if (n == LANES) store(p, x);
    else store(p, x, n);
}

void add(float* x, const float* y, int64_t n) {
    each_vector(n, [&](int64_t i, int m) { store_up_to(x + i, load_up_to(x + i, m) + load_up_to(y + i, m), m); });
}

void normalize(const linattn_norm& norm, const float* x, float* y, int64_t n) {
    const bool centered = norm.kind == LINATTN_LAYER_NORM;
    vec total = zero();
    if (centered) each_vector(n, [&](int64_t i, int m) { total += load_up_to(x + i, m); });
    const float mean = sum(total) / static_cast<float>(n);
    vec squares = zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vec away = load(x + i) - splat(mean);
        squares = fma(away, away, squares);
    }
    float all = sum(squares);
    for (; i < n; i++) all += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / sqrtf(all / static_cast<float>(n) + norm.eps);
    each_vector(n, [&](int64_t j, int m) {
        const vec scaled = (load_up_to(x + j, m) - splat(mean)) * splat(factor) * load_up_to(norm.weight + j, m);
        store_up_to(y + j, norm.bias ? scaled + load_up_to(norm.bias + j, m) : scaled, m);
    });
}

// --- tokens and their places ----------------------------------------------------------------------------------------

// [sin tθ_0, cos tθ_0, …], added to x or put in its place.
void sinusoids(const double* angles, int64_t width, int64_t t, float* x, bool added) {
    for (int64_t i = 0; i < width / 2; i++) {
        const double a = static_cast<double>(t) * angles[i];
        const float s = static_cast<float>(sin(a)), c = static_cast<float>(cos(a));
        x[2 * i] = added ? x[2 * i] + s : s;
        x[2 * i + 1] = added ? x[2 * i + 1] + c : c;
    }
}

int64_t within(int64_t i, int64_t n) { return i < 0 ? 0 : i < n ? i : n - 1; }

void add_place(const linattn_model& model, int64_t t, float* x) {
    switch (model.position) {
        case LINATTN_SINE_CONCAT: sinusoids(model.angles, model.width - model.embedded, t, x + model.embedded, false); break;
        case LINATTN_SINE_ADD: sinusoids(model.angles, model.width, t, x, true); break;
        case LINATTN_LEARNED: add(x, model.tables[0] + within(t, model.places) * model.width, model.width); break;
        case LINATTN_ROW_COLUMN_CHANNEL: {
            t = within(t, model.places);
            const int64_t pixel = t / model.channels;
            const int64_t place[3] = {pixel / model.columns, pixel % model.columns, t % model.channels};
            float* const sums = x;
            each_vector(model.width, [&](int64_t i, int m) {
                vec total = load_up_to(model.tables[0] + place[0] * model.width + i, m);
                total += load_up_to(model.tables[1] + place[1] * model.width + i, m);
                total += load_up_to(model.tables[2] + place[2] * model.width + i, m);
                store_up_to(sums + i, load_up_to(sums + i, m) + total, m);
            });
        }
    }
}

void place_row(const Worker& me, int64_t i) {
    const ModelWork& w = *me.w;
    const linattn_model& model = *w.model;
    const int64_t row = w.active[i], t = w.run->seen[0][row];
    float* x = me.x + i * w.width;
    const float* from = w.y + i * w.width;
    if (model.embedding) from = model.embedding + within(w.run->pending[row], model.values) * model.embedded;
    memcpy(x, from, static_cast<size_t>(model.embedded) * sizeof *x);
    add_place(model, t, x);
    for (int64_t p = 0; w.rotary_width && p < model.blocks[0].key_width / 2; p++) {
        const double a = static_cast<double>(t) * model.rotary_angles[p];
        me.cosines[i * w.rotary_width + p] = static_cast<float>(cos(a));
        me.cosines[i * w.rotary_width + model.blocks[0].key_width / 2 + p] = static_cast<float>(sin(a));
    }
}

// The first norm of a pre-norm block.
const linattn_norm* first_norm(const linattn_block& b) { return b.taps ? &b.conv_norm : &b.norm[0]; }

// x ← x + b + Σ_j w_j x_{t-K+1+j}, each channel by itself: `now` is this token, which may be x.
void convolve(const linattn_block& b, const float* recent, const float* now, float* x, int64_t width) {
    each_vector(width, [&](int64_t i, int m) {
        vec total = load_up_to(b.conv_bias + i, m);
        for (int64_t j = 0; j < b.taps; j++) {
            const float* token = j + 1 < b.taps ? recent + j * width : now;
            total = fma(load_up_to(b.conv + j * width + i, m), load_up_to(token + i, m), total);
        }
        store_up_to(x + i, load_up_to(x + i, m) + total, m);
    });
}

// --- phases: each ends where all threads meet -----------------------------------------------------------------------

void multiply(const Worker& me, const linattn_product& of, const float* x, int64_t x_stride, float* y, int64_t y_stride) {
    product({&of, x, x_stride, y, y_stride, me.w->num_active}, me.index, me.count);
    me.meet();
}

void enter(const Worker& me) {
    const ModelWork& w = *me.w;
    if (!w.model->embedding) {  // one frame for each row, all of them active
        product({&w.model->enter, w.run->frames, w.model->enter.inputs, w.y, w.width, w.num_active}, me.index, me.count);
        me.meet();
    }
    for (int64_t i = me.begin; i < me.end; i++) {
        place_row(me, i);
        const linattn_block& first = w.model->blocks[0];
        if (first.norm_first) normalize(*first_norm(first), me.x + i * w.width, me.h + i * w.width, w.model->width);
    }
    me.meet_unless_copied();
}

void attend_all(const Worker& me, const linattn_block& b) {
    const ModelWork& w = *me.w;
    const int64_t all = w.num_active * b.kv_heads;
    for (int64_t j = all * me.index / me.count; j < all * (me.index + 1) / me.count; j++) {
        const int64_t i = j / b.kv_heads, head = j % b.kv_heads;
        const float *q = w.qkv + i * w.qkv_width, *k = q + b.heads * b.key_width, *v = k + b.kv_heads * b.key_width;
        attend(b, w.active[i], head, q, k, v, me.cosines + i * w.rotary_width, w.heads + i * w.heads_width,
               w.attending + me.index * w.attending_size);
    }
    me.meet();
}

// The recent tokens of each row are read by all threads that hold a copy of it, so they move on after the next meeting.
void convolve_all(const Worker& me, const linattn_block& b) {
    const ModelWork& w = *me.w;
    const int64_t width = w.model->width;
    for (int64_t i = me.begin; i < me.end; i++) {
        float *x = me.x + i * w.width, *h = me.h + i * w.width;
        const float* now = b.norm_first ? h : x;
        if (!w.copies || me.index == 0) memcpy(w.read + i * w.width, now, static_cast<size_t>(width) * sizeof *now);
        convolve(b, b.recent + w.active[i] * (b.taps - 1) * width, now, x, width);
        if (b.norm_first) normalize(b.norm[0], x, h, width);
        else normalize(b.conv_norm, x, x, width);
    }
    me.meet_unless_copied();
}

void move_on(const Worker& me, const linattn_block& b) {
    const ModelWork& w = *me.w;
    const size_t row = static_cast<size_t>(w.model->width) * sizeof(float);
    for (int64_t i = me.index; b.taps > 1 && i < w.num_active; i += me.count) {
        float* recent = b.recent + w.active[i] * (b.taps - 1) * w.model->width;
        memmove(recent, recent + w.model->width, (b.taps - 2) * row);
        memcpy(recent + (b.taps - 2) * w.model->width, w.read + i * w.width, row);
    }
}

// x ← x + y, normalised by `after` if it is given; and h, what `before` makes of it, where the next part wants that.
void add_and_normalize(const Worker& me, const linattn_norm* after, const linattn_norm* before) {
    const ModelWork& w = *me.w;
    for (int64_t i = me.begin; i < me.end; i++) {
        float *x = me.x + i * w.width, *h = me.h + i * w.width;
        add(x, w.y + i * w.width, w.model->width);
        if (after) normalize(*after, x, x, w.model->width);
        if (before) normalize(*before, x, h, w.model->width);
    }
    me.meet_unless_copied();
}

void run_block(const Worker& me, const linattn_block& b, const linattn_norm* next) {
    const ModelWork& w = *me.w;
    const float* reads = b.norm_first ? me.h : me.x;
    if (b.taps) convolve_all(me, b);
    multiply(me, b.qkv, reads, w.width, w.qkv, w.qkv_width);
    move_on(me, b);
    attend_all(me, b);
    multiply(me, b.out, w.heads, w.heads_width, w.y, w.width);
    add_and_normalize(me, b.norm_first ? nullptr : &b.norm[0], b.norm_first ? &b.norm[1] : nullptr);
    multiply(me, b.enter, reads, w.width, w.hidden, w.hidden_width);
    multiply(me, b.leave, w.hidden, w.hidden_width, w.y, w.width);
    add_and_normalize(me, b.norm_first ? nullptr : &b.norm[1], next);
}

void run_head(const Worker& me) {
    const ModelWork& w = *me.w;
    multiply(me, w.model->head, me.h, w.width, w.params, w.params_width);
    const int64_t rows = w.num_active, outputs = w.model->head.outputs;
    double* work = w.sampling + me.index * w.sampling_size;
    for (int64_t i = rows * me.index / me.count; i < rows * (me.index + 1) / me.count; i++) {
        float* params = w.params + i * w.params_width;
        if (w.run->made) {
            const int64_t bad = not_finite(params, outputs);
            const double u = w.run->uniforms[w.run->done * w.run->rows + w.active[i]];
            if (bad) __atomic_fetch_add(&me.w->not_finite, bad, __ATOMIC_RELAXED);
            else w.drawn[i] = sample(*w.model, *w.run, params, u, work);
        }
        if (w.model->head_kind == LINATTN_LOG_SOFTMAX) log_softmax(params, outputs);
        if (w.run->params) memcpy(w.run->params + w.active[i] * outputs, params, static_cast<size_t>(outputs) * sizeof *params);
    }
    me.meet();
}

// One thread enters what all have made. Returns with nothing changed where there was nothing to draw from.
void commit(ModelWork* w) {
    linattn_run& run = *w->run;
    if (w->not_finite) {
        w->num_active = 0;
        return;
    }
    int64_t* made = run.made ? run.made + run.done * run.rows : nullptr;
    for (int64_t b = 0; made && b < run.rows; b++) made[b] = -1;
    int64_t still = 0;
    for (int64_t i = 0; i < w->num_active; i++) {
        const int64_t row = w->active[i];
        for (int64_t s = 0; s < run.num_seen; s++) run.seen[s][row]++;
        run.left[row]--;
        if (made) {
            made[row] = run.pending[row] = w->drawn[i];
            for (int64_t s = 0; s < run.num_stop; s++)
                if (run.stop[s] == w->drawn[i]) run.left[row] = 0;
        }
        if (run.left[row] > 0) w->active[still++] = row;
    }
    w->num_active = still;
    run.done++;
}

}  // namespace

void attend_run(void* context, int index, int count) {
    const AttendWork& w = *static_cast<const AttendWork*>(context);
    const linattn_block& b = *w.block;
    const int64_t all = w.rows * b.kv_heads;
    for (int64_t j = all * index / count; j < all * (index + 1) / count; j++) {
        const int64_t row = j / b.kv_heads, head = j % b.kv_heads;
        const float* k = w.k + row * b.kv_heads * b.key_width;
        const float* v = w.v + row * b.kv_heads * b.value_width;
        attend(b, row, head, w.q + row * b.heads * b.key_width, k, v, nullptr, w.out + row * b.heads * b.value_width,
               w.memory + index * w.memory_size);
    }
}

void model_run(void* context, int index, int count) {
    ModelWork* w = static_cast<ModelWork*>(context);
    const linattn_model& model = *w->model;
    Worker me(w, index, count);
    for (int64_t step = 0; step < w->run->steps && w->num_active > 0; step++) {
        me.divide();
        enter(me);
        for (int64_t i = 0; i < model.num_blocks; i++) {
            const linattn_norm* next = &model.norm;
            if (i + 1 < model.num_blocks) next = model.blocks[i + 1].norm_first ? first_norm(model.blocks[i + 1]) : nullptr;
            run_block(me, model.blocks[i], next);
        }
        run_head(me);
        if (index == 0) commit(w);
        me.meet();
    }
}

}  // namespace LINATTN_ISA
}  // namespace linattn

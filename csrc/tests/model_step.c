/* A model's step through its C interface, beside the same layers in double precision, as operator.c does it for the
 * operator: two blocks of attention and feed-forward, the second with a short convolution, around an embedding and a
 * head, several tokens in a row. Weights of
 * each kind are rounded once, and both sides read what was rounded.
 *
 * Axes:  B rows   W width   F hidden   V values of a token   H heads   K key/value heads   D key width   M value width
 */
#include "../model_step.h"

#include "tests.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { W = 20, F = 70, V = 11, H = 4, K = 2, D = 6, M = 5, BLOCKS = 2, TAPS = 3, TOKENS = 5, MOST_ROWS = 9 };

/* Sums of up to 70 terms, in two blocks and five steps; the logits are of size 1. */
static const double BOUND = 1e-5;

static uint64_t seed = 1;

static double uniform(void) { /* in [-1, 1) */
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) / 4503599627370496.0 - 1;
}

static void* memory(size_t bytes) {
    void* p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) exit(2);
    memset(p, 0, (bytes + 63) / 64 * 64);
    return p;
}

typedef struct {
    linattn_product seen;
    double *weight, *bias; /* (outputs, inputs) and (outputs,) */
} Product;

typedef struct {
    linattn_norm seen;
    double weight[W], bias[W];
} Norm;

typedef struct {
    Norm norm[2];
    Product qkv, out, enter, leave;
    double kv[MOST_ROWS][K][D][M], z[MOST_ROWS][K][D];
    Norm conv_norm;
    double conv[TAPS][W], conv_bias[W], recent[MOST_ROWS][TAPS][W]; /* the last of them is the token at hand */
} Block;

/* One weight as the library reads it, at its place in the panels; what it stands for is returned. */
static double put(linattn_product* p, int64_t at, double x, float scale) {
    const float value = (float)x;
    uint32_t bits;
    if (p->kind == LINATTN_FP32) return ((float*)p->weight)[at] = value;
    if (p->kind == LINATTN_INT8) return (double)(((int8_t*)p->weight)[at] = (int8_t)lrint(x / scale)) * scale;
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t*)p->weight)[at] = (uint16_t)(bits >> 16);
    bits &= 0xffff0000u;
    float rounded;
    memcpy(&rounded, &bits, sizeof rounded);
    return rounded;
}

static Product make_product(int64_t inputs, int64_t outputs, int32_t kind, int32_t activation) {
    const int64_t padded = (outputs + LINATTN_PANEL - 1) / LINATTN_PANEL * LINATTN_PANEL;
    const size_t bytes[] = {4, 2, 1};
    const double size = 1.5 / sqrt((double)inputs);
    const float scale = (float)(size / 127);
    float *scales = memory((size_t)padded * 4), *bias = memory((size_t)padded * 4);
    Product p = {{memory((size_t)(padded * inputs) * bytes[kind]), scales, bias, inputs, outputs, kind, activation},
                 memory((size_t)(outputs * inputs) * 8), memory((size_t)outputs * 8)};
    if (kind != LINATTN_INT8) p.seen.scale = NULL;
    for (int64_t o = 0; o < outputs; o++) {
        scales[o] = scale;
        p.bias[o] = bias[o] = (float)(uniform() / 4);
        for (int64_t i = 0; i < inputs; i++) {
            const int64_t at = (o / LINATTN_PANEL * inputs + i) * LINATTN_PANEL + o % LINATTN_PANEL;
            p.weight[o * inputs + i] = put(&p.seen, at, size * uniform(), scale);
        }
    }
    if (kind != LINATTN_INT8) free(scales);
    return p;
}

static void release(Product* p) {
    free((void*)p->seen.weight), free((void*)p->seen.scale), free((void*)p->seen.bias);
    free(p->weight), free(p->bias);
}

static void make_norm(Norm* norm, int32_t kind) {
    float *weight = memory(W * 4), *bias = memory(W * 4);
    for (int i = 0; i < W; i++) {
        norm->weight[i] = weight[i] = (float)(1 + uniform() / 4);
        norm->bias[i] = bias[i] = (float)(uniform() / 4);
    }
    norm->seen = (linattn_norm){weight, bias, kind, 1e-5f};
}

static void make_convolution(Block* b, linattn_block* seen, int rows) {
    float *weight = memory(TAPS * W * 4), *bias = memory(W * 4);
    for (int i = 0; i < TAPS * W; i++) (&b->conv[0][0])[i] = weight[i] = (float)uniform();
    for (int i = 0; i < W; i++) b->conv_bias[i] = bias[i] = (float)uniform();
    make_norm(&b->conv_norm, b->norm[0].seen.kind);
    seen->conv_norm = b->conv_norm.seen, seen->conv = weight, seen->conv_bias = bias, seen->taps = TAPS;
    seen->recent = memory((size_t)(rows * (TAPS - 1) * W) * 4);
}

static void make_block(Block* b, linattn_block* seen, int kind, int norm_first, int rows) {
    memset(b, 0, sizeof *b);
    for (int i = 0; i < 2; i++) make_norm(&b->norm[i], norm_first ? LINATTN_RMS_NORM : LINATTN_LAYER_NORM);
    b->qkv = make_product(W, H * D + K * (D + M), kind, LINATTN_LINEAR);
    b->out = make_product(H * M, W, kind, LINATTN_LINEAR);
    b->enter = make_product(W, F, kind, LINATTN_RELU_UNIT);
    b->leave = make_product(F, W, kind, LINATTN_LINEAR);
    memset(seen, 0, sizeof *seen);
    for (int i = 0; i < 2; i++) seen->norm[i] = b->norm[i].seen;
    seen->qkv = b->qkv.seen, seen->out = b->out.seen, seen->enter = b->enter.seen, seen->leave = b->leave.seen;
    const size_t sums = (size_t)(rows * K * D) * 4;
    seen->kv = memory(sums * M), seen->kv_low = memory(sums * M), seen->z = memory(sums), seen->z_low = memory(sums);
    seen->heads = H, seen->kv_heads = K, seen->key_width = D, seen->value_width = M;
    seen->map = LINATTN_ELU, seen->norm_first = norm_first, seen->root_scale = 1;
}

static void release_block(Block* b, linattn_block* seen) {
    if (seen->taps) free((void*)b->conv_norm.seen.weight), free((void*)b->conv_norm.seen.bias);
    free((void*)seen->conv), free((void*)seen->conv_bias), free(seen->recent);
    release(&b->qkv), release(&b->out), release(&b->enter), release(&b->leave);
    free(seen->kv), free(seen->kv_low), free(seen->z), free(seen->z_low);
    for (int i = 0; i < 2; i++) free((void*)b->norm[i].seen.weight), free((void*)b->norm[i].seen.bias);
}

/* The definition. */

static void multiply(const Product* p, const double* x, double* y) {
    for (int64_t o = 0; o < p->seen.outputs; o++) {
        y[o] = p->bias[o];
        for (int64_t i = 0; i < p->seen.inputs; i++) y[o] += p->weight[o * p->seen.inputs + i] * x[i];
        if (p->seen.activation == LINATTN_RELU_UNIT && y[o] < 0) y[o] = 0;
    }
}

static void normalize(const Norm* norm, const double* x, double* y) {
    double mean = 0, square = 0;
    for (int i = 0; i < W && norm->seen.kind == LINATTN_LAYER_NORM; i++) mean += x[i] / W;
    for (int i = 0; i < W; i++) square += (x[i] - mean) * (x[i] - mean) / W;
    for (int i = 0; i < W; i++) y[i] = (x[i] - mean) / sqrt(square + norm->seen.eps) * norm->weight[i] + norm->bias[i];
}

static double phi(double x) { return x > 0 ? x + 1 : exp(x); }

static void attend(Block* b, int row, const double* qkv, double* out) {
    const double *keys = qkv + H * D, *values = keys + K * D;
    for (int head = 0; head < K; head++)
        for (int d = 0; d < D; d++) {
            b->z[row][head][d] += phi(keys[head * D + d]);
            for (int m = 0; m < M; m++) b->kv[row][head][d][m] += phi(keys[head * D + d]) * values[head * M + m];
        }
    for (int h = 0; h < H; h++) {
        const int head = h / (H / K);
        double den = 0;
        for (int m = 0; m < M; m++) out[h * M + m] = 0;
        for (int d = 0; d < D; d++) {
            const double f = phi(qkv[h * D + d]);
            den += f * b->z[row][head][d];
            for (int m = 0; m < M; m++) out[h * M + m] += f * b->kv[row][head][d][m];
        }
        for (int m = 0; m < M; m++) out[h * M + m] /= den;
    }
}

static void add_part(double* x, const double* y, const Norm* norm, int norm_first) {
    for (int i = 0; i < W; i++) x[i] += y[i];
    if (!norm_first) normalize(norm, x, x);
}

static void convolve(Block* b, int row, int norm_first, double* x) {
    double(*recent)[W] = b->recent[row];
    memmove(recent[0], recent[1], (TAPS - 1) * sizeof *recent);
    memcpy(recent[TAPS - 1], x, sizeof *recent);
    if (norm_first) normalize(&b->conv_norm, x, recent[TAPS - 1]);
    double y[W];
    for (int i = 0; i < W; i++) {
        y[i] = b->conv_bias[i];
        for (int j = 0; j < TAPS; j++) y[i] += b->conv[j][i] * recent[j][i];
    }
    add_part(x, y, &b->conv_norm, norm_first);
}

static void step(Block* blocks, const Norm* last, const Product* head, int norm_first, int row, double* x,
                 double* logits) {
    double h[W], qkv[H * D + K * (D + M)], heads[H * M], hidden[F], y[W];
    for (int i = 0; i < BLOCKS; i++) {
        Block* b = &blocks[i];
        if (b->conv_norm.seen.weight) convolve(b, row, norm_first, x);
        memcpy(h, x, sizeof h);
        if (norm_first) normalize(&b->norm[0], x, h);
        multiply(&b->qkv, h, qkv);
        attend(b, row, qkv, heads);
        multiply(&b->out, heads, y);
        add_part(x, y, &b->norm[0], norm_first);
        memcpy(h, x, sizeof h);
        if (norm_first) normalize(&b->norm[1], x, h);
        multiply(&b->enter, h, hidden);
        multiply(&b->leave, hidden, y);
        add_part(x, y, &b->norm[1], norm_first);
    }
    normalize(last, x, h);
    multiply(head, h, logits);
}

/* The worst difference of the logits, over all rows and tokens. */
static double try_model(int kind, int norm_first, int rows, int threads) {
    static Block blocks[BLOCKS];
    linattn_block seen[BLOCKS];
    linattn_model model;
    linattn_run run;
    Norm last;
    int64_t pending[MOST_ROWS], places[MOST_ROWS] = {0}, left[MOST_ROWS], *all_places[] = {places};
    float *embedding = memory(V * W * 4), *params = memory((size_t)(rows * V) * 4);
    double worst = 0;
    for (int i = 0; i < V * W; i++) embedding[i] = (float)uniform();
    for (int i = 0; i < BLOCKS; i++) make_block(&blocks[i], &seen[i], kind, norm_first, rows);
    make_convolution(&blocks[BLOCKS - 1], &seen[BLOCKS - 1], rows);
    make_norm(&last, LINATTN_LAYER_NORM);
    Product head = make_product(W, V, kind, LINATTN_LINEAR);
    memset(&model, 0, sizeof model), memset(&run, 0, sizeof run);
    model.blocks = seen, model.num_blocks = BLOCKS, model.width = model.embedded = W, model.values = V;
    model.embedding = embedding, model.norm = last.seen, model.head = head.seen;
    run.rows = rows, run.steps = 1, run.pending = pending, run.seen = all_places, run.num_seen = 1, run.left = left;
    run.params = params, run.temperature = 1, run.top_p = 1;
    for (int t = 0; t < TOKENS; t++) {
        for (int b = 0; b < rows; b++) pending[b] = (7 * t + 3 * b) % V, left[b] = 2;
        if (linattn_model_run(&model, &run, threads) != 0 || run.done != 1) worst = INFINITY;
        for (int b = 0; b < rows; b++) {
            double x[W], logits[V];
            for (int i = 0; i < W; i++) x[i] = embedding[pending[b] * W + i];
            step(blocks, &last, &head, norm_first, b, x, logits);
            for (int v = 0; v < V; v++) {
                const double error = fabs(params[b * V + v] - logits[v]);
                worst = error >= 0 ? fmax(worst, error) : INFINITY; /* NaN fails, and is not forgotten */
            }
        }
    }
    for (int i = 0; i < BLOCKS; i++) release_block(&blocks[i], &seen[i]);
    release(&head);
    free(embedding), free(params), free((void*)last.seen.weight), free((void*)last.seen.bias);
    return worst;
}

int test_model_step(void) {
    static const char* const KINDS[] = {"fp32", "bf16", "int8"};
    int failures = 0;
    printf("  a model's step:");
    for (int kind = 0; kind < 3; kind++) {
        double worst = 0;
        for (int norm_first = 0; norm_first < 2; norm_first++)
            for (int rows = 1; rows <= MOST_ROWS; rows += 4)
                worst = fmax(worst, try_model(kind, norm_first, rows, 1 + rows / 3));
        printf(" %s %.1e", KINDS[kind], worst);
        failures += !(worst <= BOUND);
    }
    printf(", %s\n", failures ? "FAILED" : "right");
    return failures;
}

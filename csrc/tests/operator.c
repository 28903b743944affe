/* The operator through its C interface, beside the definition in double precision: for machines without torch (an
 * emulator) and for sanitizers. The tests of the package hold the full table; this is the part that needs no Python.
 *
 *     out_i = Σ_{j ≤ i} (φ(q_i)·φ(k_j)) v_j / Σ_{j ≤ i} φ(q_i)·φ(k_j)        and the gradients of it, written out
 *
 * Every tensor lies in memory of exactly its size, so that one number too far is seen. Errors are relative to the
 * largest number of a tensor.
 *
 * Axes:  B batch   T queries   U keys   H heads   K key/value heads   D features   M values   R states
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../linattn.h"
#include "tests.h"

typedef struct {
    int64_t B, T, U, H, K, D, M;
    int map, causal, normalize, state, narrow, packed, lengths; /* packed: B = 1, three sequences, one of them empty */
    double eps;
    int threads;
} Case;

/* Odd sizes; both sides of a chunk (64) and of the shortest vector (4) and longest (16); each map; each option. */
static const Case CASES[] = {
    {1, 1, 1, 1, 1, 1, 1, LINATTN_ELU, 1, 1, 0, 0, 0, 0, -1, 1},
    {2, 15, 15, 2, 1, 3, 5, LINATTN_ELU, 1, 1, 1, 0, 0, 0, -1, 1},
    {2, 33, 33, 4, 2, 16, 17, LINATTN_SOFTPLUS, 1, 1, 1, 0, 0, 1, -1, 2},
    {1, 64, 64, 2, 2, 64, 64, LINATTN_ELU, 1, 1, 0, 0, 0, 0, -1, 2},
    {2, 100, 100, 2, 2, 32, 33, LINATTN_EXP, 1, 1, 1, 0, 0, 1, -1, 3},
    {1, 200, 200, 3, 1, 31, 64, LINATTN_RELU, 1, 1, 1, 0, 0, 0, -1, 2},
    {1, 130, 130, 2, 2, 20, 12, LINATTN_SQUARED_RELU, 1, 1, 0, 0, 1, 0, -1, 2},
    {1, 65, 65, 2, 1, 8, 7, LINATTN_IDENTITY, 1, 0, 1, 0, 0, 0, -1, 1},
    {1, 65, 65, 2, 1, 8, 7, LINATTN_IDENTITY, 1, 1, 1, 0, 0, 0, 0.5, 1},
    {2, 40, 70, 2, 2, 24, 40, LINATTN_ELU, 0, 1, 1, 0, 0, 1, -1, 2},
    {1, 90, 90, 2, 1, 10, 9, LINATTN_ELU, 0, 1, 0, 0, 1, 0, -1, 2},
    {2, 100, 100, 2, 1, 64, 64, LINATTN_ELU, 1, 1, 1, 1, 0, 1, -1, 2},
    {1, 33, 33, 2, 2, 15, 31, LINATTN_EXP, 0, 1, 0, 1, 1, 0, -1, 1},
    /* More threads than heads: sequences are cut into parts. */
    {1, 2100, 2100, 2, 1, 6, 5, LINATTN_RELU, 1, 1, 1, 0, 0, 0, -1, 2},
    {1, 2100, 2100, 1, 1, 6, 5, LINATTN_RELU, 1, 1, 0, 1, 0, 0, -1, 3},
    {1, 100, 2100, 2, 1, 6, 5, LINATTN_RELU, 0, 1, 1, 0, 0, 0, -1, 3},
    {0, 5, 5, 1, 1, 4, 4, LINATTN_ELU, 1, 1, 0, 0, 0, 0, -1, 1},
    {2, 0, 0, 1, 1, 4, 4, LINATTN_ELU, 1, 1, 1, 0, 0, 0, -1, 1},
};

/* Errors are a few roundings of sums of up to 200 terms. bf16: half a unit of 8 bits, and sums. Zeros would err by 1. */
static const double BOUND[] = {1e-5, 1.2e-2};

enum { OUT, KV_OUT, Z_OUT, DQ, DK, DV, DKV, DZ, MADE };
static const char* const NAMES[MADE] = {"out", "kv", "z", "dq", "dk", "dv", "dkv", "dz"};

static uint64_t seed = 1;

static double normal(void) { /* about: the sum of twelve uniform numbers */
    double total = -6;
    for (int i = 0; i < 12; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        total += (double)(seed >> 11) / 9007199254740992.0;
    }
    return total;
}

/* A tensor: what the library sees (fp32 or bf16), and the same numbers in double precision. */
typedef struct {
    int64_t n;
    int narrow;
    void* seen;
    double* exact;
} Tensor;

static double read_one(const Tensor* x, int64_t i) {
    if (!x->narrow) return ((const float*)x->seen)[i];
    const uint32_t bits = (uint32_t)((const uint16_t*)x->seen)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void* memory(int64_t bytes) {
    void* p = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (!p) exit(2);
    return p;
}

/* What is not written by the library stays 0, as in the definition. */
static Tensor blank(int64_t n, int narrow) {
    Tensor x = {n, narrow, memory(n * (narrow ? 2 : 4)), memory(n * 8)};
    memset(x.seen, 0, (size_t)(n * (narrow ? 2 : 4)));
    for (int64_t i = 0; i < n; i++) x.exact[i] = 0;
    return x;
}

static Tensor random_tensor(int64_t n, int narrow, double low) {
    Tensor x = blank(n, narrow);
    for (int64_t i = 0; i < n; i++) {
        const float value = (float)(low > 0 ? low + fabs(normal()) : normal());
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (narrow) ((uint16_t*)x.seen)[i] = (uint16_t)(bits >> 16);
        else ((float*)x.seen)[i] = value;
        x.exact[i] = read_one(&x, i);
    }
    return x;
}

static void release(Tensor* x) {
    free(x->seen);
    free(x->exact);
}

static double feature(int map, double x) {
    switch (map) {
        case LINATTN_ELU: return x > 0 ? x + 1 : exp(x);
        case LINATTN_RELU: return x > 0 ? x : 0;
        case LINATTN_SQUARED_RELU: return x > 0 ? x * x : 0;
        case LINATTN_SOFTPLUS: return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
        case LINATTN_EXP: return exp(x < 20 ? x : 20);
        default: return x;
    }
}

static double slope(int map, double x) {
    switch (map) {
        case LINATTN_ELU: return x > 0 ? 1 : exp(x);
        case LINATTN_RELU: return x > 0;
        case LINATTN_SQUARED_RELU: return x > 0 ? 2 * x : 0;
        case LINATTN_SOFTPLUS: return 1 / (1 + exp(-x));
        case LINATTN_EXP: return x <= 20 ? exp(x) : 0;
        default: return 1;
    }
}

/* One call: what goes in, what comes out, and one sequence and head of it at a time. */
typedef struct {
    Case c;
    int64_t R;
    double root_scale;
    Tensor q, k, v, kv, z, dout, dkv_out, dz_out, made[MADE];
    int64_t *lengths, *cuts;
} Trial;

typedef struct {
    int64_t state, row, begin, queries, keys, head, group; /* head: of the keys; group: the query head */
} Part;

static double* at(Tensor* x, int64_t row, int64_t times, int64_t time, int64_t heads, int64_t head, int64_t width) {
    return x->exact + ((row * times + time) * heads + head) * width;
}

static double* key(Trial* t, Tensor* x, const Part* p, int64_t j, int64_t width) {
    return at(x, p->row, t->c.U, p->begin + j, t->c.K, p->head, width);
}

static double* query(Trial* t, Tensor* x, const Part* p, int64_t i, int64_t width) {
    return at(x, p->row, t->c.T, p->begin + i, t->c.H, p->group, width);
}

static double* sums(Trial* t, Tensor* x, const Part* p) {
    return x->exact + (p->state * t->c.K + p->head) * t->c.D * t->c.M;
}

static double* norms(Trial* t, Tensor* x, const Part* p) { return x->exact + (p->state * t->c.K + p->head) * t->c.D; }

static double phi(Trial* t, const double* x, int64_t d) { return feature(t->c.map, t->root_scale * x[d]); }

static double weight(Trial* t, const double* q, const double* k) {
    double total = 0;
    for (int64_t d = 0; d < t->c.D; d++) total += phi(t, q, d) * phi(t, k, d);
    return total;
}

/* The state after the last key. */
static void define_state(Trial* t, const Part* p) {
    const int64_t D = t->c.D, M = t->c.M;
    double *kv = sums(t, &t->made[KV_OUT], p), *z = norms(t, &t->made[Z_OUT], p);
    for (int64_t i = 0; i < D * M; i++) kv[i] = t->c.state ? sums(t, &t->kv, p)[i] : 0;
    for (int64_t d = 0; d < D; d++) z[d] = t->c.state ? norms(t, &t->z, p)[d] : 0;
    for (int64_t j = 0; j < p->keys; j++)
        for (int64_t d = 0; d < D; d++) {
            const double f = phi(t, key(t, &t->k, p, j, D), d);
            z[d] += f;
            for (int64_t m = 0; m < M; m++) kv[d * M + m] += f * key(t, &t->v, p, j, M)[m];
        }
}

/* Output i, and what a change of its numerator and its divisor is worth: dnum (M,) and the number returned. */
static double define_output(Trial* t, const Part* p, int64_t i, double* dnum) {
    const int64_t D = t->c.D, M = t->c.M;
    const double* q = query(t, &t->q, p, i, D);
    double *out = query(t, &t->made[OUT], p, i, M), *dout = query(t, &t->dout, p, i, M), den = 0, dden = 0;
    for (int64_t m = 0; m < M; m++) out[m] = 0;
    for (int64_t d = 0; t->c.state && d < D; d++) {
        den += phi(t, q, d) * norms(t, &t->z, p)[d];
        for (int64_t m = 0; m < M; m++) out[m] += phi(t, q, d) * sums(t, &t->kv, p)[d * M + m];
    }
    for (int64_t j = 0; j < p->keys && (!t->c.causal || j <= i); j++) {
        const double a = weight(t, q, key(t, &t->k, p, j, D));
        den += a;
        for (int64_t m = 0; m < M; m++) out[m] += a * key(t, &t->v, p, j, M)[m];
    }
    int follows = t->c.normalize && den != 0;
    if (t->c.eps >= 0 && fabs(den) < t->c.eps) den = den < 0 ? -t->c.eps : t->c.eps, follows = 0;
    const double inverse = !t->c.normalize ? 1 : den == 0 ? 0 : 1 / den;
    for (int64_t m = 0; m < M; m++) {
        out[m] *= inverse;
        dnum[m] = dout[m] * inverse;
        if (follows) dden -= dnum[m] * out[m];
    }
    return dden;
}

/* φ(q)·(what q meets: da) and φ(k), each times the slope of the map at the number itself. */
static void add_slopes(Trial* t, const double* x, const double* da, double* dx) {
    for (int64_t d = 0; d < t->c.D; d++) dx[d] += da[d] * t->root_scale * slope(t->c.map, t->root_scale * x[d]);
}

static void define_pair(Trial* t, const Part* p, int64_t i, int64_t j, const double* dnum, double dden) {
    const int64_t D = t->c.D, M = t->c.M;
    const double *q = query(t, &t->q, p, i, D), *k = key(t, &t->k, p, j, D), *v = key(t, &t->v, p, j, M);
    const double a = weight(t, q, k);
    double da = dden, each[256] = {0};
    for (int64_t m = 0; m < M; m++) {
        da += dnum[m] * v[m];
        key(t, &t->made[DV], p, j, M)[m] += a * dnum[m];
    }
    for (int64_t d = 0; d < D; d++) each[d] = da * phi(t, k, d);
    add_slopes(t, q, each, query(t, &t->made[DQ], p, i, D));
    for (int64_t d = 0; d < D; d++) each[d] = da * phi(t, q, d);
    add_slopes(t, k, each, key(t, &t->made[DK], p, j, D));
}

static void define_query(Trial* t, const Part* p, int64_t i) {
    const int64_t D = t->c.D, M = t->c.M;
    double dnum[256] = {0}, each[256] = {0};
    const double* q = query(t, &t->q, p, i, D);
    const double dden = define_output(t, p, i, dnum);
    for (int64_t d = 0; t->c.state && d < D; d++) {
        each[d] = dden * norms(t, &t->z, p)[d];
        norms(t, &t->made[DZ], p)[d] += dden * phi(t, q, d);
        for (int64_t m = 0; m < M; m++) {
            each[d] += dnum[m] * sums(t, &t->kv, p)[d * M + m];
            sums(t, &t->made[DKV], p)[d * M + m] += dnum[m] * phi(t, q, d);
        }
    }
    if (t->c.state) add_slopes(t, q, each, query(t, &t->made[DQ], p, i, D));
    for (int64_t j = 0; j < p->keys && (!t->c.causal || j <= i); j++) define_pair(t, p, i, j, dnum, dden);
}

/* What the gradients of the state that was returned are worth to a key: once for all query heads of its group. */
static void define_end(Trial* t, const Part* p) {
    const int64_t D = t->c.D, M = t->c.M;
    const double *dkv = sums(t, &t->dkv_out, p), *dz = norms(t, &t->dz_out, p);
    for (int64_t j = 0; j < p->keys; j++) {
        const double *k = key(t, &t->k, p, j, D), *v = key(t, &t->v, p, j, M);
        double each[256] = {0};
        for (int64_t d = 0; d < D; d++) {
            each[d] = t->c.normalize ? dz[d] : 0;
            for (int64_t m = 0; m < M; m++) {
                each[d] += dkv[d * M + m] * v[m];
                key(t, &t->made[DV], p, j, M)[m] += dkv[d * M + m] * phi(t, k, d);
            }
        }
        add_slopes(t, k, each, key(t, &t->made[DK], p, j, D));
    }
    for (int64_t i = 0; i < D * M; i++) sums(t, &t->made[DKV], p)[i] += dkv[i];
    for (int64_t d = 0; d < D; d++) norms(t, &t->made[DZ], p)[d] += dz[d];
}

static Part part_of(const Trial* t, int64_t state, int64_t head) {
    Part p = {state, state, 0, t->c.T, t->c.U, head, 0};
    if (t->cuts) {
        p.row = 0;
        p.begin = t->cuts[state];
        p.queries = p.keys = t->cuts[state + 1] - p.begin;
    } else if (t->lengths) {
        p.keys = t->lengths[state];
        if (t->c.causal) p.queries = p.keys;
    }
    return p;
}

static void define(Trial* t) {
    const int64_t group = t->c.H / t->c.K;
    for (int64_t state = 0; state < t->R; state++)
        for (int64_t head = 0; head < t->c.K; head++) {
            Part p = part_of(t, state, head);
            define_state(t, &p);
            for (p.group = head * group; p.group < (head + 1) * group; p.group++)
                for (int64_t i = 0; i < p.queries; i++) define_query(t, &p, i);
            define_end(t, &p);
        }
}

static void prepare(Trial* t, const Case* c) {
    memset(t, 0, sizeof *t);
    t->c = *c;
    t->R = c->packed ? 3 : c->B;
    t->root_scale = 0.8;
    const int64_t z = t->R * c->K * c->D, kv = z * c->M, q = c->B * c->T * c->H, k = c->B * c->U * c->K;
    const int64_t sizes[MADE] = {q * c->M, kv, z, q * c->D, k * c->D, k * c->M, kv, z};
    for (int i = 0; i < MADE; i++) t->made[i] = blank(sizes[i], c->narrow && (i == OUT || (i >= DQ && i <= DV)));
    t->q = random_tensor(q * c->D, c->narrow, 0);
    t->k = random_tensor(k * c->D, c->narrow, 0);
    t->v = random_tensor(k * c->M, c->narrow, 0);
    t->kv = random_tensor(kv, 0, 0);
    t->z = random_tensor(z, 0, 1); /* sums of positive features */
    t->dout = random_tensor(q * c->M, c->narrow, 0);
    t->dkv_out = random_tensor(kv, 0, 0);
    t->dz_out = random_tensor(z, 0, 0);
    if (c->packed) {
        t->cuts = memory(4 * 8);
        t->cuts[0] = 0, t->cuts[1] = t->cuts[2] = c->T / 3, t->cuts[3] = c->T - 1; /* the last token is padding */
    }
    if (c->lengths) {
        t->lengths = memory(c->B * 8);
        for (int64_t b = 0; b < c->B; b++) t->lengths[b] = b ? c->U / 3 : c->U;
    }
}

static void strides_of(int64_t* strides, int64_t times, int64_t heads, int64_t width) {
    strides[0] = times * heads * width, strides[1] = heads * width, strides[2] = width;
}

/* The two calls; the low parts of the state that is returned are added to it. */
static int32_t call(Trial* t) {
    const Case* c = &t->c;
    linattn_attention a;
    memset(&a, 0, sizeof a);
    a.B = c->B, a.T = c->T, a.U = c->U, a.H = c->H, a.K = c->K, a.D = c->D, a.M = c->M, a.R = t->R;
    strides_of(a.q_strides, c->T, c->H, c->D);
    strides_of(a.k_strides, c->U, c->K, c->D);
    strides_of(a.v_strides, c->U, c->K, c->M);
    strides_of(a.dout_strides, c->T, c->H, c->M);
    a.map = c->map, a.causal = c->causal, a.normalize = c->normalize, a.threads = c->threads;
    a.narrow_features = a.narrow_values = c->narrow;
    a.root_scale = t->root_scale, a.eps = c->eps;
    a.q = t->q.seen, a.k = t->k.seen, a.v = t->v.seen;
    a.lengths = t->lengths, a.cu_seqlens = t->cuts;
    a.out = t->made[OUT].seen;
    Tensor kv_low = blank(t->kv.n, 0), z_low = blank(t->z.n, 0);
    a.kv_out = t->made[KV_OUT].seen, a.kv_low_out = kv_low.seen;
    if (c->normalize) a.z_out = t->made[Z_OUT].seen, a.z_low_out = z_low.seen;
    Tensor start_low = blank(t->kv.n, 0), start_z_low = blank(t->z.n, 0);
    if (c->state) {
        a.kv = t->kv.seen, a.kv_low = start_low.seen, a.dkv = t->made[DKV].seen;
        if (c->normalize) a.z = t->z.seen, a.z_low = start_z_low.seen, a.dz = t->made[DZ].seen;
    }
    int32_t failed = linattn_attention_forward(&a);
    a.dout = t->dout.seen, a.dkv_out = t->dkv_out.seen, a.dz_out = c->normalize ? t->dz_out.seen : NULL;
    a.dq = t->made[DQ].seen, a.dk = t->made[DK].seen, a.dv = t->made[DV].seen;
    failed |= linattn_attention_backward(&a);
    for (int64_t i = 0; i < kv_low.n; i++) ((float*)t->made[KV_OUT].seen)[i] += ((float*)kv_low.seen)[i];
    for (int64_t i = 0; i < z_low.n; i++) ((float*)t->made[Z_OUT].seen)[i] += ((float*)z_low.seen)[i];
    release(&kv_low), release(&z_low), release(&start_low), release(&start_z_low);
    return failed;
}

static double error_of(const Tensor* x) {
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < x->n; i++) {
        const double error = fabs(read_one(x, i) - x->exact[i]);
        worst = error >= 0 ? fmax(worst, error) : INFINITY; /* NaN fails, and is not forgotten */
        if (fabs(x->exact[i]) > largest) largest = fabs(x->exact[i]);
    }
    return worst / (largest > 0.1 ? largest : 0.1); /* some gradients are 0 but for rounding */
}

/* The worst error of each tensor so far; how many are beyond the bound. */
static int try_case(const Case* c, int number, double worst[2][MADE]) {
    Trial t;
    prepare(&t, c);
    int failures = call(&t) != 0;
    define(&t);
    for (int i = 0; i < MADE; i++) {
        if ((i == DKV || i == DZ) && !c->state) continue;
        if ((i == Z_OUT || i == DZ) && !c->normalize) continue;
        const double error = error_of(&t.made[i]);
        worst[c->narrow][i] = fmax(worst[c->narrow][i], error);
        if (!(error <= BOUND[c->narrow])) printf("    case %d: %s errs by %.1e\n", number, NAMES[i], error), failures++;
    }
    Tensor* given[] = {&t.q, &t.k, &t.v, &t.kv, &t.z, &t.dout, &t.dkv_out, &t.dz_out};
    for (int i = 0; i < 8; i++) release(given[i]), release(&t.made[i]);
    free(t.lengths);
    free(t.cuts);
    return failures;
}

int test_operator(void) {
    double worst[2][MADE] = {{0}};
    const int num_cases = (int)(sizeof CASES / sizeof *CASES);
    int failures = 0;
    for (int i = 0; i < num_cases; i++) failures += try_case(&CASES[i], i, worst);
    printf("  operator: %d cases, %s\n", num_cases, failures ? "FAILED" : "right");
    for (int narrow = 0; narrow < 2; narrow++) {
        printf("    %s:", narrow ? "bf16" : "fp32");
        for (int i = 0; i < MADE; i++) printf(" %s %.1e", NAMES[i], worst[narrow][i]);
        printf("\n");
    }
    return failures;
}

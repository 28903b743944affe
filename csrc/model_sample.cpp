#include "model_sample.h"

#include <math.h>
#include <string.h>

namespace linattn {
namespace {

// nn/heads/logistics.py
constexpr double MIN_LOG_SCALE = -7.0, MAX_LOG_SCALE = 30.0, FARTHEST = 1e15;
constexpr double TINY = 1e-290;  // a probability below it has lost digits, and is computed by its logarithm instead

double clamped(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

double largest(const double* x, int64_t n) {
    double most = x[0];
    for (int64_t i = 1; i < n; i++)
        if (x[i] > most) most = x[i];
    return most;
}

int64_t place_of_largest(const double* x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

// log p to p^(1/temperature), summing to 1.
void softmax(double* x, int64_t n, double temperature) {
    for (int64_t i = 0; i < n; i++) x[i] /= temperature;
    const double most = largest(x, n);
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += x[i] = exp(x[i] - most);
    for (int64_t i = 0; i < n; i++) x[i] /= total;
}

// Index i with probability weights_i / Σ weights; and what i leaves of u, again uniform in [0, 1].
int64_t pick(const double* weights, int64_t n, double u, double* rest) {
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += weights[i];
    // Rounding may carry u · total up to total itself, which lies beyond the last token that has any weight.
    const double most = nextafter(total, 0.0);
    u *= total;
    if (u > most) u = most;
    double end = 0;
    int64_t i = 0;
    for (;; i++) {
        end += weights[i];
        if (end > u || i == n - 1) break;
    }
    const double left = 1 - (end - u) / weights[i];
    *rest = left > 0 ? (left < 1 ? left : 1) : 0;
    return i;
}

// Indices by falling weight, of equal weights the lower index first: merge sort, from `order` to `order`.
void rank(const double* weights, int64_t* order, int64_t* other, int64_t n) {
    for (int64_t i = 0; i < n; i++) order[i] = i;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t start = 0; start < n; start += 2 * width) {
            const int64_t middle = start + width < n ? start + width : n, end = middle + width < n ? middle + width : n;
            int64_t left = start, right = middle;
            for (int64_t i = start; i < end; i++) {
                const bool first = left < middle && (right >= end || weights[order[left]] >= weights[order[right]]);
                other[i] = order[first ? left++ : right++];
            }
        }
        int64_t* const swapped = order;
        order = other;
        other = swapped;
    }
    // An even number of passes ends where it began; after an odd one the result is copied back.
    int passes = 0;
    for (int64_t width = 1; width < n; width *= 2) passes++;
    if (passes % 2) memcpy(other, order, static_cast<size_t>(n) * sizeof *order);
}

// The top_k most probable tokens, and of these the fewest that have top_p of their mass; all others get 0.
void keep_top(double* p, int64_t n, int64_t top_k, double top_p, double* work) {
    int64_t *order = reinterpret_cast<int64_t*>(work), *other = order + n;
    rank(p, order, other, n);
    const int64_t k = top_k > 0 && top_k < n ? top_k : n;
    double total = 0, mass = 0;
    for (int64_t i = 0; i < k; i++) total += p[order[i]];
    for (int64_t i = 0; i < n; i++) {
        const double now = p[order[i]];
        if (i >= k || !(top_p == 1 || mass < top_p * total)) p[order[i]] = 0;
        mass += now;
    }
}

// The mixture's components from their parameters: π, centers from the middle value, and scales, both in bins.
void components(const linattn_model& model, const float* params, double* p, double* centers, double* log_scales) {
    const int64_t K = model.mixtures;
    const double half = (static_cast<double>(model.values) - 1) / 2;
    for (int64_t k = 0; k < K; k++) {
        p[k] = params[k];
        centers[k] = clamped(params[K + k], -FARTHEST, FARTHEST) * half;
        log_scales[k] = clamped(params[2 * K + k], MIN_LOG_SCALE, MAX_LOG_SCALE) + log(half);
    }
    softmax(p, K, 1.0);
}

int64_t draw_logistics(const linattn_model& model, const float* params, double u, double* work) {
    const int64_t K = model.mixtures;
    double *p = work, *centers = work + K, *log_scales = work + 2 * K, rest;
    components(model, params, p, centers, log_scales);
    const int64_t k = pick(p, K, u, &rest);
    rest = clamped(rest, 0x1p-53, 1 - 0x1p-53);
    const double point = centers[k] + exp(log_scales[k]) * log(rest / (1 - rest));
    const double bin = floor(point + static_cast<double>(model.values) / 2);
    return static_cast<int64_t>(clamped(bin, 0, static_cast<double>(model.values - 1)));
}

double log_sigmoid(double x) { return x < 0 ? x - log1p(exp(x)) : -log1p(exp(-x)); }

// log Σ_k π_k p_k(v), term by term: where the product of sigmoids is too small to be a number.
double log_mass(const linattn_model& model, int64_t v, const double* p, const double* centers,
                const double* log_scales) {
    const double edge = static_cast<double>(v) - (static_cast<double>(model.values) - 1) / 2;
    const bool first = v == 0, last = v == model.values - 1;
    double most = -INFINITY, total = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t k = 0; k < model.mixtures; k++) {
            const double precision = exp(-log_scales[k]);
            double term = log(p[k]);
            if (!last) term += log_sigmoid((edge + 0.5 - centers[k]) * precision);
            if (!first) term += log_sigmoid((centers[k] - edge + 0.5) * precision);
            if (!first && !last) term += log(-expm1(-precision));
            if (pass == 0 && term > most) most = term;
            if (pass == 1) total += exp(term - most);
        }
    return most + log(total);
}

// log p of all values: σ(b) σ(-a) (1 - exp(-Δ)), where -a of a bin is minus the b of the bin before it.
void all_logistics(const linattn_model& model, const float* params, double* log_p, double* work) {
    const int64_t K = model.mixtures, V = model.values;
    double *p = work, *centers = work + K, *log_scales = work + 2 * K;
    components(model, params, p, centers, log_scales);
    memset(log_p, 0, static_cast<size_t>(V) * sizeof *log_p);
    for (int64_t k = 0; k < K; k++) {
        const double precision = exp(-log_scales[k]), inside = -expm1(-precision);
        double above = 1;  // σ(-a): nothing lies below the first bin
        for (int64_t v = 0; v < V; v++) {
            const double b = (static_cast<double>(v) - static_cast<double>(V) / 2 + 1 - centers[k]) * precision;
            const double e = exp(b < 0 ? b : -b), small = e / (1 + e), large = 1 / (1 + e);
            const double below = v == V - 1 ? 1 : b < 0 ? small : large;
            log_p[v] += p[k] * below * above * (v == 0 || v == V - 1 ? 1 : inside);
            above = b < 0 ? large : small;
        }
    }
    for (int64_t v = 0; v < V; v++)
        log_p[v] = log_p[v] > TINY ? log(log_p[v]) : log_mass(model, v, p, centers, log_scales);
}

}  // namespace

int64_t sample_scratch(const linattn_model& model) { return 3 * model.values + 3 * model.mixtures + 8; }

int64_t not_finite(const float* params, int64_t n) {
    int64_t bad = 0;
    for (int64_t i = 0; i < n; i++) bad += !(params[i] - params[i] == 0);
    return bad;
}

int64_t sample(const linattn_model& model, const linattn_run& run, const float* params, double u, double* work) {
    const bool whole = run.temperature == 1 && run.top_p == 1 && (run.top_k <= 0 || run.top_k >= model.values);
    if (model.head_kind == LINATTN_LOGISTICS && whole) return draw_logistics(model, params, u, work);
    double *p = work, *more = work + model.values;
    if (model.head_kind == LINATTN_LOGISTICS) {
        all_logistics(model, params, p, more);
    } else {
        for (int64_t v = 0; v < model.values; v++) p[v] = params[v];
    }
    if (run.temperature == 0) return place_of_largest(p, model.values);
    softmax(p, model.values, run.temperature);
    if (!whole) keep_top(p, model.values, run.top_k, run.top_p, more);
    double rest;
    return pick(p, model.values, u, &rest);
}

void log_softmax(float* logits, int64_t n) {
    double most = logits[0], total = 0;
    for (int64_t i = 1; i < n; i++)
        if (logits[i] > most) most = logits[i];
    for (int64_t i = 0; i < n; i++) total += exp(logits[i] - most);
    const double shift = most + log(total);
    for (int64_t i = 0; i < n; i++) logits[i] = static_cast<float>(logits[i] - shift);
}

}  // namespace linattn

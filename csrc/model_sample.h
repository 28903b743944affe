// Drawing tokens as linattn/nn/heads does it, in fp64: one uniform number makes one token.
#ifndef LINATTN_MODEL_SAMPLE_H
#define LINATTN_MODEL_SAMPLE_H

#include "model_step.h"

namespace linattn {

// Numbers (fp64) of working memory that drawing one token needs.
int64_t sample_scratch(const linattn_model& model);

// How many of the parameters are not finite.
int64_t not_finite(const float* params, int64_t n);

// The token of uniform number u in [0, 1); whatever u and the parameters are, it is one of the model's.
int64_t sample(const linattn_model& model, const linattn_run& run, const float* params, double u, double* work);

// Logits to log-probabilities, in place.
void log_softmax(float* logits, int64_t n);

}  // namespace linattn
#endif

// What the operator's planning (attention.cpp) and its kernels (forward.isa.cpp, backward.isa.cpp) share.
#ifndef LINATTN_ATTENTION_H
#define LINATTN_ATTENTION_H

#include <stdint.h>

namespace linattn {

// One sequence: a row of a padded batch, or one of those packed into a row.
struct Sequence {
    int64_t row;               // of q, k, v and out
    int64_t state;             // of kv and z
    int64_t q_begin, queries;  // its queries' place in time
    int64_t k_begin, keys;     // its keys'
};

// One of the tasks that a head of a long sequence is cut into, where there are fewer heads than threads.
struct Part {
    int64_t number, parts;
    int phase;      // begins when all parts have ended the one before
    float* shared;  // the head's memory for what its parts leave each other
};

}  // namespace linattn
#endif

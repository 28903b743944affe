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

}  // namespace linattn
#endif

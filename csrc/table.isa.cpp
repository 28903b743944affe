// The table of one instruction set.
#include "dispatch.h"
#include "kernels.h"
#include "simd.h"

#define LINATTN_NAME_OF(x) #x
#define LINATTN_NAME(x) LINATTN_NAME_OF(x)

namespace linattn {
namespace LINATTN_ISA {

extern const Kernels table;
const Kernels table = {LINATTN_NAME(LINATTN_ISA),
                       LANES,
                       feature_map,
                       model_run,
                       attend_run,
                       {forward_scratch, forward, FORWARD_PHASES, forward_shared, forward_part},
                       {backward_scratch, backward, BACKWARD_PHASES, backward_shared, backward_part}};

}  // namespace LINATTN_ISA
}  // namespace linattn

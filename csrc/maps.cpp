#include "dispatch.h"
#include "linattn.h"
#include "pool.h"

namespace linattn {
namespace {

struct Apply {
    int map;
    float root_scale;
    const float* x;
    float *y, *slope;
    int64_t n;
};

void apply(void* context, int index, int count) {
    const Apply& a = *static_cast<const Apply*>(context);
    const int64_t from = a.n * index / count, to = a.n * (index + 1) / count;
    kernels()->feature_map(a.map, a.root_scale, a.x + from, a.y + from, a.slope ? a.slope + from : nullptr, to - from);
}

}  // namespace
}  // namespace linattn

extern "C" int32_t linattn_feature_map(int32_t map, float root_scale, const float* x, float* y, float* slope, int64_t n,
                                       int32_t threads) {
    linattn::Apply context = {map, root_scale, x, y, slope, n};
    linattn::pool_run(threads, linattn::apply, &context);
    return 0;
}

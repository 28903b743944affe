// The feature maps by themselves, for tests: the kernels apply them while they pack their tiles.
#include "kernels.h"
#include "maps.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

template <int MAP>
struct Apply {
    static void run(float root_scale, const float* x, float* y, float* slopes, int64_t n) {
        for (int64_t i = 0; i < n; i += LANES) {
            const int now = static_cast<int>(n - i < LANES ? n - i : LANES);
            const vec in = splat(root_scale) * (now == LANES ? load(x + i) : load(x + i, now)), out = feature<MAP>(in);
            if (now == LANES) store(y + i, out);
            else store(y + i, out, now);
            if (slopes && now == LANES) store(slopes + i, slope<MAP>(in, out));
            else if (slopes) store(slopes + i, slope<MAP>(in, out), now);
        }
    }
};

}  // namespace

void feature_map(int map, float root_scale, const float* x, float* y, float* slope, int64_t n) {
    with_map<Apply>(map, root_scale, x, y, slope, n);
}

}  // namespace LINATTN_ISA
}  // namespace linattn

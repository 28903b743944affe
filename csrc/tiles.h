// Packing: rows of one head lie far apart in (B, T, H, W), so each tile is first copied into contiguous fp32 rows, with
// the feature map applied on the way. Rows of a tile are padded with zeros to whole vectors.
#ifndef LINATTN_TILES_H
#define LINATTN_TILES_H

#include "linattn.h"
#include "simd.h"

namespace linattn {
namespace LINATTN_ISA {

// Rows in the caller's memory: fp32 or bf16, `stride` numbers apart. While they are packed those `ahead` rows further on
// are called for: rows of one head lie too far apart for the processor to see where the next ones will be.
struct Rows {
    void* at;
    int64_t stride;
    int64_t ahead = 0;
};

// What depends on the operands' dtype and on the feature map, chosen once a call.
struct Packing {
    // tile = f(root_scale * x), n rows of `width`
    void (*features)(Rows x, int n, int width, float root_scale, float* tile, int64_t row);
    // tile = x
    void (*plain)(Rows x, int n, int width, float* tile, int64_t row);
    // x = tile * factors (one a row; NULL for 1)
    void (*unpack)(Rows x, int n, int width, const float* tile, int64_t row, const float* factors);
    // dx = dtile * f'(root_scale * x) * root_scale, with tile = f(root_scale * x)
    void (*through_map)(Rows dx, Rows x, int n, int width, float root_scale, const float* tile, const float* dtile,
                        int64_t row);
};

Packing packing(const linattn_attention& call);

// transposed[w, i] = tile[i, w] for n rows of `width`; columns from n on are 0, up to a whole vector.
void transpose_tile(const float* tile, int64_t row, int n, int width, float* transposed, int64_t transposed_row);

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif

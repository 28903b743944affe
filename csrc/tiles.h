// Packing: rows of one head lie far apart in (B, T, H, W), so each tile is first copied into contiguous fp32 rows, with
// the feature map applied on the way. Rows of a tile are padded with zeros to whole vectors.
#ifndef LINATTN_TILES_H
#define LINATTN_TILES_H

#include "linattn.h"
#include "simd.h"

namespace linattn {
namespace LINATTN_ISA {

// Rows in the caller's memory: fp32 or bf16, `stride` numbers apart.
struct Rows {
    void* at;
    int64_t stride;
};

// Rows of two tensors that will be packed (or written) next, brought into the cache a few at a time between the blocks of
// a product. They lie too far apart for the processor to see where the next ones will be, and all at once they would
// wait for each other. Rows may lie beyond the last one: nothing is read for the program, so nothing can go wrong.
struct Ahead {
    struct Part {
        uintptr_t at;
        intptr_t row;  // bytes
        int bytes;     // of a row that are wanted
        int rows;
    } parts[2];
    int at_once;  // rows

    inline __attribute__((always_inline)) void some(Part& part) const {
        for (int i = 0; i < at_once && part.rows; i++, part.rows--, part.at += part.row)
            for (int byte = 0; byte < part.bytes; byte += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(part.at + byte));
    }
    inline __attribute__((always_inline)) void some() {
        some(parts[0]);
        some(parts[1]);
    }
};

// What depends on the operands' dtype and on the feature map, chosen once a call.
struct Packing {
    // tile = f(root_scale * x), n rows of `width`
    void (*features)(Rows x, int n, int width, float root_scale, float* tile, int64_t row);
    // tile = x
    void (*plain)(Rows x, int n, int width, float* tile, int64_t row);
    // x = tile
    void (*unpack)(Rows x, int n, int width, const float* tile, int64_t row);
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

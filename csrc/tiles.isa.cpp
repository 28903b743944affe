#include "tiles.h"

#include "maps.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

// `AT_ONCE` vectors from x on, with the map.
template <int MAP, int AT_ONCE, class T>
LINATTN_INLINE void pack_some(const T* x, vec factor, float* tile) {
    Vecs<AT_ONCE> some;
    for (int k = 0; k < AT_ONCE; k++) some.at[k] = factor * load(x + k * LANES);
    some = feature<MAP>(some);
    for (int k = 0; k < AT_ONCE; k++) store(tile + k * LANES, some.at[k]);
}

template <class T, int MAP>
LINATTN_INLINE void pack(Rows x, int n, int width, float root_scale, float* tile, int64_t row) {
    const int whole = width / LANES * LANES, left = width - whole;
    const vec factor = splat(root_scale);
    for (int i = 0; i < n; i++, tile += row) {
        const T* in = static_cast<const T*>(x.at) + i * x.stride;
        int w = 0;
        for (; w + 4 * LANES <= whole; w += 4 * LANES) pack_some<MAP, 4>(in + w, factor, tile + w);
        for (; w < whole; w += LANES) pack_some<MAP, 1>(in + w, factor, tile + w);
        // f(0) need not be 0
        if (left) store(tile + whole, keep_first(feature<MAP>(factor * load(in + whole, left)), left));
    }
}

template <class T, int MAP>
void features(Rows x, int n, int width, float root_scale, float* tile, int64_t row) {
    pack<T, MAP>(x, n, width, root_scale, tile, row);
}

template <class T>
void plain(Rows x, int n, int width, float* tile, int64_t row) {
    pack<T, LINATTN_IDENTITY>(x, n, width, 1.0f, tile, row);
}

template <class T>
void unpack(Rows x, int n, int width, const float* tile, int64_t row) {
    const int whole = width / LANES * LANES, left = width - whole;
    for (int i = 0; i < n; i++, tile += row) {
        T* out = static_cast<T*>(x.at) + i * x.stride;
        for (int w = 0; w < whole; w += LANES) store(out + w, load(tile + w));
        if (left) store(out + whole, load(tile + whole), left);
    }
}

template <class T, int MAP>
void through_map(Rows dx, Rows x, int n, int width, float root_scale, const float* tile, const float* dtile,
                 int64_t row) {
    const vec factor = splat(root_scale);
    for (int i = 0; i < n; i++, tile += row, dtile += row) {
        const T* in = static_cast<const T*>(x.at) + i * x.stride;
        T* out = static_cast<T*>(dx.at) + i * dx.stride;
        for (int w = 0; w < width; w += LANES) {
            const int now = width - w < LANES ? width - w : LANES;
            const vec input = factor * (now == LANES ? load(in + w) : load(in + w, now));
            const vec d = load(dtile + w) * slope<MAP>(input, load(tile + w)) * factor;
            if (now == LANES) store(out + w, d);
            else store(out + w, d, now);
        }
    }
}

template <int MAP>
struct Choose {
    static Packing run(bool narrow_features, bool narrow_values) {
        Packing made;
        made.features = narrow_features ? features<bf16, MAP> : features<float, MAP>;
        made.through_map = narrow_features ? through_map<bf16, MAP> : through_map<float, MAP>;
        made.plain = narrow_values ? plain<bf16> : plain<float>;
        made.unpack = narrow_values ? unpack<bf16> : unpack<float>;
        return made;
    }
};

}  // namespace

Packing packing(const linattn_attention& call) {
    return with_map<Choose>(static_cast<int>(call.map), call.narrow_features != 0, call.narrow_values != 0);
}

void transpose_tile(const float* tile, int64_t row, int n, int width, float* transposed, int64_t transposed_row) {
    for (int w = 0; w < width; w += LANES) {
        const int wide = width - w < LANES ? width - w : LANES;
        for (int i = 0; i < n; i += LANES) {
            vec square[LANES];
            for (int r = 0; r < LANES; r++) square[r] = i + r < n ? load(tile + (i + r) * row + w) : zero();
            transpose(square);
            for (int r = 0; r < wide; r++) store(transposed + (w + r) * transposed_row + i, square[r]);
        }
    }
}

}  // namespace LINATTN_ISA
}  // namespace linattn

// Layer norm and RMS norm over the rows of [rows, size], forward and backward.
//
// In the forward a block processes one row. In the backward it processes several rows, one after the other, and adds up
// their contributions to the gradients of the weights; these partial sums are then added in an order that depends only
// on the shape.
#include "pack.cuh"

struct NormArgs {
    // x and, if not 0, a branch that is added to it first; the sum goes to `total`.
    uint64_t x, branch, total;
    uint64_t weight, bias;
    // y forward, the gradient of x backward.
    uint64_t out;
    // Backward only. `d` is the gradient of y. `before`, if not 0, is an earlier gradient of x, to which the new one is
    // added. `partials` is f32 of [blocks, 2, size], or [blocks, 1, size] without a bias: Σ dy·x̂ and Σ dy over each
    // block's rows.
    uint64_t d, before, partials;
    uint64_t rows, size;
    // Rows per block.
    uint32_t together;
    float eps;
};

// Packs of a row that each thread holds in registers.
constexpr unsigned KEPT = 2;

// A thread's part of a row, packs that are one block width apart: the first KEPT in registers, the rest in memory.
template <bool PACKED, class T> struct Row {
    static constexpr unsigned N = Pack<T>::COUNT;
    const T* at;
    Pack<T> kept[KEPT];

    DEVICE void load(const T* from, uint64_t size) {
        at = from;
        UNROLL
        for (unsigned k = 0; k < KEPT; k++) {
            uint64_t first = uint64_t(threadIdx.x + k * blockDim.x) * N;
            if (first < size) kept[k] = load_pack<PACKED>(at + first, size - first);
        }
    }
    DEVICE Pack<T> pack(unsigned k, uint64_t first, uint64_t size) const {
        return k < KEPT ? kept[k < KEPT ? k : 0] : load_pack<PACKED>(at + first, size - first);
    }
};

// Calls `f` for each of a thread's packs, with its index in the registers, or KEPT if it is only in memory, and the
// index of its first number.
template <class T, class F> DEVICE void each_pack(uint64_t size, F f) {
    constexpr unsigned N = Pack<T>::COUNT;
    uint64_t first = uint64_t(threadIdx.x) * N, step = uint64_t(blockDim.x) * N;
    UNROLL
    for (unsigned k = 0; k < KEPT; k++, first += step) {
        if (first < size) f(k, first);
    }
    for (; first < size; first += step) f(KEPT, first);
}

// Calls `f` for each number of a pack that is within the row.
template <bool PACKED, unsigned N, class F> DEVICE void each_number(uint64_t left, F f) {
    UNROLL
    for (unsigned i = 0; i < N; i++) {
        if (PACKED || i < left) f(i);
    }
}

struct Moments { float mean, scale; };

// The variance is computed in a second pass, from the differences to the mean.
template <bool CENTRED, bool PACKED, class T>
DEVICE Moments moments(const Row<PACKED, T>& x, uint64_t size, float eps, float* room) {
    constexpr unsigned N = Pack<T>::COUNT;
    float mean = 0.0f;
    if (CENTRED) {
        each_pack<T>(size, [&](unsigned k, uint64_t first) {
            Pack<T> pack = x.pack(k, first, size);
            each_number<PACKED, N>(size - first, [&](unsigned i) { mean += pack[i]; });
        });
        mean = over_block<Add>(mean, room) / float(size);
    }
    float squares = 0.0f;
    each_pack<T>(size, [&](unsigned k, uint64_t first) {
        Pack<T> pack = x.pack(k, first, size);
        each_number<PACKED, N>(size - first, [&](unsigned i) {
            float difference = pack[i] - mean;
            squares = fmaf(difference, difference, squares);
        });
    });
    squares = over_block<Add>(squares, room) / float(size);
    return Moments{mean, 1.0f / sqrtf(squares + eps)};
}

template <bool CENTRED, bool PACKED, class T> DEVICE void normalise(const NormArgs& a) {
    constexpr unsigned N = Pack<T>::COUNT;
    DYNAMIC_SHARED(float, room);
    uint64_t start = uint64_t(blockIdx.x) * a.size;
    Row<PACKED, T> x, weight, bias;
    x.load(as<T>(a.x) + start, a.size);
    if (a.branch) {
        Row<PACKED, T> branch;
        branch.load(as<T>(a.branch) + start, a.size);
        T* total = as_mut<T>(a.total) + start;
        each_pack<T>(a.size, [&](unsigned k, uint64_t first) {
            Pack<T> one = x.pack(k, first, a.size), other = branch.pack(k, first, a.size);
            float sums[N];
            UNROLL
            for (unsigned i = 0; i < N; i++) sums[i] = one[i] + other[i];
            Pack<T> pack = Pack<T>::of(sums);
            store_pack<PACKED>(total + first, a.size - first, pack);
            if (k < KEPT) x.kept[k] = pack;
        });
        // Below, each thread reads only what it wrote here.
        x.at = total;
    }
    weight.load(as<T>(a.weight), a.size);
    if (CENTRED) bias.load(as<T>(a.bias), a.size);
    Moments m = moments<CENTRED>(x, a.size, a.eps, room);
    T* y = as_mut<T>(a.out) + start;
    each_pack<T>(a.size, [&](unsigned k, uint64_t first) {
        Pack<T> xs = x.pack(k, first, a.size), ws = weight.pack(k, first, a.size), bs;
        if (CENTRED) bs = bias.pack(k, first, a.size);
        float to[N];
        UNROLL
        for (unsigned i = 0; i < N; i++) {
            float normal = (xs[i] - m.mean) * m.scale;
            to[i] = CENTRED ? fmaf(normal, ws[i], bs[i]) : normal * ws[i];
        }
        store_pack<PACKED>(y + first, a.size - first, Pack<T>::of(to));
    });
}

// dx = (g − mean(g) − x̂·mean(g·x̂))·scale with g = dy·weight; without mean(g) for RMS norm.
template <bool CENTRED, bool PACKED, class T> DEVICE void differentiate(const NormArgs& a) {
    constexpr unsigned N = Pack<T>::COUNT;
    DYNAMIC_SHARED(float, room);
    uint64_t first_row = uint64_t(blockIdx.x) * a.together;
    uint64_t end = first_row + a.together < a.rows ? first_row + a.together : a.rows;
    Row<PACKED, T> x, d;
    const T* weight = as<T>(a.weight);
    x.load(as<T>(a.x) + first_row * a.size, a.size);
    d.load(as<T>(a.d) + first_row * a.size, a.size);
    float* to_weight = as_mut<float>(a.partials) + (CENTRED ? 2 : 1) * uint64_t(blockIdx.x) * a.size;
    float* to_bias = to_weight + a.size;
    float d_weight[KEPT][N] = {}, d_bias[KEPT][N] = {};
    for (uint64_t row = first_row; row < end; row++) {
        Row<PACKED, T> next_x, next_d, before;
        // Loads the next row while this one is processed, unless that needs too many registers.
        if (PACKED && row + 1 < end) {
            next_x.load(as<T>(a.x) + (row + 1) * a.size, a.size);
            next_d.load(as<T>(a.d) + (row + 1) * a.size, a.size);
        }
        if (!PACKED && row > first_row) {
            x.load(as<T>(a.x) + row * a.size, a.size);
            d.load(as<T>(a.d) + row * a.size, a.size);
        }
        if (a.before) before.load(as<T>(a.before) + row * a.size, a.size);
        Moments m = moments<CENTRED>(x, a.size, a.eps, room);
        // Σ g·x̂ and Σ g
        float sums[CENTRED ? 2 : 1] = {};
        each_pack<T>(a.size, [&](unsigned k, uint64_t first) {
            Pack<T> xs = x.pack(k, first, a.size), ds = d.pack(k, first, a.size);
            Pack<T> ws = load_pack<PACKED>(weight + first, a.size - first);
            each_number<PACKED, N>(a.size - first, [&](unsigned i) {
                float g = ds[i] * ws[i];
                sums[0] = fmaf(g, (xs[i] - m.mean) * m.scale, sums[0]);
                if constexpr (CENTRED) sums[1] += g;
            });
        });
        over_block<Add>(sums, room);
        float mean_gx = sums[0] / float(a.size), mean_g = CENTRED ? sums[CENTRED] / float(a.size) : 0.0f;
        T* dx = as_mut<T>(a.out) + row * a.size;
        each_pack<T>(a.size, [&](unsigned k, uint64_t first) {
            Pack<T> xs = x.pack(k, first, a.size), ds = d.pack(k, first, a.size), bs;
            Pack<T> ws = load_pack<PACKED>(weight + first, a.size - first);
            if (a.before) bs = before.pack(k, first, a.size);
            float to[N];
            each_number<PACKED, N>(a.size - first, [&](unsigned i) {
                float normal = (xs[i] - m.mean) * m.scale;
                to[i] = m.scale * fmaf(normal, -mean_gx, ds[i] * ws[i] - mean_g);
                float weight_before = 0.0f, bias_before = 0.0f;
                if (k < KEPT) {
                    weight_before = d_weight[k < KEPT ? k : 0][i], bias_before = d_bias[k < KEPT ? k : 0][i];
                } else if (row > first_row) {
                    weight_before = to_weight[first + i];
                    if (CENTRED) bias_before = to_bias[first + i];
                }
                float weight_after = fmaf(ds[i], normal, weight_before), bias_after = bias_before + ds[i];
                if (k < KEPT) {
                    d_weight[k < KEPT ? k : 0][i] = weight_after, d_bias[k < KEPT ? k : 0][i] = bias_after;
                } else {
                    to_weight[first + i] = weight_after;
                    if (CENTRED) to_bias[first + i] = bias_after;
                }
            });
            Pack<T> pack = Pack<T>::of(to);
            if (a.before) {
                // Rounds as if this gradient had been stored first.
                UNROLL
                for (unsigned i = 0; i < N; i++) to[i] = bs[i] + pack[i];
                pack = Pack<T>::of(to);
            }
            store_pack<PACKED>(dx + first, a.size - first, pack);
        });
        if (PACKED) {
            x = next_x;
            d = next_d;
        }
    }
    UNROLL
    for (unsigned k = 0; k < KEPT; k++) {
        uint64_t first = uint64_t(threadIdx.x + k * blockDim.x) * N;
        UNROLL
        for (unsigned i = 0; i < N; i += 4) {
            if (first + i >= a.size) continue;
            uint64_t left = a.size - first - i;
            store_pack<PACKED>(to_weight + first + i, left, Pack<float>::of(d_weight[k] + i));
            if (CENTRED) store_pack<PACKED>(to_bias + first + i, left, Pack<float>::of(d_bias[k] + i));
        }
    }
}

// Whether all rows of all operands begin at multiples of sixteen bytes. A missing operand has address 0, which is a
// multiple.
template <class T> DEVICE bool in_packs(const NormArgs& a) {
    uint64_t all = a.x | a.branch | a.total | a.weight | a.bias | a.out | a.d | a.before | a.partials;
    return a.size % Pack<T>::COUNT == 0 && all % 16 == 0;
}
template <bool CENTRED, class T> DEVICE void forward(const NormArgs& a) {
    in_packs<T>(a) ? normalise<CENTRED, true, T>(a) : normalise<CENTRED, false, T>(a);
}
template <bool CENTRED, class T> DEVICE void backward(const NormArgs& a) {
    in_packs<T>(a) ? differentiate<CENTRED, true, T>(a) : differentiate<CENTRED, false, T>(a);
}

template <class T> DEVICE void layer_norm(const NormArgs& a) { forward<true, T>(a); }
template <class T> DEVICE void layer_norm_backward(const NormArgs& a) { backward<true, T>(a); }
template <class T> DEVICE void rms_norm(const NormArgs& a) { forward<false, T>(a); }
template <class T> DEVICE void rms_norm_backward(const NormArgs& a) { backward<false, T>(a); }

// Adds the partial sums of a weight or a bias, which are `stride` elements apart. The total is added to the f32
// gradient, or overwrites it.
struct NormSumsArgs {
    uint64_t partials, to;
    uint64_t blocks, size, stride;
    uint64_t add;
};

// A warp adds every sixteenth block's sums, one column per thread; then these sums are added in warp order.
ENTRY(norm_sums, NormSumsArgs, 512) {
    DYNAMIC_SHARED(float, room);
    uint64_t column = uint64_t(blockIdx.x) * WARP + threadIdx.x % WARP;
    unsigned warps = blockDim.x / WARP;
    float sum = 0.0f;
    if (column < a.size) {
        for (uint64_t block = threadIdx.x / WARP; block < a.blocks; block += warps) {
            sum += as<float>(a.partials)[block * a.stride + column];
        }
    }
    room[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= WARP || column >= a.size) return;
    for (unsigned warp = 1; warp < warps; warp++) sum += room[warp * WARP + threadIdx.x];
    float& to = as_mut<float>(a.to)[column];
    to = a.add ? to + sum : sum;
}

KERNEL(layer_norm, NormArgs, 512)
KERNEL(layer_norm_backward, NormArgs, 512)
KERNEL(rms_norm, NormArgs, 512)
KERNEL(rms_norm_backward, NormArgs, 512)

// AdamW and Adam over a flat shard, the squares of gradients, and numbers from one type into another: all with the bits of the CPU's
// (optim/), so that what a card and its host share of an update makes no difference.
#include "device.cuh"

struct AdamArgs {
    // f32 of [count] each: master parameters and the two moments.
    uint64_t params, exp_avg, exp_avg_sq;
    uint64_t grads;
    // The parameters that layers read, in the entry's type; 0 if those are the master parameters.
    uint64_t working;
    uint64_t count;
    // 1 − lr·λ of decoupled decay, or λ of the classic form.
    float decay;
    float grad_scale, one_minus_beta1, beta2, one_minus_beta2, inv_root_correction2, eps, minus_step_size;
    uint32_t decoupled;
    uint32_t unused;
};

// Gradients and working parameters of one type.
template <class T> DEVICE void adam(const AdamArgs& a) {
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        float param = as<float>(a.params)[i], grad = load(as<T>(a.grads)[i]) * a.grad_scale;
        if (a.decoupled) {
            param = param * a.decay;
        } else {
            grad = fmaf(a.decay, param, grad);
        }
        float m = as<float>(a.exp_avg)[i], v = as<float>(a.exp_avg_sq)[i];
        m = fmaf(a.one_minus_beta1, grad - m, m);
        // (1−β₂)g before the second g: g² alone overflows f32 from 1.8e19 on.
        v = fmaf(a.one_minus_beta2 * grad, grad, a.beta2 * v);
        float denominator = fmaf(sqrtf(v), a.inv_root_correction2, a.eps);
        param = fmaf(a.minus_step_size, m / denominator, param);
        as_mut<float>(a.params)[i] = param;
        as_mut<float>(a.exp_avg)[i] = m;
        as_mut<float>(a.exp_avg_sq)[i] = v;
        if (a.working) store(as_mut<T>(a.working)[i], param);
    }
}

// The squares of each 1024 gradients of a parameter, added in f64: element i goes to lane i mod 16, the lanes are folded in halves.
// A sum is half a warp's. The caller adds the sums exactly.
struct SquareSumsArgs {
    uint64_t grads, sums;
    uint64_t count;
};

constexpr uint64_t SQUARES = 1024;
constexpr unsigned LANES = 16;

template <class T> DEVICE void square_sums(const SquareSumsArgs& a) {
    uint64_t sum = global_thread() / LANES;
    unsigned lane = threadIdx.x % LANES;
    uint64_t first = sum * SQUARES, end = first + SQUARES < a.count ? first + SQUARES : a.count;
    double total = 0.0;
    for (uint64_t i = first + lane; i < end; i += LANES) {
        double x = double(load(as<T>(a.grads)[i]));
        total += x * x;
    }
    // All threads of a warp take part, those beyond the end with nothing.
    for (unsigned distance = LANES / 2; distance > 0; distance /= 2) {
        total += __shfl_down_sync(ALL, total, distance, LANES);
    }
    if (lane == 0 && first < a.count) as_mut<double>(a.sums)[sum] = total;
}

struct CastArgs {
    uint64_t from, to;
    uint64_t count;
};

// From the entry's type, exactly.
template <class T> DEVICE void widen(const CastArgs& a) {
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        as_mut<float>(a.to)[i] = load(as<T>(a.from)[i]);
    }
}

// To the entry's type, rounded once.
template <class T> DEVICE void narrow(const CastArgs& a) {
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        store(as_mut<T>(a.to)[i], as<float>(a.from)[i]);
    }
}

// Onto f32: gradients of several micro-batches.
template <class T> DEVICE void add_to(const CastArgs& a) {
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        as_mut<float>(a.to)[i] += load(as<T>(a.from)[i]);
    }
}

KERNEL(adam, AdamArgs, 256)
KERNEL(square_sums, SquareSumsArgs, 256)
KERNEL(widen, CastArgs, 256)
KERNEL(narrow, CastArgs, 256)
KERNEL(add_to, CastArgs, 256)

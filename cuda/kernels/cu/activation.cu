// GELU in both forms, SiLU, ReLU and SwiGLU, forward and backward, one element a thread: the bits of the CPU's
// (model/src/ops/kernel/activation.rs).
#include "math.cuh"

// `a` and `b` are the inputs, `d` the gradient of the result; `x` and `y` are written. What an entry does not use is 0.
struct ActivationArgs {
    uint64_t a, b, d, x, y;
    uint64_t count;
};

#define EACH(I, A) for (uint64_t I = global_thread(); I < (A).count; I += global_threads())

struct GeluTanh {
    DEVICE static float value(float x) {
        float u = 0.7978846f * fmaf(0.044715f * x * x, x, x);
        return x / (1.0f + exponential(-2.0f * u));
    }
    DEVICE static float slope(float x) {
        float square = x * x;
        float u = 0.7978846f * fmaf(0.044715f * square, x, x);
        float twice_slope = 2.0f * 0.7978846f * fmaf(3.0f * 0.044715f, square, 1.0f);
        Sigmoid s = sigmoid(2.0f * u);
        float lever = square < 1e4f ? x * twice_slope : 0.0f;
        return fmaf(s.value * s.rest, lever, s.value);
    }
};

struct GeluErf {
    DEVICE static float value(float x) { return x * normal_cdf(x); }
    DEVICE static float slope(float x) { return fmaf(x, normal_density(x), normal_cdf(x)); }
};

struct Silu {
    DEVICE static float value(float x) { return x * sigmoid(x).value; }
    DEVICE static float slope(float x) {
        Sigmoid s = sigmoid(x);
        return fmaf(s.value * s.rest, x, s.value);
    }
};

template <class F, class T> DEVICE void forward(const ActivationArgs& a) {
    EACH(i, a) store(as_mut<T>(a.y)[i], F::value(load(as<T>(a.a)[i])));
}

template <class F, class T> DEVICE void backward(const ActivationArgs& a) {
    EACH(i, a) store(as_mut<T>(a.x)[i], load(as<T>(a.d)[i]) * F::slope(load(as<T>(a.a)[i])));
}

template <class T> DEVICE void gelu_tanh(const ActivationArgs& a) { forward<GeluTanh, T>(a); }
template <class T> DEVICE void gelu_tanh_backward(const ActivationArgs& a) { backward<GeluTanh, T>(a); }
template <class T> DEVICE void gelu_erf(const ActivationArgs& a) { forward<GeluErf, T>(a); }
template <class T> DEVICE void gelu_erf_backward(const ActivationArgs& a) { backward<GeluErf, T>(a); }
template <class T> DEVICE void silu(const ActivationArgs& a) { forward<Silu, T>(a); }
template <class T> DEVICE void silu_backward(const ActivationArgs& a) { backward<Silu, T>(a); }

// NaN where x is.
template <class T> DEVICE void relu(const ActivationArgs& a) {
    EACH(i, a) {
        float x = load(as<T>(a.a)[i]);
        store(as_mut<T>(a.y)[i], x < 0.0f ? 0.0f : x);
    }
}

// At 0 the gradient passes, as candle has it.
template <class T> DEVICE void relu_backward(const ActivationArgs& a) {
    EACH(i, a) store(as_mut<T>(a.x)[i], load(as<T>(a.a)[i]) < 0.0f ? 0.0f : load(as<T>(a.d)[i]));
}

// y = gate·σ(gate)·up, gate in `a` and up in `b`
template <class T> DEVICE void swiglu(const ActivationArgs& a) {
    EACH(i, a) {
        float gate = load(as<T>(a.a)[i]);
        store(as_mut<T>(a.y)[i], gate * sigmoid(gate).value * load(as<T>(a.b)[i]));
    }
}

// Gradient of gate to `x`, of up to `y`; either may be where its input or the upstream gradient is.
template <class T> DEVICE void swiglu_backward(const ActivationArgs& a) {
    EACH(i, a) {
        float gate = load(as<T>(a.a)[i]), up = load(as<T>(a.b)[i]), d = load(as<T>(a.d)[i]);
        Sigmoid s = sigmoid(gate);
        store(as_mut<T>(a.x)[i], d * up * fmaf(s.value * s.rest, gate, s.value));
        store(as_mut<T>(a.y)[i], d * gate * s.value);
    }
}

KERNEL(gelu_tanh, ActivationArgs, 256)
KERNEL(gelu_tanh_backward, ActivationArgs, 256)
KERNEL(gelu_erf, ActivationArgs, 256)
KERNEL(gelu_erf_backward, ActivationArgs, 256)
KERNEL(silu, ActivationArgs, 256)
KERNEL(silu_backward, ActivationArgs, 256)
KERNEL(relu, ActivationArgs, 256)
KERNEL(relu_backward, ActivationArgs, 256)
KERNEL(swiglu, ActivationArgs, 256)
KERNEL(swiglu_backward, ActivationArgs, 256)

// GELU in both forms, SiLU, ReLU and SwiGLU, forward and backward, and addition. Elementwise, bit-identical to the
// CPU's (ops/src/kernel/activation.rs).
#include "math.cuh"
#include "pack.cuh"

// `a` and `b` are the inputs, `d` the gradient of the result, `x` and `y` the outputs. Fields that an entry does not
// use are 0.
struct ActivationArgs {
    uint64_t a, b, d, x, y;
    uint64_t count;
};

// Apply `f` to the elements of one input, or of two. `f` gets a pointer for each result.
template <class T, class F> DEVICE void one(const ActivationArgs& a, uint64_t x, uint64_t y, F f) {
    each<Pack<T>::COUNT>(a.count, {as_mut<T>(y)}, f, as<T>(x));
}
template <class T, class F> DEVICE void two(const ActivationArgs& a, uint64_t x0, uint64_t x1, uint64_t y, F f) {
    each<Pack<T>::COUNT>(a.count, {as_mut<T>(y)}, f, as<T>(x0), as<T>(x1));
}

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
    one<T>(a, a.a, a.y, [](float* y, float x) { *y = F::value(x); });
}

template <class F, class T> DEVICE void backward(const ActivationArgs& a) {
    two<T>(a, a.a, a.d, a.x, [](float* dx, float x, float d) { *dx = d * F::slope(x); });
}

template <class T> DEVICE void gelu_tanh(const ActivationArgs& a) { forward<GeluTanh, T>(a); }
template <class T> DEVICE void gelu_tanh_backward(const ActivationArgs& a) { backward<GeluTanh, T>(a); }
template <class T> DEVICE void gelu_erf(const ActivationArgs& a) { forward<GeluErf, T>(a); }
template <class T> DEVICE void gelu_erf_backward(const ActivationArgs& a) { backward<GeluErf, T>(a); }
template <class T> DEVICE void silu(const ActivationArgs& a) { forward<Silu, T>(a); }
template <class T> DEVICE void silu_backward(const ActivationArgs& a) { backward<Silu, T>(a); }

// NaN for NaN.
template <class T> DEVICE void relu(const ActivationArgs& a) {
    one<T>(a, a.a, a.y, [](float* y, float x) { *y = x < 0.0f ? 0.0f : x; });
}

// At 0 the gradient is 0, as in PyTorch.
template <class T> DEVICE void relu_backward(const ActivationArgs& a) {
    two<T>(a, a.a, a.d, a.x, [](float* dx, float x, float d) { *dx = x <= 0.0f ? 0.0f : d; });
}

// y = gate·σ(gate)·up, gate in `a` and up in `b`
template <class T> DEVICE void swiglu(const ActivationArgs& a) {
    two<T>(a, a.a, a.b, a.y, [](float* y, float gate, float up) { *y = gate * sigmoid(gate).value * up; });
}

// Writes the gradient of `gate` to `x`, and the gradient of `up` to `y`. Either may overwrite its input or the upstream
// gradient.
template <class T> DEVICE void swiglu_backward(const ActivationArgs& a) {
    auto gradients = [](float* to, float gate, float up, float d) {
        Sigmoid s = sigmoid(gate);
        to[0] = d * up * fmaf(s.value * s.rest, gate, s.value);
        to[1] = d * gate * s.value;
    };
    each<Pack<T>::COUNT>(a.count, {as_mut<T>(a.x), as_mut<T>(a.y)}, gradients, as<T>(a.a), as<T>(a.b), as<T>(a.d));
}

// y = a + b
template <class T> DEVICE void add(const ActivationArgs& a) {
    two<T>(a, a.a, a.b, a.y, [](float* y, float first, float second) { *y = first + second; });
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
KERNEL(add, ActivationArgs, 256)

// Elementary functions that match the CPU's (ops/src/kernel/math.rs) operation by operation, and so bit by bit.
#pragma once
#include "device.cuh"

// e^x within 2 units in the last place on [-87, 88]; 0 below, e^88 above, NaN for NaN. Cephes' expf.
DEVICE float exponential(float x) {
    const float magic = 12582912.0f;
    x = x > 88.0f ? 88.0f : x;
    float shifted = fmaf(x, 1.44269504088896340736f, magic);
    float n = shifted - magic;
    float r = fmaf(n, 2.1219444e-4f, fmaf(n, -0.6933594f, x));
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3982e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666666e-1f);
    p = fmaf(p, r, 5e-1f);
    p = fmaf(p, r * r, r) + 1.0f;
    float power = of_bits((to_bits(shifted) << 23) + (127u << 23));
    return x < -87.0f ? 0.0f : p * power;
}

// σ(x) and 1 − σ(x), both without cancellation.
struct Sigmoid { float value, rest; };

DEVICE Sigmoid sigmoid(float x) {
    float e = exponential(-fabsf(x));
    float large = 1.0f / (1.0f + e);
    float small = e * large;
    return x < 0.0f ? Sigmoid{small, large} : Sigmoid{large, small};
}

// The standard normal distribution function, with erfc's Chebyshev fit from Press et al., "Numerical Recipes", section
// 6.2.
DEVICE float normal_cdf(float x) {
    float z = fabsf(x) * 0.707106781186547524400844362104849039f;
    float t = 1.0f / fmaf(z, 0.5f, 1.0f);
    float p = 0.17087277f;
    p = fmaf(p, t, -0.82215223f);
    p = fmaf(p, t, 1.4885159f);
    p = fmaf(p, t, -1.135204f);
    p = fmaf(p, t, 0.27886807f);
    p = fmaf(p, t, -0.18628806f);
    p = fmaf(p, t, 0.09678418f);
    p = fmaf(p, t, 0.37409196f);
    p = fmaf(p, t, 1.0000237f);
    p = fmaf(p, t, -1.2655122f);
    float tail = 0.5f * t * exponential(fmaf(z, -z, p));
    return x < 0.0f ? tail : 1.0f - tail;
}

DEVICE float normal_density(float x) { return 0.3989423f * exponential(-0.5f * x * x); }

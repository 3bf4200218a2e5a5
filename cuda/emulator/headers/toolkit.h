// The implicit declarations of nvcc that candle's kernels use.
#pragma once
#include <assert.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "tensor.h"

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// `__global__` is not defined away: cuda/emulator/nvcc finds kernels by it.

#undef assert
#define assert(CONDITION) ((CONDITION) ? void() : emulator::fail("assertion failed: " #CONDITION))

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }

template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float normcdff(float x) { return float(0.5 * erfc(-double(x) * M_SQRT1_2)); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }

static inline unsigned __float_as_uint(float x) { return to_bits(x); }
static inline int __float_as_int(float x) { return int(to_bits(x)); }
static inline float __uint_as_float(unsigned bits) { return of_bits(bits); }
static inline float __int_as_float(int bits) { return of_bits(unsigned(bits)); }
static inline long long __double_as_longlong(double x) {
    long long bits;
    memcpy(&bits, &x, 8);
    return bits;
}
static inline double __longlong_as_double(long long bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

// Only one thread runs at a time, and it yields only where it waits.
template <class T, class F> T atomically(T* address, F next) {
    emulator::access(address, sizeof(T), true, true);
    emulator::NotOfKernel accesses;
    T old = *address;
    *address = next(old);
    return old;
}
template <class T, class V> T atomicAdd(T* address, V value) {
    return atomically(address, [&](T old) { return old + T(value); });
}
template <class T, class V> T atomicMin(T* address, V value) {
    return atomically(address, [&](T old) { return min(old, T(value)); });
}
template <class T, class V> T atomicMax(T* address, V value) {
    return atomically(address, [&](T old) { return max(old, T(value)); });
}
template <class T, class V> T atomicCAS(T* address, T expected, V value) {
    return atomically(address, [&](T old) { return old == expected ? T(value) : old; });
}
template <class T, class V> T atomicExch(T* address, V value) {
    return atomically(address, [&](T) { return T(value); });
}

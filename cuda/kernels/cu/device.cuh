// Basics for every kernel: entries, dynamic shared memory, conversions of stored numbers, reductions over a block.
//
// nvcc compiles this source for a device, and a C++ compiler compiles it for the host, where cuda/emulator/headers
// emulates the device. It includes no CUDA header. Contraction is off (-fmad=false): fused multiply-adds are written as
// fmaf, so both compilers round identically.
#pragma once

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define ENTRY(NAME, ARGS, THREADS) \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ ARGS a)
// Dynamic shared memory, of the size that the launch sets.
#define DYNAMIC_SHARED(TYPE, NAME) TYPE* NAME = reinterpret_cast<TYPE*>(dynamic_shared)
extern __shared__ __align__(16) unsigned char dynamic_shared[];
DEVICE float of_bits(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t to_bits(float x) { return __float_as_uint(x); }
// Before a loop over an array that must be in registers, where nvcc would not unroll by itself.
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

// Defines an entry for each type that parameters and activations are stored in.
#define KERNEL(NAME, ARGS, THREADS) \
    ENTRY(NAME##_f32, ARGS, THREADS) { NAME<float>(a); } \
    ENTRY(NAME##_bf16, ARGS, THREADS) { NAME<Bf16>(a); } \
    ENTRY(NAME##_f16, ARGS, THREADS) { NAME<F16>(a); }

struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };

DEVICE float load(float x) { return x; }
DEVICE float load(Bf16 x) { return of_bits(uint32_t(x.bits) << 16); }

// Rounds once, to nearest, ties to even; a NaN becomes a quiet NaN.
DEVICE void store(float& to, float x) { to = x; }

#ifdef __CUDACC__
DEVICE void store(Bf16& to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
DEVICE float load(F16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE void store(F16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

// Packs two numbers, the first in the low half.
DEVICE uint32_t pair(Bf16, float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE uint32_t pair(F16, float low, float high) {
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#else
DEVICE void store(Bf16& to, float x) { to.bits = emulator::Bfloat16::rounded(x); }
DEVICE float load(F16 x) { return emulator::Binary16::widened(x.bits); }
DEVICE void store(F16& to, float x) { to.bits = emulator::Binary16::rounded(x); }
template <class T> DEVICE uint32_t pair(T, float low, float high) {
    T of[2];
    store(of[0], low);
    store(of[1], high);
    return of[0].bits | uint32_t(of[1].bits) << 16;
}
#endif

template <class T> DEVICE const T* as(uint64_t address) { return reinterpret_cast<const T*>(address); }
template <class T> DEVICE T* as_mut(uint64_t address) { return reinterpret_cast<T*>(address); }

// The index of this thread in a one-dimensional launch, and the number of threads.
DEVICE uint64_t global_thread() { return uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE uint64_t global_threads() { return uint64_t(gridDim.x) * blockDim.x; }

constexpr unsigned WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

struct Add { DEVICE static float of(float a, float b) { return a + b; } };
struct Max { DEVICE static float of(float a, float b) { return a < b ? b : a; } };

// Reduces each of N numbers with `OP` over the threads of a block, for all threads, in a tree that depends only on the
// block size. `room` holds N floats per warp.
template <class OP, unsigned N> DEVICE void over_block(float (&x)[N], float* room) {
    UNROLL
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
        UNROLL
        for (unsigned i = 0; i < N; i++) x[i] = OP::of(x[i], __shfl_xor_sync(ALL, x[i], distance));
    }
    unsigned warps = blockDim.x / WARP;
    __syncthreads();
    UNROLL
    for (unsigned i = 0; i < N; i++) {
        if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP * N + i] = x[i];
    }
    __syncthreads();
    UNROLL
    for (unsigned i = 0; i < N; i++) {
        x[i] = room[i];
        for (unsigned warp = 1; warp < warps; warp++) x[i] = OP::of(x[i], room[warp * N + i]);
    }
}

template <class OP> DEVICE float over_block(float x, float* room) {
    float one[1] = {x};
    over_block<OP>(one, room);
    return one[0];
}

// Memory access in packs of sixteen bytes, the widest access of a thread, and loops over such packs.
//
// A packed access needs an address that is a multiple of 16. Where an array, or a row of one, is not aligned, the same
// thread accesses the same numbers one by one: results do not depend on the alignment.
#pragma once
#include "device.cuh"

// N consecutive numbers in their stored type.
template <class T, unsigned N = 16 / sizeof(T)> struct Pack {
    static constexpr unsigned COUNT = N, PER_WORD = 4 / sizeof(T);
    uint32_t words[N / PER_WORD];

    DEVICE static Pack of(const float* x) {
        Pack pack;
        UNROLL
        for (unsigned i = 0; i < N / PER_WORD; i++) {
            if constexpr (PER_WORD == 1) pack.words[i] = to_bits(x[i]);
            else pack.words[i] = pair(T{}, x[2 * i], x[2 * i + 1]);
        }
        return pack;
    }
    // Sets number i, which must be zero before.
    DEVICE void put(unsigned i, T x) {
        if constexpr (PER_WORD == 1) words[i] = to_bits(x);
        else words[i / 2] |= uint32_t(x.bits) << (i % 2 * 16);
    }
    DEVICE T stored(unsigned i) const {
        if constexpr (PER_WORD == 1) return of_bits(words[i]);
        else return T{uint16_t(words[i / 2] >> (i % 2 * 16))};
    }
    DEVICE float operator[](unsigned i) const { return load(stored(i)); }
};

// Load and store sixteen bytes.
#ifdef __CUDACC__
DEVICE void load_words(uint32_t* words, const void* from) {
    uint4 all = *static_cast<const uint4*>(from);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
}
DEVICE void store_words(void* to, const uint32_t* words) {
    // nvcc sometimes splits an assignment into four stores.
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}
#else
DEVICE void load_words(uint32_t* words, const void* from) { emulator::copy_pack(words, from, from); }
DEVICE void store_words(void* to, const uint32_t* words) { emulator::copy_pack(to, words, to); }
#endif

template <class... T> DEVICE bool in_packs(const T*... at) { return (reinterpret_cast<uintptr_t>(at) | ...) % 16 == 0; }

template <unsigned N, class T> DEVICE Pack<T, N> load_pack(const T* from) {
    Pack<T, N> pack;
    UNROLL
    for (unsigned i = 0; i < N * sizeof(T) / 16; i++) load_words(pack.words + 4 * i, from + 16 / sizeof(T) * i);
    return pack;
}
template <class T, unsigned N> DEVICE void store_pack(T* to, const Pack<T, N>& pack) {
    UNROLL
    for (unsigned i = 0; i < N * sizeof(T) / 16; i++) store_words(to + 16 / sizeof(T) * i, pack.words + 4 * i);
}

// Access a pack of an array that ends after `left` more numbers. Unless PACKED, its numbers are accessed one by one.
// Numbers after the end are read as zeros.
template <bool PACKED, class T> DEVICE Pack<T> load_pack(const T* from, uint64_t left) {
    if constexpr (PACKED) {
        return load_pack<Pack<T>::COUNT>(from);
    } else {
        Pack<T> pack{};
        UNROLL
        for (unsigned i = 0; i < Pack<T>::COUNT; i++) {
            if (i < left) pack.put(i, from[i]);
        }
        return pack;
    }
}
template <bool PACKED, class T> DEVICE void store_pack(T* to, uint64_t left, const Pack<T>& pack) {
    if constexpr (PACKED) {
        store_pack(to, pack);
    } else {
        UNROLL
        for (unsigned i = 0; i < Pack<T>::COUNT; i++) {
            if (i < left) to[i] = pack.stored(i);
        }
    }
}

// Packs of an array that a thread loads at a time.
constexpr unsigned IN_FLIGHT = 2;

// The packs that a thread processes, `apart` from each other; zeros after the last of `packs`.
template <class T, unsigned N> struct Packs {
    Pack<T, N> of[IN_FLIGHT];

    DEVICE Packs(const T* from, uint64_t at, uint64_t apart, uint64_t packs) {
        UNROLL
        for (unsigned k = 0; k < IN_FLIGHT; k++, at += apart) of[k] = at < packs ? load_pack<N>(from + at * N) : Pack<T, N>{};
    }
};

template <unsigned N, class To, unsigned OUTPUTS, class F, class... In>
DEVICE void store_packs(To* const (&to)[OUTPUTS], F f, uint64_t at, uint64_t apart, uint64_t packs, const In&... in) {
    UNROLL
    for (unsigned k = 0; k < IN_FLIGHT; k++, at += apart) {
        if (at >= packs) return;
        float y[OUTPUTS][N];
        UNROLL
        for (unsigned i = 0; i < N; i++) {
            float of_one[OUTPUTS];
            f(of_one, in.of[k][i]...);
            UNROLL
            for (unsigned o = 0; o < OUTPUTS; o++) y[o][i] = of_one[o];
        }
        UNROLL
        for (unsigned o = 0; o < OUTPUTS; o++) store_pack(to[o] + at * N, Pack<To, N>::of(y[o]));
    }
}

// Applies `f` to `count` numbers one by one. `f` gets a pointer for the result of each array in `to`, and the numbers
// of all other arrays. A thread reads everything of a turn before it writes, so an output may overwrite an input of the
// same type.
template <unsigned N, class To, unsigned OUTPUTS, class F, class... From>
DEVICE void each(uint64_t count, To* const (&to)[OUTPUTS], F f, const From*... from) {
    bool aligned = in_packs(from...);
    for (unsigned o = 0; o < OUTPUTS; o++) aligned = aligned && in_packs(to[o]);
    uint64_t packs = aligned ? count / N : 0, apart = global_threads();
    for (uint64_t at = global_thread(); at < packs; at += IN_FLIGHT * apart) {
        store_packs<N>(to, f, at, apart, packs, Packs<From, N>(from, at, apart, packs)...);
    }
    for (uint64_t i = packs * N + global_thread(); i < count; i += apart) {
        float y[OUTPUTS];
        f(y, load(from[i])...);
        for (unsigned o = 0; o < OUTPUTS; o++) store(to[o][i], y[o]);
    }
}

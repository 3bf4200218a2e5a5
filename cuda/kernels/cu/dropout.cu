// Sets elements to 0 with a probability and scales the others; bit-identical to the CPU's (ops/src/dropout.rs).
//
// Whether an element is kept is a function of a key, its sample and its index in the sample: a word of Philox4x32-10
// (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A thread processes a pack;
// every four elements of it come from one counter.
#include "pack.cuh"

struct DropoutArgs {
    // [samples, size]; y may be x.
    uint64_t x, y;
    uint64_t samples, size;
    // Number of the first sample; further samples count on from it.
    uint64_t first_sample;
    uint32_t key[2];
    float probability, scale;
};

struct Words { uint32_t word[4]; };

DEVICE Words philox(Words counter, uint32_t key0, uint32_t key1) {
    uint32_t* c = counter.word;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
        counter = Words{{uint32_t(p1 >> 32) ^ c[1] ^ key0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ key1, uint32_t(p0)}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// blockIdx.y strides over samples, blockIdx.x over the packs of a sample.
template <bool PACKED, class T> DEVICE void drop(const DropoutArgs& a) {
    constexpr unsigned N = Pack<T>::COUNT;
    for (uint64_t sample = blockIdx.y; sample < a.samples; sample += gridDim.y) {
        uint64_t stream = a.first_sample + sample;
        const T* x = as<T>(a.x) + sample * a.size;
        T* y = as_mut<T>(a.y) + sample * a.size;
        for (uint64_t first = global_thread() * N; first < a.size; first += global_threads() * N) {
            Pack<T> numbers = load_pack<PACKED>(x + first, a.size - first);
            float kept[N];
            UNROLL
            for (unsigned i = 0; i < N; i += 4) {
                uint64_t counter = (first + i) / 4;
                Words words = {{uint32_t(counter), uint32_t(counter >> 32), uint32_t(stream), uint32_t(stream >> 32)}};
                words = philox(words, a.key[0], a.key[1]);
                UNROLL
                for (unsigned lane = 0; lane < 4; lane++) {
                    float uniform = float(words.word[lane] >> 8) * (1.0f / 16777216.0f);
                    kept[i + lane] = uniform < a.probability ? 0.0f : numbers[i + lane] * a.scale;
                }
            }
            store_pack<PACKED>(y + first, a.size - first, Pack<T>::of(kept));
        }
    }
}

template <class T> DEVICE void dropout(const DropoutArgs& a) {
    bool packed = a.size % Pack<T>::COUNT == 0 && in_packs(as<T>(a.x), as<T>(a.y));
    packed ? drop<true, T>(a) : drop<false, T>(a);
}

KERNEL(dropout, DropoutArgs, 256)

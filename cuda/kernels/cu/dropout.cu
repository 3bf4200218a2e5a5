// Elements become 0 with a probability, others are multiplied by a scale: the CPU's bits (model/src/ops/dropout.rs).
//
// Whether an element is kept is a function of a key, its sample and its place in the sample: a word of Philox4x32-10 (Salmon, Moraes,
// Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A thread takes the four elements of one counter.
#include "device.cuh"

struct DropoutArgs {
    // [samples, size]; y may be x.
    uint64_t x, y;
    uint64_t samples, size;
    // Of the first sample; others follow.
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

template <class T> DEVICE void dropout(const DropoutArgs& a) {
    uint64_t blocks = (a.size + 3) / 4;
    for (uint64_t i = global_thread(); i < a.samples * blocks; i += global_threads()) {
        uint64_t sample = i / blocks, block = i % blocks, stream = a.first_sample + sample;
        Words counter = {{uint32_t(block), uint32_t(block >> 32), uint32_t(stream), uint32_t(stream >> 32)}};
        Words words = philox(counter, a.key[0], a.key[1]);
        const T* x = as<T>(a.x) + sample * a.size;
        T* y = as_mut<T>(a.y) + sample * a.size;
        for (uint64_t lane = 0; lane < 4 && 4 * block + lane < a.size; lane++) {
            uint64_t at = 4 * block + lane;
            float uniform = float(words.word[lane] >> 8) * (1.0f / 16777216.0f);
            store(y[at], uniform < a.probability ? 0.0f : load(x[at]) * a.scale);
        }
    }
}

KERNEL(dropout, DropoutArgs, 256)

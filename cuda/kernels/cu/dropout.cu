// Sets elements to 0 with a probability and scales the others; bit-identical to the CPU's (ops/src/dropout.rs).
//
// Whether an element is kept is a function of a key, its sample and its index in the sample: a word of Philox4x32-10
// (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A thread processes a pack;
// every four elements of it come from one counter.
#include "pack.cuh"

struct DropoutArgs {
    // [samples, rows, width], samples `stride` elements apart; y may be x.
    uint64_t x, y;
    uint64_t samples, rows, width, stride;
    // Index, within its whole sample, of the first element here; difference between the indices of the first elements
    // of consecutive rows.
    uint64_t place, apart;
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

// The four words that decide on the elements 4·counter to 4·counter + 3 of a sample.
DEVICE Words words_of(const DropoutArgs& a, uint64_t sample, uint64_t counter) {
    uint64_t stream = a.first_sample + sample;
    Words words = {{uint32_t(counter), uint32_t(counter >> 32), uint32_t(stream), uint32_t(stream >> 32)}};
    return philox(words, a.key[0], a.key[1]);
}

DEVICE float kept_or_0(const DropoutArgs& a, uint32_t word, float x) {
    float uniform = float(word >> 8) * (1.0f / 16777216.0f);
    return uniform < a.probability ? 0.0f : x * a.scale;
}

// blockIdx.y strides over samples, blockIdx.x over the packs of a sample. Packs begin at multiples of four in their
// sample, and are within a row.
template <bool PACKED, class T> DEVICE void drop(const DropoutArgs& a) {
    constexpr unsigned N = Pack<T>::COUNT;
    uint64_t size = a.rows * a.width;
    for (uint64_t sample = blockIdx.y; sample < a.samples; sample += gridDim.y) {
        const T* x = as<T>(a.x) + sample * a.stride;
        T* y = as_mut<T>(a.y) + sample * a.stride;
        for (uint64_t first = global_thread() * N; first < size; first += global_threads() * N) {
            Pack<T> numbers = load_pack<PACKED>(x + first, size - first);
            uint64_t place = a.place + first / a.width * a.apart + first % a.width;
            float kept[N];
            UNROLL
            for (unsigned i = 0; i < N; i += 4) {
                Words words = words_of(a, sample, (place + i) / 4);
                UNROLL
                for (unsigned lane = 0; lane < 4; lane++) {
                    kept[i + lane] = kept_or_0(a, words.word[lane], numbers[i + lane]);
                }
            }
            store_pack<PACKED>(y + first, size - first, Pack<T>::of(kept));
        }
    }
}

// Like `drop`, but one element at a time: rows need not begin at multiples of four in their sample.
template <class T> DEVICE void drop_each(const DropoutArgs& a) {
    uint64_t size = a.rows * a.width;
    for (uint64_t sample = blockIdx.y; sample < a.samples; sample += gridDim.y) {
        for (uint64_t at = global_thread(); at < size; at += global_threads()) {
            uint64_t place = a.place + at / a.width * a.apart + at % a.width;
            Words words = words_of(a, sample, place / 4);
            uint32_t word = words.word[0];
            UNROLL
            for (unsigned lane = 1; lane < 4; lane++) word = place % 4 == lane ? words.word[lane] : word;
            float x = load(as<T>(a.x)[sample * a.stride + at]);
            store(as_mut<T>(a.y)[sample * a.stride + at], kept_or_0(a, word, x));
        }
    }
}

template <class T> DEVICE void dropout(const DropoutArgs& a) {
    constexpr unsigned N = Pack<T>::COUNT;
    bool in_fours = a.place % 4 == 0 && (a.rows == 1 || (a.width % N == 0 && a.apart % 4 == 0));
    bool packed = a.width % N == 0 && a.stride % N == 0 && in_packs(as<T>(a.x), as<T>(a.y));
    if (!in_fours) drop_each<T>(a);
    else packed ? drop<true, T>(a) : drop<false, T>(a);
}

KERNEL(dropout, DropoutArgs, 256)

// Block quantization to 8 or 4 bits for collectives, bit-identical to optim/src/block_codes/mod.rs, which describes the
// format. A warp quantizes or dequantizes one block of elements: reads its elements once from memory, and once more from
// the cache.
#include "ranges.cuh"

struct CodesRange {
    // [count] values in the entry's type.
    uint64_t values;
    // The scales and codes of these values.
    uint64_t codes;
    uint64_t count;
    uint32_t first_block, unused;
};

constexpr unsigned CODES_RANGES = 120;

struct CodesArgs {
    CodesRange ranges[CODES_RANGES];
    // When dequantizing: the number of senders whose values are added, and the bytes from the codes of one sender to
    // those of the next.
    uint64_t senders, apart;
    uint32_t used, is_fp4;
    // Whether values are added to the existing ones.
    uint32_t adds, unused;
};

// Bytes of a scale, in bf16.
constexpr unsigned SCALE = 2;

// The integer nearest to x, in two's complement, for absolute values up to 127. Ties go to the even integer.
DEVICE uint32_t nearest(float x) { return to_bits(x + 12582912.0f) & 0xff; }

struct Int8 {
    static constexpr unsigned BLOCK = 512;
    static constexpr float LARGEST = 127.0f;
    DEVICE static unsigned bytes(unsigned elements) { return elements; }
    template <class T> DEVICE static uint32_t byte(const T* x, unsigned i, unsigned, float scale) {
        return nearest(load(x[i]) / scale);
    }
    DEVICE static int integer(const uint8_t* codes, unsigned i, unsigned) { return int8_t(codes[i]); }
};

struct Fp4 {
    static constexpr unsigned BLOCK = 256;
    static constexpr float LARGEST = 12.0f;
    DEVICE static unsigned bytes(unsigned elements) { return (elements + 1) / 2; }
    DEVICE static uint32_t code(float x) {
        float size = fabsf(x);
        uint32_t code = nearest(fminf(size, 4.0f)) + nearest(fminf(fmaxf(size - 4.0f, 0.0f), 4.0f) * 0.5f) +
            nearest(fmaxf(size - 8.0f, 0.0f) * 0.25f);
        return code | (to_bits(x) >> 28 & 8);
    }
    // The code of element i in the lower half, and that of element ⌈count/2⌉ + i, if there is one, in the upper half.
    template <class T> DEVICE static uint32_t byte(const T* x, unsigned i, unsigned count, float scale) {
        unsigned high = bytes(count) + i;
        return code(load(x[i]) / scale) | (high < count ? code(load(x[high]) / scale) << 4 : 0);
    }
    DEVICE static int integer(const uint8_t* codes, unsigned i, unsigned count) {
        unsigned half = bytes(count);
        int code = i < half ? codes[i] & 0xf : codes[i - half] >> 4;
        int size = code & 7;
        int integer = size + (size > 4 ? size - 4 : 0) + 2 * (size > 6 ? size - 6 : 0);
        return code & 8 ? -integer : integer;
    }
};

// The block of elements that a warp works on. It is empty for a warp beyond the last block of its range.
template <class T, class CODES> struct Block {
    uint64_t values, codes;
    unsigned count;

    DEVICE explicit Block(const CodesArgs& a) {
        const CodesRange& range = range_of_block(a.ranges, a.used);
        uint64_t index = uint64_t(blockIdx.x - range.first_block) * (blockDim.x / WARP) + threadIdx.x / WARP;
        uint64_t first = index * CODES::BLOCK;
        uint64_t left = first < range.count ? range.count - first : 0;
        count = unsigned(left < CODES::BLOCK ? left : CODES::BLOCK);
        values = range.values + first * sizeof(T);
        codes = range.codes + index * (SCALE + CODES::bytes(CODES::BLOCK));
    }
};

template <class T, class CODES> DEVICE void quantize_to(const CodesArgs& a) {
    Block<T, CODES> block(a);
    if (block.count == 0) return;
    const T* x = as<T>(block.values);
    uint8_t* codes = as_mut<uint8_t>(block.codes);
    unsigned lane = threadIdx.x % WARP;
    // Bits of absolute values are in the order of the values; those of a NaN exceed those of an infinity.
    uint32_t bits = 0;
    for (unsigned i = lane; i < block.count; i += WARP) {
        uint32_t of_one = to_bits(fabsf(load(x[i])));
        bits = of_one > bits ? of_one : bits;
    }
    UNROLL
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
        uint32_t other = __shfl_xor_sync(ALL, bits, distance);
        bits = other > bits ? other : bits;
    }
    bool is_finite = bits < 0x7f800000u;
    // Rounded up to bf16; a NaN for a block with a number that is not finite.
    uint32_t scale = is_finite ? (to_bits(of_bits(bits) / CODES::LARGEST) + 0xffffu) & 0xffff0000u : 0x7fc00000u;
    if (lane < SCALE) codes[lane] = uint8_t(scale >> (16 + 8 * lane));
    bool has_codes = bits != 0 && is_finite;
    for (unsigned i = lane; i < CODES::bytes(block.count); i += WARP) {
        codes[SCALE + i] = uint8_t(has_codes ? CODES::byte(x, i, block.count, of_bits(scale)) : 0);
    }
}

// Adds the values of the senders in f32, in their order, and rounds the sum once. The sum begins with the existing value
// or with that of the first sender.
template <class T, class CODES> DEVICE void dequantize_from(const CodesArgs& a) {
    Block<T, CODES> block(a);
    T* y = as_mut<T>(block.values);
    for (unsigned i = threadIdx.x % WARP; i < block.count; i += WARP) {
        float sum = a.adds ? load(y[i]) : 0.0f;
        for (uint64_t sender = 0; sender < a.senders; sender++) {
            const uint8_t* codes = as<uint8_t>(block.codes + sender * a.apart);
            float scale = of_bits(uint32_t(codes[0] | codes[1] << 8) << 16);
            float value = float(CODES::integer(codes + SCALE, i, block.count)) * scale;
            sum = sender == 0 && !a.adds ? value : sum + value;
        }
        store(y[i], sum);
    }
}

template <class T> DEVICE void quantize(const CodesArgs& a) {
    if (a.is_fp4) quantize_to<T, Fp4>(a);
    else quantize_to<T, Int8>(a);
}

template <class T> DEVICE void dequantize(const CodesArgs& a) {
    if (a.is_fp4) dequantize_from<T, Fp4>(a);
    else dequantize_from<T, Int8>(a);
}

KERNEL(quantize, CodesArgs, 256)
KERNEL(dequantize, CodesArgs, 256)

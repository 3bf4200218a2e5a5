// Kernels with faults, and some without, for the emulator's own test. Each takes the address of 64 floats, one per
// thread.
#include "../../../kernels/cu/pack.cuh"
#include "../../../kernels/cu/tensor.cuh"

// Reads what another thread writes, without a barrier in between.
ENTRY(faulty_race, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x] = float(threadIdx.x);
    as_mut<float>(a)[threadIdx.x] = room[(threadIdx.x + 1) % blockDim.x];
}

// Each block adds one to the previous block's result.
ENTRY(faulty_blocks, uint64_t, 64) {
    float* x = as_mut<float>(a);
    if (threadIdx.x == 0) x[blockIdx.x] = blockIdx.x ? x[blockIdx.x - 1] + 1.0f : 1.0f;
}

// Each block writes its index to the same element and, after a barrier, reads it back.
ENTRY(faulty_turns, uint64_t, 64) {
    float* x = as_mut<float>(a);
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x == 0) x[0] = float(blockIdx.x);
        __syncthreads();
        if (threadIdx.x == 0) x[1 + blockIdx.x] = x[0];
        __syncthreads();
    }
}

// The threads of a warp exchange values through shared memory: with only a shuffle in between, with a __syncwarp of
// some of them, and with a __syncwarp of all.
DEVICE void through_shared(uint64_t a, unsigned from) {
    DYNAMIC_SHARED(float, room);
    as_mut<float>(a)[threadIdx.x] = room[from];
}
ENTRY(faulty_shuffled, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x] = 1.0f;
    __shfl_xor_sync(ALL, 1.0f, 1);
    through_shared(a, threadIdx.x ^ 1);
}
ENTRY(faulty_half_synced, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x] = 1.0f;
    __syncwarp(3u << threadIdx.x % 32 / 2 * 2);
    through_shared(a, threadIdx.x ^ 2);
}
ENTRY(faulty_synced, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x] = 1.0f;
    __syncwarp(0x0fu << threadIdx.x % 32 / 4 * 4);
    through_shared(a, threadIdx.x ^ 3);
    __syncthreads();
    through_shared(a, 63 - threadIdx.x);
}

ENTRY(faulty_atomic, uint64_t, 64) { atomicAdd(as_mut<float>(a), 1.0f); }

// Half of the threads wait for the whole block, the others only for their warp.
ENTRY(faulty_divergence, uint64_t, 64) {
    if (threadIdx.x % 2) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

// The mask names all lanes, but half of them wait at a barrier first.
ENTRY(faulty_absent, uint64_t, 64) {
    if (threadIdx.x % 32 < 16) __shfl_xor_sync(ALL, 1.0f, 1);
    __syncthreads();
}

ENTRY(faulty_unnamed, uint64_t, 64) { __shfl_xor_sync(0x0000ffff, 1.0f, 1); }

// Lanes of a warp meet for different operations.
ENTRY(faulty_crossed, uint64_t, 64) {
    if (threadIdx.x % 2) {
        __shfl_xor_sync(ALL, 1.0f, 1);
    } else {
        __shfl_down_sync(ALL, 1.0f, 1);
    }
}

// One lane has ended when the others load matrices.
ENTRY(faulty_ended, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    if (threadIdx.x == 40) return;
    load_matrices(room);
}

// Half of a warp computes a sum; the other half reads from lanes that have ended.
ENTRY(faulty_halves, uint64_t, 64) {
    if (threadIdx.x >= 32) return;
    float x = float(threadIdx.x);
    if (threadIdx.x < 16) {
        for (unsigned distance = 8; distance > 0; distance /= 2) x += __shfl_xor_sync(0x0000ffff, x, distance, 16);
        as_mut<float>(a)[threadIdx.x] = x;
        return;
    }
    // A lane counts as ended only when it returns; the barrier lets all other lanes return first.
    __syncthreads();
    as_mut<float>(a)[threadIdx.x] = __shfl_sync(ALL, x, threadIdx.x - 16);
}

ENTRY(faulty_overrun, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x + 1] = 0.0f;
}

// Writes or reads one float past the end.
ENTRY(faulty_beyond, uint64_t, 64) {
    if (threadIdx.x == 0) as_mut<float>(a)[64] = 0.0f;
}
ENTRY(faulty_read_beyond, uint64_t, 64) {
    float* x = as_mut<float>(a);
    float next = x[threadIdx.x + 1];
    __syncthreads();
    x[threadIdx.x] = next;
}

// Begins a copy of 16 bytes and does not wait for it, or reads the bytes before waiting.
ENTRY(faulty_hasty, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    if (threadIdx.x < 16) begin_copy(room + 4 * threadIdx.x, as<float>(a) + 4 * threadIdx.x, true);
}

ENTRY(faulty_early, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    if (threadIdx.x < 16) begin_copy(room + 4 * threadIdx.x, as<float>(a) + 4 * threadIdx.x, true);
    __syncthreads();
    if (threadIdx.x == 0) as_mut<float>(a)[0] = room[0];
    end_copies();
}

// Writes to the target of a copy in flight, although a barrier separates the write from the start of the copy.
ENTRY(faulty_overwritten, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    if (threadIdx.x < 16) begin_copy(room + 4 * threadIdx.x, as<float>(a) + 4 * threadIdx.x, true);
    __syncthreads();
    if (threadIdx.x == 16) room[0] = 0.0f;
    end_copies();
}

// A row of a matrix that is not aligned to 16 bytes.
ENTRY(faulty_odd, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    load_matrices(room + 1);
}

// A 16-byte access that is not aligned to 16 bytes.
ENTRY(faulty_read_askew, uint64_t, 64) {
    if (threadIdx.x == 0) as_mut<float>(a)[0] = load_pack<4>(as<float>(a) + 1)[0];
}

ENTRY(faulty_written_askew, uint64_t, 64) {
    float x[4] = {};
    if (threadIdx.x == 0) store_pack(as_mut<float>(a) + 1, Pack<float>::of(x));
}

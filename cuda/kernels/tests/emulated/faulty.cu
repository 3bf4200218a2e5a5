// Kernels with faults, for the emulator's own test. Each takes the address of a float for each of its threads.
#include "../../cu/pack.cuh"
#include "../../cu/tensor.cuh"

// Reads what another thread writes, without a barrier between.
ENTRY(faulty_race, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x] = float(threadIdx.x);
    as_mut<float>(a)[threadIdx.x] = room[(threadIdx.x + 1) % blockDim.x];
}

// Half of the threads wait for all of them, the others for their warp alone.
ENTRY(faulty_divergence, uint64_t, 64) {
    if (threadIdx.x % 2) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

ENTRY(faulty_overrun, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x + 1] = 0.0f;
}

// A float behind those of its threads, which are one.
ENTRY(faulty_beyond, uint64_t, 64) {
    if (threadIdx.x == 0) as_mut<float>(a)[1] = 0.0f;
}

// Copies 16 bytes and does not wait for them, or reads them before it waits.
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

// A row of a matrix that begins between two multiples of 16 bytes.
ENTRY(faulty_odd, uint64_t, 64) {
    DYNAMIC_SHARED(float, room);
    load_matrices(room + 1);
}

// Sixteen bytes that begin between two multiples of sixteen.
ENTRY(faulty_read_askew, uint64_t, 64) {
    if (threadIdx.x == 0) as_mut<float>(a)[0] = load_pack<4>(as<float>(a) + 1)[0];
}

ENTRY(faulty_written_askew, uint64_t, 64) {
    float x[4] = {};
    if (threadIdx.x == 0) store_pack(as_mut<float>(a) + 1, Pack<float>::of(x));
}

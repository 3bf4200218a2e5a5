// What is found out too late for an error: kept for the host, which looks at it when it likes.
#pragma once
#include "device.cuh"

// In memory of the host, which it reads without a copy. Kernels of one stream write it, one after the other.
struct Fault {
    // 0 as long as nothing went wrong; otherwise what did, and that is never overwritten.
    uint64_t what;
    uint64_t details[3];
};

// For one thread of a launch.
DEVICE void report(uint64_t fault, uint64_t what, uint64_t first, uint64_t second, uint64_t third) {
    Fault* to = as_mut<Fault>(fault);
    if (to->what != 0) return;
    to->details[0] = first;
    to->details[1] = second;
    to->details[2] = third;
    to->what = what;
}

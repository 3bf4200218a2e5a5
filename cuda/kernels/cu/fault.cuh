// Records faults that are found too late to be returned as errors; the host checks the record later.
#pragma once
#include "device.cuh"

// In host memory that the device writes directly. Only kernels of one stream write it, one after the other.
struct Fault {
    // 0 if nothing went wrong; otherwise the first fault, which is never overwritten.
    uint64_t what;
    uint64_t details[3];
};

// Call from one thread of a launch.
DEVICE void report(uint64_t fault, uint64_t what, uint64_t first, uint64_t second, uint64_t third) {
    Fault* to = as_mut<Fault>(fault);
    if (to->what != 0) return;
    to->details[0] = first;
    to->details[1] = second;
    to->details[2] = third;
    to->what = what;
}

// Launches over several ranges of memory: each block works on a part of one range.
#pragma once
#include "device.cuh"

// Finds the range that a block works on: the last range whose first block is this block or an earlier one.
template <class RANGE> DEVICE const RANGE& range_of_block(const RANGE* ranges, unsigned used) {
    unsigned first = 0, end = used;
    while (end - first > 1) {
        unsigned middle = (first + end) / 2;
        if (ranges[middle].first_block <= blockIdx.x) first = middle;
        else end = middle;
    }
    return ranges[first];
}

// Targets as kernels read them.
#pragma once
#include "device.cuh"

// The target of a row that contributes nothing to the loss.
constexpr uint32_t NO_TARGET = 0xfffffffeu;

// Marks an index that another rank has. A table has at most this many entries.
constexpr uint32_t ELSEWHERE = 0xfffffffdu;

// Targets as kernels read them.
#pragma once
#include "device.cuh"

// The target of a row that contributes nothing to the loss. The number of classes is at most this value.
constexpr uint32_t NO_TARGET = 0xfffffffeu;

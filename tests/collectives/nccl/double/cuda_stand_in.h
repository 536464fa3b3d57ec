// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/cuda_stand_in.h: what tests ask the stand-in for CUDA.
#pragma once

#include <cstddef>

namespace ziggurat::nccl_double {

/// The most device memory that this process had at once.
std::size_t device_bytes_most();

}  // namespace ziggurat::nccl_double

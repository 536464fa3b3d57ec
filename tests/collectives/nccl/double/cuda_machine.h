// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/cuda_machine.h: the double of CUDA as a rank's process sees it.
#pragma once

namespace ziggurat::nccl_double {

/// A machine with the GPUs that ZIGGURAT_DOUBLE_GPUS lists (consecutive numbers: "4" or "0,1,2").
/// Programs that start with this variable have it from the beginning.
void start_cuda_machine();

}  // namespace ziggurat::nccl_double

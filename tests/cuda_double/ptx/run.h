// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/run.h: runs a kernel: blocks, warps and threads in seeded order.
//
// One thread runs at a time, until it waits for its warp or its block, or its turn of some thousand
// instructions is over. Blocks run one after another: a block that waits for another never ends.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "tests/cuda_double/ptx/global_memory.h"
#include "tests/cuda_double/ptx/program.h"

namespace ziggurat::cuda_double::ptx {

struct Launch {
  dim3 grid;
  dim3 block;
  std::uint32_t shared_bytes = 0;  ///< besides the kernel's own
  std::span<const std::byte> parameters;
  std::uint64_t seed = 0;
  std::uint64_t instructions_max = 0;
};

/// How many instructions ran. Errors: Fault, naming kernel, block, thread and instruction.
std::uint64_t run(const Kernel& kernel, const Launch& launch, GlobalMemory& memory);

}  // namespace ziggurat::cuda_double::ptx

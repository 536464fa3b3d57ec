// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/twins.h: which launches a twin makes, for kernels.cc.
#pragma once

#include <string>
#include <vector>

#include "tests/cuda_double/kernels.h"

namespace ziggurat::cuda_double {

/// The twin of the kernel of this mangled name, as run_programs() says; null: its PTX runs.
/// The machine's mutex is held, here and below.
const Twin* program_twin(const std::string& kernel);
bool programs_are_compared() noexcept;

/// Both over the same bytes; the PTX's stay. Appends what the PTX touched. Errors: as ptx::run().
std::uint64_t run_compared(Machine& machine, DeviceState& device, const Twin& twin,
                           const ptx::Kernel& kernel, const ptx::Launch& launch,
                           std::vector<Access>& accesses);

}  // namespace ziggurat::cuda_double

// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/decode.h: from statements to a kernel that runs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "tests/cuda_double/ptx/parse.h"
#include "tests/cuda_double/ptx/program.h"

namespace ziggurat::cuda_double::ptx {

/// `globals`: addresses of the module's variables. `shared`: its shared variables outside
/// functions. Errors: kUnimplemented, naming the instruction that the interpreter does not know.
Kernel decode(const Function& function, const std::vector<Variable>& shared,
              const std::map<std::string, std::uint64_t>& globals);

}  // namespace ziggurat::cuda_double::ptx

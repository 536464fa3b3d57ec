// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/fatbin.h: the PTX in what nvcc puts into an object.
#pragma once

#include <string>
#include <vector>

namespace ziggurat::cuda_double::ptx {

/// `wrapper` is what __cudaRegisterFatBinary gets. Errors: kUnimplemented, if the PTX is compressed
/// (nvcc's --no-compress keeps it readable) or absent.
std::vector<std::string> ptx_of(const void* wrapper);

}  // namespace ziggurat::cuda_double::ptx

// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels.h: kernels as the program launches them: found by the address of their
// stub, run from their PTX or by a twin.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <span>
#include <string>

#include "tests/cuda_double/ptx/global_memory.h"
#include "tests/cuda_double/ptx/program.h"

namespace ziggurat::cuda_double {

/// A launch, as a twin sees it: the same arithmetic, compiled by g++, for long campaigns.
class TwinLaunch {
 public:
  TwinLaunch(dim3 its_grid, dim3 its_block, const ptx::Kernel& kernel,
             std::span<const std::byte> parameters, ptx::GlobalMemory& memory)
      : grid(its_grid),
        block(its_block),
        kernel_(kernel),
        parameters_(parameters),
        memory_(memory) {}

  const dim3 grid;
  const dim3 block;

  template <class T>
  T parameter(std::size_t n) const {
    T value;
    std::memcpy(&value, parameters_.data() + kernel_.parameters.at(n).offset, sizeof(T));
    return value;
  }
  /// The elements behind device addresses, once they are checked and noted for the race clocks.
  /// Errors: ptx::Fault, as a kernel would have.
  template <class T>
  std::span<const T> reads(const T* device, std::size_t count) const {
    return {touch(const_cast<T*>(device), count, false), count};
  }
  template <class T>
  std::span<T> writes(T* device, std::size_t count) const {
    return {touch(device, count, true), count};
  }

 private:
  template <class T>
  T* touch(T* device, std::size_t count, bool writes) const {
    std::byte* first = nullptr;
    for (std::size_t n = 0; n < count; ++n) {
      const auto address = reinterpret_cast<std::uint64_t>(device + n);
      std::byte* here =
          writes ? memory_.write(address, sizeof(T)) : memory_.read(address, sizeof(T));
      if (n == 0) first = here;
    }
    return reinterpret_cast<T*>(first);
  }

  const ptx::Kernel& kernel_;
  std::span<const std::byte> parameters_;
  ptx::GlobalMemory& memory_;
};

/// `stub` is the kernel's name as the host has it (a template's instance too). An empty twin:
/// its PTX runs again.
void set_twin(const void* stub, std::function<void(const TwinLaunch&)> twin);

/// Instructions that kernels ran so far.
std::uint64_t instructions_executed();

}  // namespace ziggurat::cuda_double

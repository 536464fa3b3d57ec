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
#include <typeinfo>
#include <vector>

#include "tests/cuda_double/ptx/global_memory.h"
#include "tests/cuda_double/ptx/program.h"
#include "tests/cuda_double/ptx/run.h"

namespace ziggurat::cuda_double {

/// A launch, as a twin sees it: the same arithmetic, compiled by g++, for long campaigns.
class TwinLaunch {
 public:
  TwinLaunch(const ptx::Kernel& kernel, const ptx::Launch& launch, ptx::GlobalMemory& memory)
      : grid(launch.grid),
        block(launch.block),
        seed(launch.seed),
        kernel_(kernel),
        parameters_(launch.parameters),
        memory_(memory) {}

  const dim3 grid;
  const dim3 block;
  const std::uint64_t seed;  ///< for the order of blocks and threads

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
    return {reinterpret_cast<const T*>(touch(device, count * sizeof(T), false)), count};
  }
  template <class T>
  std::span<T> writes(T* device, std::size_t count) const {
    return {reinterpret_cast<T*>(touch(device, count * sizeof(T), true)), count};
  }

  /// What writes() gave, and the bytes that were there.
  struct Written {
    std::byte* bytes;
    std::vector<std::byte> before;
  };
  const std::vector<Written>& written() const noexcept { return written_; }

 private:
  std::byte* touch(const void* device, std::size_t size_bytes, bool writes) const;

  const ptx::Kernel& kernel_;
  std::span<const std::byte> parameters_;
  ptx::GlobalMemory& memory_;
  mutable std::vector<Written> written_;
};

using Twin = std::function<void(const TwinLaunch&)>;

/// `stub` is the kernel's name as the host has it (a template's instance too). An empty twin:
/// its PTX runs again.
void set_twin(const void* stub, Twin twin);

/// For the kernel of a block program (base/numerics/launch_inl.h), whose stub no other file can
/// name; `program` is its type as typeid has it. Used as run_programs() says.
void add_program_twin(const std::type_info& program, Twin twin);

enum class Programs {
  kPtx,
  kTwins,
  /// The twin, and its PTX over the same bytes: another byte, or one that the PTX touches and the
  /// twin does not tell of, is a finding.
  kCompared,
};
/// Programs without a twin run from their PTX.
void run_programs(Programs how);

/// Instructions that kernels ran so far.
std::uint64_t instructions_executed();

}  // namespace ziggurat::cuda_double

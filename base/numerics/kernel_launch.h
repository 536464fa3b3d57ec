// SPDX-License-Identifier: Apache-2.0
// base/numerics/kernel_launch.h: what the functions that queue kernels share, without CUDA's
// headers: the stream's type, the checks of arguments, and the errors of failed launches.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ziggurat {

/// A cudaStream_t of the current device; null is the legacy default stream.
using StreamHandle = void*;

/// Checks that `address` is a multiple of `alignment`, because a GPU cannot load from other
/// addresses. Null is aligned. Errors: kInvalidArgument, naming `what`.
void require_aligned(const char* what, const void* address, std::size_t alignment);

namespace internal {

/// The most blocks of one launch.
inline constexpr std::uint64_t kBlocksMax = 0x7fffffffu;
/// Checks the number of blocks. Errors: kInvalidArgument for more than kBlocksMax.
void require_launchable(const char* name, std::uint64_t blocks);

/// The error of a call, as CUDA reports it.
struct FailedCall {
  int device;  ///< -1: unknown
  int error;   ///< cudaError_t
  bool out_of_memory;
  const char* error_name;
  const char* error_text;
};
/// Throws the error of `call`, which works on `size_bytes` of memory: kResourceExhausted if memory
/// is missing, otherwise kUnavailable.
[[noreturn]] void call_failed(const char* call, std::uint64_t size_bytes, const FailedCall& failed);
[[noreturn]] void launch_failed(const char* name, std::uint64_t blocks, std::uint32_t threads,
                                const FailedCall& failed);

}  // namespace internal
}  // namespace ziggurat

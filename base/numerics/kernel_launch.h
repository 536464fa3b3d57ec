// SPDX-License-Identifier: Apache-2.0
// base/numerics/kernel_launch.h: what the functions that queue kernels have in common, free of
// CUDA's headers: the stream they take, and how a launch that failed is told.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ziggurat {

/// A cudaStream_t of the current device; null is the legacy default stream.
using StreamHandle = void*;

/// Errors: kInvalidArgument, naming `what`, for an address that is not a multiple of `alignment`,
/// which a GPU cannot load from. Null is aligned.
void require_aligned(const char* what, const void* address, std::size_t alignment);

namespace internal {

/// Blocks of one launch.
inline constexpr std::uint64_t kBlocksMax = 0x7fffffffu;
/// Errors: kInvalidArgument for more than kBlocksMax.
void require_launchable(const char* name, std::uint64_t blocks);

/// A call's error, as CUDA tells it.
struct FailedCall {
  int device;  ///< -1: unknown
  int error;   ///< cudaError_t
  bool out_of_memory;
  const char* error_name;
  const char* error_text;
};
/// Errors: kResourceExhausted where memory is missing, else kUnavailable.
[[noreturn]] void call_failed(const char* call, std::uint64_t size_bytes, const FailedCall& failed);
[[noreturn]] void launch_failed(const char* name, std::uint64_t blocks, std::uint32_t threads,
                                const FailedCall& failed);

}  // namespace internal
}  // namespace ziggurat

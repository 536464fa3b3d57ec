// SPDX-License-Identifier: Apache-2.0
// base/numerics/kernel_launch.cc: the errors of arguments that a launch refuses, and of failed
// calls.
#include "base/numerics/kernel_launch.h"

#include <fmt/format.h>

#include <string>

#include "base/error.h"

namespace ziggurat {

void require_aligned(const char* what, const void* address, std::size_t alignment) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignment == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} begins at {}, but a GPU loads only from multiples of {} bytes: let "
                          "the array begin at such a multiple",
                          what, address, alignment));
}

namespace internal {

void require_launchable(const char* name, std::uint64_t blocks) {
  if (blocks <= kBlocksMax) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("kernel \"{}\" needs {} blocks, but one launch takes at most {}: call the "
                  "function for parts of the array",
                  name, blocks, kBlocksMax));
}

namespace {

[[noreturn]] void fail(const std::string& what, const FailedCall& failed) {
  const std::string device =
      failed.device < 0 ? "the current device" : fmt::format("device {}", failed.device);
  const std::string told =
      fmt::format("{} failed on {}: {} ({})", what, device, failed.error_name, failed.error_text);
  if (failed.out_of_memory) {
    throw Error(ErrorCode::kResourceExhausted,
                told + "; free memory on the device, or give the engine less of it", failed.error);
  }
  throw Error(
      ErrorCode::kUnavailable,
      told + "; work that was queued before may have failed too; restart on a device that works",
      failed.error);
}

}  // namespace

void call_failed(const char* call, std::uint64_t size_bytes, const FailedCall& failed) {
  fail(fmt::format("{} of {} bytes", call, size_bytes), failed);
}

void launch_failed(const char* name, std::uint64_t blocks, std::uint32_t threads,
                   const FailedCall& failed) {
  fail(fmt::format("cudaLaunchKernel of \"{}\" ({} blocks of {} threads)", name, blocks, threads),
       failed);
}

}  // namespace internal
}  // namespace ziggurat

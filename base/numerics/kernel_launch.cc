// SPDX-License-Identifier: Apache-2.0
// base/numerics/kernel_launch.cc: the words of what is refused and of what failed.
#include "base/numerics/kernel_launch.h"

#include <fmt/format.h>

#include <string>

#include "base/error.h"

namespace ziggurat {

void require_aligned(const char* what, const void* address, std::size_t alignment) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignment == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} begins at {}, but a GPU loads only from multiples of {} bytes: begin "
                          "the array at one of them",
                          what, address, alignment));
}

namespace internal {

void require_launchable(const char* name, std::uint64_t blocks) {
  if (blocks <= kBlocksMax) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("kernel \"{}\" needs {} blocks, but one launch takes at most {}: call it "
                          "for parts of the array",
                          name, blocks, kBlocksMax));
}

namespace {

[[noreturn]] void fail(const std::string& what, const FailedCall& failed) {
  const std::string device =
      failed.device < 0 ? "the current device" : fmt::format("device {}", failed.device);
  const std::string told =
      fmt::format("{} on {}: {} ({})", what, device, failed.error_name, failed.error_text);
  if (failed.out_of_memory) {
    throw Error(ErrorCode::kResourceExhausted,
                told + ": free memory on it, or give the engine less", failed.error);
  }
  throw Error(ErrorCode::kUnavailable,
              told + ": what was queued before may have failed too; restart on a device that works",
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

// SPDX-License-Identifier: Apache-2.0
// aio/aligned_bytes.h: memory for one transfer, placed as direct transfers want it, and not zeroed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

namespace ziggurat {

class AlignedBytes {
 public:
  static constexpr std::uint64_t kAlignment = 4096;

  /// Begins `lead_bytes` behind a multiple of kAlignment. Errors: kResourceExhausted.
  explicit AlignedBytes(std::uint64_t size_bytes, std::uint64_t lead_bytes = 0);
  std::span<std::byte> span() const noexcept { return {memory_.get() + lead_, size_}; }

 private:
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  std::size_t lead_;
  std::size_t size_;
};

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/schedule/spare_buffers.h: a few buffers of host memory that one pipeline keeps for the whole
// run. Their number limits how much is under way at once. Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/schedule/context.h"

namespace ziggurat {

class SpareBuffers {
 public:
  /// Allocates the buffers; `holder` names them in the pool's account. Errors: kResourceExhausted.
  SpareBuffers(Context& context, std::size_t count, std::uint64_t size_bytes, const char* holder)
      : memory_(context.permanent_lease(Purpose::kStaging, count * size_bytes, holder)),
        returned_(context.cancel) {
    for (std::size_t i = 0; i < count; ++i)
      spare_.push_back(memory_.bytes().subspan(i * size_bytes, size_bytes));
  }

  /// Waits until a buffer is free, and takes it.
  Task<std::span<std::byte>> take() {
    while (spare_.empty()) {
      returned_.reset();
      co_await returned_.wait();
    }
    const std::span<std::byte> buffer = spare_.back();
    spare_.pop_back();
    co_return buffer;
  }
  void give_back(std::span<std::byte> buffer) {
    spare_.push_back(buffer);
    returned_.set();
  }

 private:
  Lease memory_;
  std::vector<std::span<std::byte>> spare_;
  Signal returned_;
};

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// tiers/device.cc: what all devices share: buffers that return themselves, the text of "does not
// fit", the awaitable copy.
#include "tiers/device.h"

#include <fmt/format.h>

#include <utility>

#include "base/bytes.h"
#include "base/memory_exhausted.h"
#include "base/runtime/async.h"

namespace ziggurat {

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      purpose_(other.purpose_) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this != &other) {
    DeviceBuffer old(std::move(*this));
    device_ = std::exchange(other.device_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
    purpose_ = other.purpose_;
  }
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) device_->free(data_, size_bytes_, purpose_);
}

DeviceBuffer Device::allocate(std::uint64_t size_bytes, Purpose purpose) {
  if (DeviceBuffer buffer = try_allocate(size_bytes, purpose)) return buffer;
  const Account held = account();
  const std::uint64_t free_bytes = held.capacity_bytes() - held.used_bytes();
  const std::string why = free_bytes >= size_bytes
                              ? "but in pieces"
                              : format_bytes(size_bytes - free_bytes) + " too few";
  throw MemoryExhausted(
      {.budget = MemoryBudget::kDevice,
       .had_bytes = held.capacity_bytes(),
       .needed_bytes = held.used_bytes() + size_bytes},
      fmt::format("device memory: {} for {} do not fit: {} are free, {}; held: {}. Give a larger "
                  "device memory budget, or keep fewer parameters live",
                  format_bytes(size_bytes), to_string(purpose), format_bytes(free_bytes), why,
                  held.text()));
}

namespace {

Task<> copy_and_wait(Reactor& reactor, Stream& stream, Stream::Copy request) {
  Signal finished(reactor);
  const std::function<void(std::exception_ptr)> done = [&finished](std::exception_ptr error) {
    if (error) {
      finished.fail(error);
    } else {
      finished.set();
    }
  };
  stream.copy(request, done);
  co_await finished.wait();
}

}  // namespace

// Not itself a coroutine: `request` may be a temporary, and the coroutine starts later.
Task<> copy(Reactor& reactor, Stream& stream, const Stream::Copy& request) {
  return copy_and_wait(reactor, stream, request);
}

}  // namespace ziggurat

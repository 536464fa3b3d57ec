// SPDX-License-Identifier: Apache-2.0
// tiers/device/device.cc: what all devices share: buffers that give back their memory, and the
// error of memory that does not fit.
#include "tiers/device/device.h"

#include <fmt/format.h>

#include <utility>

#include "base/bytes.h"
#include "base/memory_exhausted.h"
#include "tiers/device/device_memory.h"

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
  if (data_ != nullptr) device_->memory().free(data_, purpose_);
}

void DeviceBuffer::used_until(const Event& event) {
  if (data_ != nullptr) device_->memory().used_until(data_, event);
}

std::vector<Event> DeviceBuffer::before_use() const {
  return data_ == nullptr ? std::vector<Event>() : device_->memory().before_use(data_);
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
      fmt::format(
          "device memory has no room for {} of {}: {} are free, {}; held are {}. Give a larger "
          "device memory budget, or keep fewer parameters live",
          format_bytes(size_bytes), to_string(purpose), format_bytes(free_bytes), why,
          held.text()));
}

DeviceBuffer Device::try_allocate(std::uint64_t size_bytes, Purpose purpose) {
  require_present();
  std::byte* data = memory().try_allocate(size_bytes, purpose);
  if (data == nullptr) return {};
  return DeviceBuffer(*this, data, size_bytes, purpose);
}

Account Device::account() const { return memory().account(); }

void Device::on_free(std::function<void()> callback) { memory().on_free(std::move(callback)); }

}  // namespace ziggurat

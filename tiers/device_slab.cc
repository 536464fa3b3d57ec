// SPDX-License-Identifier: Apache-2.0
// tiers/device_slab.cc: an Arena and an Account under one mutex.
#include "tiers/device_slab.h"

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {

DeviceSlab::~DeviceSlab() {
  ZIGGURAT_CHECK(ranges_.empty(), "a device goes away while {} buffers are out: {}", ranges_.size(),
                 account_.text());
}

std::byte* DeviceSlab::try_allocate(std::uint64_t size_bytes, Purpose purpose) {
  ZIGGURAT_CHECK(size_bytes > 0, "a device buffer of nothing, for {}", to_string(purpose));
  const std::lock_guard lock(mutex_);
  if (size_bytes > arena_.size_bytes()) return nullptr;
  std::uint64_t range = staggered_bytes(size_bytes, alignment_bytes_);
  auto offset = arena_.allocate(range);
  if (!offset) {  // staggering is for speed: what fits without it is not refused
    range = round_up(size_bytes, alignment_bytes_);
    offset = arena_.allocate(range);
  }
  if (!offset) return nullptr;
  std::byte* data = base_ + *offset;
  ranges_.emplace(data, range);
  account_.add(purpose, range);
  return data;
}

void DeviceSlab::free(std::byte* data, Purpose purpose) noexcept {
  std::function<void()> callback;
  {
    const std::lock_guard lock(mutex_);
    const auto range = ranges_.find(data);
    ZIGGURAT_CHECK(range != ranges_.end(), "a buffer that this device never lent");
    arena_.free(static_cast<std::uint64_t>(data - base_), range->second);
    account_.subtract(purpose, range->second);
    ranges_.erase(range);
    callback = on_free_;
  }
  if (callback) callback();
}

bool DeviceSlab::contains(const std::byte* data, std::uint64_t size_bytes) const noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const auto begin = reinterpret_cast<std::uintptr_t>(base_);
  return address >= begin && size_bytes <= arena_.size_bytes() &&
         address - begin <= arena_.size_bytes() - size_bytes;
}

Account DeviceSlab::account() const {
  const std::lock_guard lock(mutex_);
  return account_;
}

void DeviceSlab::on_free(std::function<void()> callback) {
  const std::lock_guard lock(mutex_);
  on_free_ = std::move(callback);
}

}  // namespace ziggurat

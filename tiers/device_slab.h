// SPDX-License-Identifier: Apache-2.0
// tiers/device_slab.h: one contiguous piece of device memory, cut into buffers under a hard budget.
// What every Device has inside.
//
// The slab is taken once, at its full size, so the budget is hard and fragmentation is ours to see.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>

#include "tiers/account.h"
#include "tiers/arena.h"

namespace ziggurat {

class DeviceSlab {
 public:
  /// `base` is the device's address; it is never dereferenced here.
  DeviceSlab(std::byte* base, std::uint64_t size_bytes, std::uint64_t alignment_bytes)
      : base_(base),
        alignment_bytes_(alignment_bytes),
        arena_(size_bytes, alignment_bytes),
        account_(arena_.size_bytes()) {}
  ~DeviceSlab();  ///< every buffer must be back

  /// nullptr if no free range is long enough.
  std::byte* try_allocate(std::uint64_t size_bytes, Purpose purpose);
  /// Returns what try_allocate gave, then calls back.
  void free(std::byte* data, Purpose purpose) noexcept;

  /// [data, data + size_bytes) lies in the slab.
  bool contains(const std::byte* data, std::uint64_t size_bytes) const noexcept;
  Account account() const;
  void on_free(std::function<void()> callback);

 private:
  std::byte* base_;
  std::uint64_t alignment_bytes_;
  mutable std::mutex mutex_;  // all below
  Arena arena_;
  Account account_;
  std::unordered_map<const std::byte*, std::uint64_t>
      ranges_;  // what each buffer occupies: its size, staggered
  std::function<void()> on_free_;
};

}  // namespace ziggurat

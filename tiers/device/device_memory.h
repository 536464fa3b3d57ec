// SPDX-License-Identifier: Apache-2.0
// tiers/device/device_memory.h: owns a device's bytes: one contiguous piece, which it cuts into
// buffers under a hard budget. It also knows who must have finished with a range before the next
// user may touch it.
//
// The piece is taken once, at its full size, so the budget is hard, and fragmentation is visible. A
// range may be given back while a device still works on it: it keeps the events that end this work,
// and the next user of the range waits for them. Which range a buffer gets never depends on which
// events have happened, so placement is a function of the calls alone. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "tiers/device/event.h"
#include "tiers/pool/account.h"
#include "tiers/pool/arena.h"

namespace ziggurat {

class DeviceMemory {
 public:
  /// `base` is the device's address; it is never dereferenced by this class.
  DeviceMemory(std::byte* base, std::uint64_t size_bytes, std::uint64_t alignment_bytes)
      : base_(base),
        alignment_bytes_(alignment_bytes),
        arena_(size_bytes, alignment_bytes),
        account_(arena_.size_bytes()) {}
  ~DeviceMemory();  ///< every buffer must have been given back

  /// Returns nullptr if no free range is long enough.
  std::byte* try_allocate(std::uint64_t size_bytes, Purpose purpose);
  /// Takes back memory from try_allocate(), then calls the callback of on_free().
  void free(std::byte* data, Purpose purpose) noexcept;

  /// Returns whether [address, address + size_bytes) lies in one buffer that is in use.
  bool contains(const std::byte* address, std::uint64_t size_bytes) const;
  /// Marks the buffer that contains `address` as in use until `event`, even if it is given back
  /// before.
  void used_until(const std::byte* address, const Event& event);
  /// Returns the events of earlier users of that buffer's memory that have not happened yet: every
  /// user of the buffer waits for them first. Events that have happened are forgotten.
  std::vector<Event> before_use(const std::byte* address);
  /// Returns all events that a user would have to wait for. Needed before the piece itself is
  /// freed.
  std::vector<Event> pending();

  Account account() const;
  void on_free(std::function<void()> callback);

 private:
  using Events = std::vector<Event>;
  /// A buffer that is in use.
  struct Range {
    std::uint64_t range_bytes;  // bytes that it occupies: its size, staggered
    std::uint64_t size_bytes;
    Events before;
    Events uses;
  };
  /// A free range on which a device may still work.
  struct Vacated {
    std::uint64_t end;
    Events events;
  };
  using Ranges = std::map<std::uint64_t, Range>;
  using VacatedRanges = std::map<std::uint64_t, Vacated>;

  std::uint64_t offset_of(const std::byte* address) const noexcept;
  Ranges::iterator range_of(std::uint64_t offset);
  Events inherit(std::uint64_t begin, std::uint64_t end);
  void cut(std::uint64_t at);

  std::byte* base_;
  std::uint64_t alignment_bytes_;
  mutable std::mutex mutex_;  // guards everything below
  Arena arena_;
  Account account_;
  Ranges ranges_;          // by offset
  VacatedRanges vacated_;  // by offset; none overlap
  std::function<void()> on_free_;
};

}  // namespace ziggurat

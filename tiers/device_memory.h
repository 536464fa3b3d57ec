// SPDX-License-Identifier: Apache-2.0
// tiers/device_memory.h: the one owner of a device's bytes: a contiguous piece, cut into buffers
// under a hard budget, and who must have finished with a range before the next may touch it.
//
// The piece is taken once, at its full size, so the budget is hard and fragmentation is ours to
// see. Memory is given back while a device may still work on it: it keeps the events that end this,
// and whoever gets the range next waits for them. Which range a buffer gets never depends on which
// events have happened, so that placement is a function of the calls alone. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "tiers/account.h"
#include "tiers/arena.h"
#include "tiers/event.h"

namespace ziggurat {

class DeviceMemory {
 public:
  /// `base` is the device's address; it is never dereferenced here.
  DeviceMemory(std::byte* base, std::uint64_t size_bytes, std::uint64_t alignment_bytes)
      : base_(base),
        alignment_bytes_(alignment_bytes),
        arena_(size_bytes, alignment_bytes),
        account_(arena_.size_bytes()) {}
  ~DeviceMemory();  ///< every buffer must be back

  /// nullptr if no free range is long enough.
  std::byte* try_allocate(std::uint64_t size_bytes, Purpose purpose);
  /// Returns what try_allocate gave, then calls back.
  void free(std::byte* data, Purpose purpose) noexcept;

  /// [address, address + size_bytes) lies in one buffer that is out.
  bool contains(const std::byte* address, std::uint64_t size_bytes) const;
  /// The buffer that `address` lies in is in use until `event`, also if it is given back before.
  void used_until(const std::byte* address, const Event& event);
  /// Events of earlier users of that buffer's memory that are still to happen: whoever touches the
  /// buffer waits for them first. Those that happen are forgotten.
  std::vector<Event> before_use(const std::byte* address);
  /// All events that somebody would have to wait for: before the piece itself goes away.
  std::vector<Event> pending();

  Account account() const;
  void on_free(std::function<void()> callback);

 private:
  using Events = std::vector<Event>;
  /// A buffer that is out.
  struct Range {
    std::uint64_t range_bytes;  // what it occupies: its size, staggered
    std::uint64_t size_bytes;
    Events before;
    Events uses;
  };
  /// A free range that a device may still work on.
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
  mutable std::mutex mutex_;  // all below
  Arena arena_;
  Account account_;
  Ranges ranges_;          // by offset
  VacatedRanges vacated_;  // by offset; none overlap
  std::function<void()> on_free_;
};

}  // namespace ziggurat

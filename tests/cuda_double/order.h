// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/order.h: what happens before what (vector clocks), and accesses to memory that
// nothing orders.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ziggurat::cuda_double {

/// Something whose acts have an order among themselves: the host (0), or a stream.
using Actor = std::uint32_t;
inline constexpr Actor kHost = 0;

/// How far, of each actor's acts, somebody knows that they are over.
class Clock {
 public:
  void merge(const Clock& other);
  void set(Actor actor, std::uint64_t tick);
  std::uint64_t of(Actor actor) const noexcept { return actor < ticks_.size() ? ticks_[actor] : 0; }

 private:
  std::vector<std::uint64_t> ticks_;
};

/// Addresses from begin to before end.
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool overlaps(Range other) const noexcept { return begin < other.end && other.begin < end; }
  bool contains(Range other) const noexcept { return begin <= other.begin && other.end <= end; }
  std::uintptr_t size_bytes() const noexcept { return end - begin; }
};
Range range_of(const void* address, std::size_t size_bytes) noexcept;

struct Access {
  Range range;
  bool writes = false;
};

/// One act: who, the how manieth of his, and what he knew when he did it (his own act included).
struct Act {
  Actor actor;
  std::uint64_t tick;
  const Clock& knew;
  std::string what;
};

/// The last write of each byte, and the reads since. Accesses are added in an order that respects
/// what happens before what; a pair is a race if the later does not know the earlier and one of
/// them writes.
class AccessHistory {
 public:
  /// Adds it; if it races, says with what ("a copy on stream 2 wrote ...").
  std::optional<std::string> add(const Access& access, const Act& act);
  void forget(Range range);

 private:
  struct Touch {
    Actor actor = kHost;
    std::uint64_t tick = 0;
    std::shared_ptr<const std::string> what;  // null: never
  };
  struct Cell {
    std::uintptr_t end;
    Touch write;
    std::vector<Touch> reads;  // one an actor
  };
  using Cells = std::map<std::uintptr_t, Cell>;

  void split_at(std::uintptr_t address);
  /// Makes cells for the parts of `range` that have none.
  void fill(Range range);
  static std::optional<std::string> race(std::uintptr_t begin, const Cell& cell,
                                         const Access& access, const Act& act);

  Cells cells_;
};

}  // namespace ziggurat::cuda_double

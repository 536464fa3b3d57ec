// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/read_once.h: reads this rank's part of a unit from a home on NVMe once for all
// ranks that need it about the same time, as ranks do that run the same model.
//
// What was read stays until each rank has had it, or newer ones take its place. It lies in memory
// of its own: a lease that is kept for a rank that may not come would be missed by the sweep.
// Private to the engine. Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/homes/param_home.h"

namespace ziggurat {

class ReadOnce {
 public:
  /// Each part is needed by `ranks` ranks. At most `kept_bytes` are kept for those that have not
  /// come yet.
  ReadOnce(Context& context, UnitParamHome& home, std::size_t ranks, std::uint64_t kept_bytes)
      : context_(context), home_(home), ranks_(ranks), kept_bytes_max_(kept_bytes) {}

  /// A unit's part where the CPU can read it, and what keeps it.
  struct Part {
    std::span<const std::byte> bytes;
    std::shared_ptr<const std::vector<std::byte>> kept;
  };
  /// Returns this rank's part of a unit of the table. Errors: those of UnitParamHome::fetch().
  Task<Part> fetch(UnitId unit, Need need, IoPriority priority);
  /// Forgets all: parts change.
  void forget() { read_.clear(); }

 private:
  struct Read {
    explicit Read(CancelScope& cancel) : ended(cancel) {}
    UnitId unit = 0;
    std::size_t uses = 1;
    std::shared_ptr<std::vector<std::byte>> bytes;  // null until it was read
    bool failed = false;
    Signal ended;
  };
  Task<> read(Read& its, Need need, IoPriority priority);
  void drop_oldest();

  Context& context_;
  UnitParamHome& home_;
  std::size_t ranks_;
  std::uint64_t kept_bytes_max_;
  std::list<std::shared_ptr<Read>> read_;  // the newest first
};

}  // namespace ziggurat

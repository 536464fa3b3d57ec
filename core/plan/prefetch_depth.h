// SPDX-License-Identifier: Apache-2.0
// core/plan/prefetch_depth.h: how many units are brought ahead of the one in use. Pure functions;
// any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/sharding/chunk_table.h"
#include "core/sharding/placement.h"

namespace ziggurat {

/// One unit comes while the next waits for its turn: enough where a unit is large, or is copied.
inline constexpr std::size_t kUnitsAheadLeast = 2;
inline constexpr std::size_t kUnitsAheadMost = 8;

struct PrefetchFacts {
  std::size_t units = 0;
  std::uint64_t all_bytes = 0;  ///< of all units
  bool from_drive = false;      ///< they are read from a drive
  /// The bytes in flight with which that drive is as fast as it can be (DriveProfile); 0 if that
  /// was not measured.
  std::uint64_t outstanding_bytes = 0;
};

/// Returns as many units as keep the drive busy while one of them is used.
constexpr std::size_t units_ahead(const PrefetchFacts& facts) noexcept {
  if (!facts.from_drive || facts.units == 0 || facts.all_bytes == 0) return kUnitsAheadLeast;
  const std::uint64_t mean_bytes = std::max<std::uint64_t>(1, facts.all_bytes / facts.units);
  const std::uint64_t busy = (facts.outstanding_bytes + mean_bytes - 1) / mean_bytes;
  return std::clamp<std::size_t>(busy, kUnitsAheadLeast, kUnitsAheadMost);
}

/// Returns the same for the units of `table` with `outstanding_bytes` of PrefetchFacts. Units that
/// ranks gather come in an order that may depend on nothing that ranks do not share, as the speed
/// of a drive.
inline std::size_t units_ahead(const ChunkTable& table, const Placement& placement,
                               std::uint64_t outstanding_bytes) {
  if (table.sharding().optimizer_sharded() || table.sharding().params_sharded())
    return kUnitsAheadLeast;
  PrefetchFacts facts{.from_drive = placement.params == Tier::kNvme,
                      .outstanding_bytes = outstanding_bytes};
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    if (!table.has_home(u)) continue;
    ++facts.units;
    facts.all_bytes += table.unit_param_bytes(u);
  }
  return units_ahead(facts);
}

}  // namespace ziggurat

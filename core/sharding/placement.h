// SPDX-License-Identifier: Apache-2.0
// core/sharding/placement.h: which tier each class of state lives on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ziggurat {

/// A level of the tower.
enum class Tier : std::uint8_t { kDevice, kHost, kNvme };

std::string_view to_string(Tier tier) noexcept;

/// Says which tier each class of state lives on. Where a trainer lends its parameters and
/// gradients, these live in its own memory, and only `optimizer` counts.
///
/// Optimizer records may be divided, in the order of the model: the first ones, as many as
/// `device_record_bytes` hold, are on the device, those after them in host memory, the rest on
/// NVMe. If `optimizer` is on NVMe, every step writes all records there, and reads none back that
/// stays in memory. If `optimizer` is in memory, only checkpoints write records.
struct Placement {
  Tier params = Tier::kHost;
  Tier grads = Tier::kHost;
  Tier optimizer = Tier::kNvme;           ///< tier of the records that are left
  std::uint64_t device_record_bytes = 0;  ///< device memory for records
  /// Host memory for records if `optimizer` is on NVMe. Not given: all memory that nothing else
  /// needs.
  std::optional<std::uint64_t> host_record_bytes{};
  /// True if the engine chooses all of the above when it is opened: from the budgets, with
  /// `optimizer` on NVMe (core/plan/auto_placement.h); for a trainer that lends its memory, from
  /// the budget or the memory that is free (core/plan/lent_placement.h).
  bool automatic = false;
};

/// Reads "params=host,grads=host,optimizer=nvme" or "all=host"; classes not named keep their
/// default. Optimizer records are divided from the top: "optimizer=device:2GiB,host:8GiB,nvme",
/// where each tier except the last has a size. "auto" leaves every choice to the engine. Errors:
/// kInvalidArgument naming the wrong word.
Placement parse_placement(const std::string& text);
/// Returns a text that parse_placement() reads as the same placement.
std::string to_string(const Placement& placement);

}  // namespace ziggurat

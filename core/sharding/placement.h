// SPDX-License-Identifier: Apache-2.0
// core/sharding/placement.h: which tier each class of state lives on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ziggurat {

/// A level of the tower; or memory of the trainer's own, which it lends the engine (Engine::open):
/// parameters and gradients alone can be there, both of them, and no setting names it.
enum class Tier : std::uint8_t { kDevice, kHost, kNvme, kTrainer };

std::string_view to_string(Tier tier) noexcept;

/// Which tier each class of state lives on.
///
/// Optimizer records may be divided, in the order of the model: the first ones are on the device,
/// as many as `device_record_bytes` hold, those after them in host memory, the rest on NVMe. With
/// `optimizer` on NVMe every step writes all of them there, wherever they stay: none that stays in
/// memory is read again. With `optimizer` in memory checkpoints alone write them.
struct Placement {
  Tier params = Tier::kHost;
  Tier grads = Tier::kHost;
  Tier optimizer = Tier::kNvme;           ///< of the records that are left
  std::uint64_t device_record_bytes = 0;  ///< of the device's memory
  /// As much of host memory, with `optimizer` on NVMe; none given: what nothing else needs.
  std::optional<std::uint64_t> host_record_bytes{};
  /// All of that is chosen from the budgets when an engine is opened (core/plan/auto_placement.h),
  /// with `optimizer` on NVMe.
  bool automatic = false;
};

/// Reads "params=host,grads=host,optimizer=nvme" or "all=host"; classes not named keep their
/// default. Records are divided from the top: "optimizer=device:2GiB,host:8GiB,nvme", where each
/// tier but the last has a size. "auto" leaves it all to the engine. Errors: kInvalidArgument
/// naming the word that is wrong.
Placement parse_placement(const std::string& text);
/// What parse_placement() reads as the same.
std::string to_string(const Placement& placement);

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// base/numerics/simd_target.cc: lists the targets, reads ZIGGURAT_SIMD, and keeps a forced target.
#include "base/numerics/simd_target.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/highway.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/log.h"

namespace ziggurat {
namespace {

using internal::kSpecificationSlot;

struct Target {
  std::string_view name;
  std::size_t slot;
};

/// Returns a target's position in a HWY_EXPORT table from its bit (the bits are in the order of the
/// table, best first).
std::size_t slot_of(std::int64_t target_bit) {
  return hwy::Num0BitsBelowLS1Bit_Nonzero64(
      static_cast<std::uint64_t>(HWY_CHOSEN_TARGET_SHIFT(target_bit)));
}

/// Lists the targets, best first. The specification is last, and replaces Highway's own scalar and
/// emulated targets.
std::vector<Target> find_targets() {
  std::vector<Target> targets;
  for (const std::int64_t bit : hwy::SupportedAndGeneratedTargets()) {
    if (bit != HWY_SCALAR && bit != HWY_EMU128)
      targets.push_back({hwy::TargetName(bit), slot_of(bit)});
  }
  targets.push_back({"scalar", kSpecificationSlot});
  return targets;
}

const std::vector<Target>& targets() {
  static const std::vector<Target> found = find_targets();
  return found;
}

std::optional<std::size_t> slot_by_name(std::string_view name) {
  for (const Target& target : targets()) {
    if (target.name == name) return target.slot;
  }
  return std::nullopt;
}

std::string unknown_target(std::string_view setting, std::string_view name) {
  return fmt::format(
      "{}={} names no SIMD target of this CPU and this build; the valid names are {}", setting,
      name, fmt::join(simd_targets(), ", "));
}

struct Choice {
  std::size_t slot;
  std::string error;  ///< the error of ZIGGURAT_SIMD; empty if there is none
};

Choice read_environment() {
  const std::size_t best = targets().front().slot;
  const char* name = std::getenv("ZIGGURAT_SIMD");
  if (name == nullptr || *name == '\0') return {best, {}};
  if (const auto slot = slot_by_name(name)) return {*slot, {}};
  Choice choice{best, unknown_target("ZIGGURAT_SIMD", name)};
  note_degraded("simd", choice.error);
  return choice;
}

const Choice& environment() {
  static const Choice choice = read_environment();
  return choice;
}

constexpr std::size_t kNotForced = ~std::size_t{0};
std::atomic<std::size_t> forced_slot{kNotForced};

}  // namespace

namespace internal {

std::size_t simd_slot() noexcept {
  const std::size_t forced = forced_slot.load(std::memory_order_relaxed);
  return forced != kNotForced ? forced : environment().slot;
}

}  // namespace internal

std::string_view simd_target() {
  if (forced_slot.load(std::memory_order_relaxed) == kNotForced && !environment().error.empty()) {
    throw Error(ErrorCode::kInvalidArgument, environment().error);
  }
  const std::size_t slot = internal::simd_slot();
  for (const Target& target : targets()) {
    if (target.slot == slot) return target.name;
  }
  return "unknown";
}

std::vector<std::string_view> simd_targets() {
  std::vector<std::string_view> names;
  for (const Target& target : targets()) names.push_back(target.name);
  return names;
}

void force_simd_target(std::string_view name) {
  if (name.empty()) {
    forced_slot.store(targets().front().slot, std::memory_order_relaxed);
    return;
  }
  const auto slot = slot_by_name(name);
  if (!slot) throw Error(ErrorCode::kInvalidArgument, unknown_target("force_simd_target", name));
  forced_slot.store(*slot, std::memory_order_relaxed);
}

}  // namespace ziggurat

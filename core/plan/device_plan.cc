// SPDX-License-Identifier: Apache-2.0
// core/plan/device_plan.cc: computes the parts of the device budget.
#include "core/plan/device_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "base/bytes.h"
#include "base/memory_exhausted.h"
#include "core/plan/prefetch_depth.h"
#include "core/schedule/gradients/gradient_flow.h"
#include "core/schedule/optimizer/device_staging.h"
#include "core/schedule/params/unit_gather.h"
#include "tiers/pool/arena.h"

namespace ziggurat {
namespace {

/// The strictest alignment of a device's buffers (tiers/device/host_device.cc).
constexpr std::uint64_t kAlignmentBytes = 4096;
/// The most memory that fragmentation was seen to cost in tests: buffers are freed in another order
/// than they were allocated.
constexpr std::uint64_t kFragmentationBytes = kMiB;
/// The number of accumulators of small units that may be in use at once: one for the unit that is
/// begun and two whose gradients are leaving. In stage 3 they are always planned for, because the
/// region for gathered units takes all memory that is left.
constexpr std::size_t kOwnAccumulators = 3;
/// The number of units whose parameters are on the device at once: the one in use, and those that
/// prefetch brings at least.
constexpr std::size_t kLiveUnits = 1 + kUnitsAheadLeast;

/// Returns how many bytes of the device a buffer of `size_bytes` takes.
std::uint64_t buffer_bytes(std::uint64_t size_bytes) {
  return staggered_bytes(size_bytes, kAlignmentBytes);
}

/// Returns the largest buffer that takes no more than `room_bytes`.
std::uint64_t largest_buffer(std::uint64_t room_bytes) {
  const std::uint64_t pages_bytes = room_bytes / kAlignmentBytes * kAlignmentBytes;
  return buffer_bytes(pages_bytes) > room_bytes ? pages_bytes - kAlignmentBytes : pages_bytes;
}

class Division {
 public:
  Division(const ChunkTable& table, const Placement& placement, const DeviceRequest& request)
      : table_(table), placement_(placement), request_(request) {
    largest_bytes_ = table.largest_unit_padded_count() * sizeof(float);
    for (const UnitId unit : request.trainer.held) {
      if (unit < table.unit_count()) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("trainer_held_units names unit {}, but the model has only {} units",
                              unit, table.unit_count()));
    }
  }

  DevicePlan plan(std::uint64_t budget_bytes) const {
    DevicePlan plan = placed();
    plan.accumulator_bytes = buffer_bytes(largest_bytes_);
    plan.in_use_bytes = in_use_bytes();
    plan.slack_bytes = gathers() || !request_.trainer.held.empty() ? kFragmentationBytes : 0;
    set_aside(plan, 1);
    plan.live_bytes = plan.in_use_bytes;
    plan.smallest_bytes = plan.peak_bytes() + plan.slack_bytes;
    if (budget_bytes < plan.smallest_bytes) return plan;
    if (two_fit(plan, budget_bytes)) set_aside(plan, 2);
    if (!gathers()) let_leave(plan, budget_bytes);
    plan.live_bytes = live_bytes(plan, budget_bytes);
    plan.keeps_all = all_at_home() || plan.live_bytes >= all_units();
    return plan;
  }

  std::uint64_t comfortable_bytes() const {
    DevicePlan plan = this->plan(0);
    set_aside(plan, 2);
    plan.live_bytes = std::max(plan.in_use_bytes, memory_of(units_in_a_row()));
    return plan.peak_bytes() + plan.slack_bytes;
  }

 private:
  bool gathers() const { return table_.sharding().params_sharded(); }
  bool all_at_home() const { return placement_.params == Tier::kDevice && !gathers(); }
  bool held(UnitId unit) const {
    return std::ranges::find(request_.trainer.held, unit) != request_.trainer.held.end();
  }
  std::uint64_t param_bytes(UnitId unit) const {
    return gathers() ? UnitGather::place_bytes(table_, unit)
                     : buffer_bytes(table_.unit_param_bytes(unit));
  }

  /// Returns what units of `units_bytes` in all take: in stage 3 they share one buffer.
  std::uint64_t memory_of(std::uint64_t units_bytes) const {
    return gathers() ? buffer_bytes(units_bytes) : units_bytes;
  }
  std::uint64_t all_units() const {
    std::uint64_t all = 0;
    for (UnitId u = 0; u < table_.unit_count(); ++u) all += param_bytes(u);
    return memory_of(all);
  }

  /// Plans the state that is placed on the device, and the trainer's memory.
  DevicePlan placed() const {
    DevicePlan plan;
    plan.trainer_bytes = buffer_bytes(request_.trainer.device_bytes);
    for (UnitId u = 0; placement_.params == Tier::kDevice && u < table_.unit_count(); ++u)
      plan.home_bytes += buffer_bytes(table_.home_count(u) * table_.element_bytes(u));
    const std::size_t records = device_chunks(table_, placement_);
    plan.record_bytes = device_record_bytes(table_, records);
    for (const Chunk& chunk : table_.chunks())
      if (placement_.grads == Tier::kDevice)
        plan.gradient_bytes += buffer_bytes(chunk.param_bytes());
    if (request_.out_of_reach)
      plan.staging_bytes = DeviceStaging::kItems *
                           buffer_bytes(DeviceStaging::item_bytes(table_, placement_, records));
    return plan;
  }

  std::uint64_t in_use_bytes() const {
    if (all_at_home()) return 0;
    std::uint64_t total = 0;
    std::uint64_t largest_other = 0;
    for (UnitId u = 0; u < table_.unit_count(); ++u) {
      const std::uint64_t bytes = param_bytes(u);
      if (held(u) || (gathers() && request_.keep_gathered))
        total += bytes;
      else
        largest_other = std::max(largest_other, bytes);
    }
    return memory_of(total + largest_other);
  }

  /// Counts `others` accumulators of small units beside those that are set aside.
  void set_aside(DevicePlan& plan, std::size_t count, std::size_t others = 1) const {
    plan.accumulators = count;
    plan.own_accumulators = gathers() ? kOwnAccumulators : others;
    const OwnAccumulators own = own_accumulators(count, others);
    plan.other_accumulator_bytes = own.held_bytes + own.other_bytes;
  }

  /// Memory for accumulators beyond those set aside.
  struct OwnAccumulators {
    std::uint64_t held_bytes = 0;   ///< for held units, through the whole backward
    std::uint64_t other_bytes = 0;  ///< for other units, as many as are in use at once
  };
  OwnAccumulators own_accumulators(std::size_t spare, std::size_t others = 1) const {
    OwnAccumulators result;
    std::vector<std::uint64_t> small;
    std::uint64_t largest = 0;  // the largest unit that an accumulator set aside would serve
    for (UnitId u = 0; u < table_.unit_count(); ++u) {
      const std::uint64_t size_bytes = table_.unit(u).padded_count * sizeof(float);
      const bool own = GradientFlow::takes_own_accumulator(size_bytes, largest_bytes_);
      const std::uint64_t bytes = buffer_bytes(size_bytes);
      if (!held(u)) {
        if (own) small.push_back(bytes);
        if (!own) largest = std::max(largest, bytes);
      } else if (own || spare == 0) {
        result.held_bytes += bytes;
      } else {
        --spare;
      }
    }
    const std::size_t held_count = std::min(request_.trainer.held.size(), kOwnAccumulators - 1);
    std::size_t more = gathers() ? kOwnAccumulators - held_count : others;
    if (spare == 0 && largest > 0) {
      result.other_bytes += largest;
      --more;
    }
    std::ranges::sort(small, std::greater<>());
    for (std::size_t i = 0; i < std::min(more, small.size()); ++i) result.other_bytes += small[i];
    return result;
  }

  /// Counts as many accumulators of small units that are on their way as there is room for: those
  /// that do not fit are waited for.
  void let_leave(DevicePlan& plan, std::uint64_t budget_bytes) const {
    for (std::size_t others = kOwnAccumulators; others > 1; --others) {
      DevicePlan more = plan;
      set_aside(more, plan.accumulators, others);
      if (more.peak_bytes() + more.slack_bytes > budget_bytes) continue;
      plan = more;
      return;
    }
  }

  /// Whether two accumulators fit beside the parameters of two units: the one in use and the next.
  bool two_fit(DevicePlan plan, std::uint64_t budget_bytes) const {
    set_aside(plan, 2);
    std::uint64_t largest = 0;
    for (UnitId u = 0; !all_at_home() && u < table_.unit_count(); ++u)
      largest = std::max(largest, param_bytes(u));
    plan.live_bytes = std::max(plan.in_use_bytes, memory_of(2 * largest));
    return plan.peak_bytes() + kFragmentationBytes <= budget_bytes;
  }

  std::uint64_t live_bytes(DevicePlan plan, std::uint64_t budget_bytes) const {
    if (all_at_home()) return 0;
    plan.live_bytes = 0;
    const std::uint64_t rest = plan.peak_bytes();
    if (gathers())
      return std::min(all_units(), largest_buffer(budget_bytes - rest - plan.slack_bytes));
    if (const std::uint64_t all = fitting(budget_bytes); rest + all <= budget_bytes) return all;
    // Parameters that do not all fit give way to what is allocated later, so there are two peaks.
    // One is in forward, when there are no gradients yet. The other is in backward, beside the
    // gradients and the accumulators of held units.
    const std::uint64_t for_good = rest - plan.gradient_bytes - plan.other_accumulator_bytes;
    const std::uint64_t in_backward =
        for_good + plan.gradient_bytes + own_accumulators(plan.accumulators).held_bytes;
    // Accumulators of other units are there for a part of backward, in which others fit.
    const std::uint64_t peak = std::max({for_good + fitting(budget_bytes - for_good),
                                         in_backward + fitting(budget_bytes - in_backward),
                                         rest + fitting(budget_bytes - rest)});
    return std::max(plan.in_use_bytes, peak - std::min(peak, rest));
  }

  /// Returns the largest sum of units' sizes that is not above `room_bytes`.
  std::uint64_t fitting(std::uint64_t room_bytes) const {
    if (const std::uint64_t all = all_units(); all <= room_bytes) return all;
    // The sums are counted in pages, or in a large room in grains of at most a 65,536th of it.
    constexpr std::uint64_t kGrainsMax = 65'536;
    const std::uint64_t grain = round_up(room_bytes / kGrainsMax + 1, kAlignmentBytes);
    std::vector<bool> reached(room_bytes / grain + 1);
    reached[0] = true;
    for (UnitId u = 0; u < table_.unit_count(); ++u) {
      const std::uint64_t size = (param_bytes(u) + grain - 1) / grain;
      for (std::uint64_t sum = reached.size(); sum-- > size;) {
        if (reached[sum - size]) reached[sum] = true;
      }
    }
    const auto most = std::find(reached.rbegin(), reached.rend(), true);
    return static_cast<std::uint64_t>(reached.rend() - most - 1) * grain;
  }

  std::uint64_t units_in_a_row() const {
    if (all_at_home()) return 0;
    std::uint64_t most = 0;
    for (UnitId first = 0; first < table_.unit_count(); ++first) {
      std::uint64_t sum = 0;
      for (UnitId u = first; u < std::min<std::size_t>(first + kLiveUnits, table_.unit_count());
           ++u)
        sum += param_bytes(u);
      most = std::max(most, sum);
    }
    return most;
  }

  const ChunkTable& table_;
  const Placement& placement_;
  const DeviceRequest& request_;
  std::uint64_t largest_bytes_ = 0;
};

}  // namespace

std::string DevicePlan::text() const {
  std::string list;
  const auto add = [&](const char* what, std::uint64_t size_bytes) {
    if (size_bytes == 0) return;
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", what, format_bytes(size_bytes));
  };
  add("activations", trainer_bytes);
  add("parameters on the device", home_bytes);
  add("optimizer state on the device", record_bytes);
  add("gradients on the device", gradient_bytes);
  add("staging of updates", staging_bytes);
  add("accumulators", accumulator_bytes + other_accumulator_bytes);
  add("parameters in use", in_use_bytes);
  add("fragmentation", slack_bytes);
  return list;
}

std::size_t device_chunks(const ChunkTable& table, const Placement& placement) {
  const std::span<const Chunk> chunks = table.chunks();
  if (placement.optimizer == Tier::kDevice) return chunks.size();
  std::uint64_t left_bytes = placement.device_record_bytes;
  for (std::size_t id = 0; id < chunks.size(); ++id) {
    const std::uint64_t needed = chunks[id].constant ? 0 : buffer_bytes(chunks[id].record_bytes());
    if (needed > left_bytes) return id;
    left_bytes -= needed;
  }
  return chunks.size();
}

std::uint64_t device_record_bytes(const ChunkTable& table, std::size_t count) {
  std::uint64_t total = 0;
  for (const Chunk& chunk : table.chunks().first(count))
    if (!chunk.constant) total += buffer_bytes(chunk.record_bytes());
  return total;
}

DevicePlan plan_device(const ChunkTable& table, const Placement& placement,
                       const DeviceRequest& request, std::uint64_t budget_bytes) {
  return Division(table, placement, request).plan(budget_bytes);
}

std::uint64_t comfortable_device_bytes(const ChunkTable& table, const Placement& placement,
                                       const DeviceRequest& request) {
  return Division(table, placement, request).comfortable_bytes();
}

void require_device_budget(const DevicePlan& plan, std::uint64_t budget_bytes) {
  if (plan.smallest_bytes <= budget_bytes) return;
  throw MemoryExhausted(
      {.budget = MemoryBudget::kDevice,
       .had_bytes = budget_bytes,
       .needed_bytes = plan.smallest_bytes,
       .smallest_bytes = plan.smallest_bytes},
      fmt::format("`device_memory` {} is too small; the smallest that works with these settings is "
                  "{} MiB: {}",
                  format_bytes(budget_bytes), round_up(plan.smallest_bytes, kMiB) / kMiB,
                  plan.text()));
}

}  // namespace ziggurat

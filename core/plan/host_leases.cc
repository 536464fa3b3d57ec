// SPDX-License-Identifier: Apache-2.0
// core/plan/host_leases.cc: counts the leases that can be there at once, within the budget.
#include "core/plan/host_leases.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "core/schedule/gradients/gradient_flow.h"

namespace ziggurat {
namespace {

/// Returns the largest sum of `count` units in a row.
std::uint64_t most_in_a_row(const std::vector<std::uint64_t>& units, std::size_t count) {
  std::uint64_t most = 0;
  for (std::size_t first = 0; first < units.size(); ++first) {
    std::uint64_t sum = 0;
    for (std::size_t u = first; u < std::min(first + count, units.size()); ++u) sum += units[u];
    most = std::max(most, sum);
  }
  return most;
}

/// Returns how many units are read from their home at once: the one in use and those that are
/// brought ahead of it. In stages 1 and 2 one more is read to be gathered. In stage 3 one is read
/// after the other, but one that is gathered in pieces stays until all have left.
std::size_t loads_at_once(const LeasedStep& step) {
  const Sharding& sharding = step.table.sharding();
  const bool in_pieces = step.reduction.staged && !sharding.quantization.weights;
  if (sharding.params_sharded()) return in_pieces ? kStagedGathers + 1 : 1;
  // Units that live on the device leave it only for the exchange.
  if (step.placement.params == Tier::kDevice) return 1;
  return 1 + step.units_ahead + (sharding.optimizer_sharded() ? 1 : 0);
}

/// Returns the most bytes of parameters that are on their way from their home.
std::uint64_t params_bytes(const LeasedStep& step) {
  if (step.host.reserve_bytes(Purpose::kParams) == 0) return 0;  // none waits for a lease
  const ChunkTable& table = step.table;
  std::vector<std::uint64_t> units;
  for (UnitId u = 0; u < table.unit_count(); ++u)
    units.push_back(lease_bytes(table.home_count(u) * table.element_bytes(u)));
  return most_in_a_row(units, loads_at_once(step));
}

/// Returns the most bytes of gradients that are on their way to NVMe: those of as many large units
/// as have an accumulator, and of as many small ones as bring their own.
std::uint64_t gradients_bytes(const LeasedStep& step) {
  if (step.host.reserve_bytes(Purpose::kGradients) == 0) return 0;
  const ChunkTable& table = step.table;
  const std::uint64_t largest_count = table.largest_unit_padded_count();
  std::vector<std::uint64_t> large, small;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    const UnitChunks& unit = table.unit(u);
    std::uint64_t its_bytes = 0;
    for (const Chunk& chunk : table.chunks().subspan(unit.first_chunk, unit.chunk_count))
      if (!chunk.constant) its_bytes += lease_bytes(chunk.param_bytes());
    const bool own = GradientFlow::takes_own_accumulator(unit.padded_count, largest_count);
    (own ? small : large).push_back(its_bytes);
  }
  return most_in_a_row(large, step.device.accumulators) +
         most_in_a_row(small, step.device.own_accumulators);
}

}  // namespace

std::uint64_t lease_peak_bytes(const LeasedStep& step) {
  const HostPlan& host = step.host;
  const std::uint64_t taken = host.smallest_bytes() + host.kept_bytes;
  const std::uint64_t spare = step.budget_bytes - std::min(step.budget_bytes, taken);
  /// Most bytes that leases of these classes take together: each has its reserve, and all share
  /// what is spare.
  const auto most = [&](std::initializer_list<std::pair<Purpose, std::uint64_t>> classes) {
    std::uint64_t reserved = 0, beyond = 0;
    for (const auto& [purpose, bytes] : classes) {
      const std::uint64_t its = std::min(bytes, lease_bytes(host.reserve_bytes(purpose)));
      reserved += its;
      beyond += bytes - its;
    }
    return reserved + std::min(beyond, spare);
  };
  const std::uint64_t items = host.swept_bytes;
  const std::uint64_t params = params_bytes(step);
  const std::uint64_t again = step.device.keeps_all ? 0 : params;
  return std::max(most({{Purpose::kOptimizer, items}, {Purpose::kParams, params}}),
                  most({{Purpose::kOptimizer, items},
                        {Purpose::kParams, again},
                        {Purpose::kGradients, gradients_bytes(step)}}));
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/plan/lent_placement.cc: tries the candidates in order and takes the first that fits.
#include "core/plan/lent_placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/memory_exhausted.h"
#include "core/plan/host_plan.h"
#include "core/sharding/packing.h"

namespace ziggurat {
namespace {

/// The part of the free memory that records beside a drive may take: 1 in so many bytes. Pages in
/// memory are written in each step too, but not read.
constexpr std::uint64_t kBesideNvmePart = 8;
/// Memory that bytes pass through between the drive and the update.
constexpr std::uint64_t kWorkBytes = 128 * kMiB;

/// Returns the model as an engine keeps it.
ModelSpec kept_model(const LentPlacementRequest& request) {
  const ModelSpec model = numbered_model(request.model);
  if (request.layout) return packed_as(model, *request.layout);
  return packed_model(model, request.state.format);
}

ChunkTable table_of(const LentPlacementRequest& request, const ModelSpec& model) {
  if (request.layout) return ChunkTable::from_layout(model, *request.layout, request.state, {});
  return {model, kChunkTilesMax, request.state};
}

class LentChoice {
 public:
  explicit LentChoice(const LentPlacementRequest& request)
      : request_(request),
        model_(kept_model(request)),
        table_(table_of(request, model_)),
        trains_(std::ranges::any_of(model_.units, &UnitSpec::stored)) {
    for (UnitId u = 0; u < table_.unit_count(); ++u) streams_ = streams_ || table_.has_home(u);
  }

  LentPlacementChoice choose() const;

 private:
  /// Whether the state of a store goes on, whose steps are durable one by one.
  bool continues() const { return trains_ && (request_.continues || request_.layout.has_value()); }
  bool has_budget() const { return request_.host_budget_bytes > 0; }
  /// Whether the settings ask for what only a state on NVMe has.
  bool needs_nvme() const { return trains_ && request_.durable_every_steps > 1; }
  std::vector<Placement> candidates() const;
  std::uint64_t state_bytes() const;
  std::uint64_t held_bytes(const Placement& placement) const;
  std::optional<MemoryExhausted> over_budget(const Placement& placement) const;
  bool fits(const Placement& placement) const;
  std::string subject(const Placement& placement) const;
  std::string need(const Placement& placement) const;
  std::string reason(const Placement& chosen) const;
  std::uint64_t beside_nvme_bytes(Tier params) const;
  [[noreturn]] void refuse() const;

  const LentPlacementRequest& request_;
  const ModelSpec model_;
  const ChunkTable table_;
  const bool trains_;
  bool streams_ = false;
};

std::uint64_t LentChoice::state_bytes() const {
  std::uint64_t total = 0;
  for (const Chunk& chunk : table_.stored_chunks()) total += chunk.record_bytes();
  return total;
}

/// Returns the bytes that the placement keeps in host memory.
std::uint64_t LentChoice::held_bytes(const Placement& placement) const {
  std::uint64_t total = placement.optimizer == Tier::kHost ? state_bytes() : 0;
  if (placement.params != Tier::kHost) return total;
  for (UnitId u = 0; u < table_.unit_count(); ++u)
    if (table_.has_home(u)) total += table_.home_count(u) * table_.element_bytes(u);
  return total;
}

/// Returns what may be chosen, best first, wherever the store is.
std::vector<Placement> LentChoice::candidates() const {
  std::vector<Placement> all;
  for (const Tier params : {Tier::kHost, Tier::kNvme}) {
    for (const Tier optimizer : {Tier::kHost, Tier::kNvme}) {
      if (params == Tier::kNvme && !streams_) continue;
      if (optimizer == Tier::kHost ? needs_nvme() || continues() : !trains_) continue;
      all.push_back({.params = params, .grads = Tier::kHost, .optimizer = optimizer});
    }
  }
  return all;
}

/// Returns the error of an engine with this placement whose budget is too small.
std::optional<MemoryExhausted> LentChoice::over_budget(const Placement& placement) const {
  try {
    if (request_.layout) {
      require_host_budget(
          plan_host(table_, placement, request_.reduction, {request_.host_budget_bytes}),
          request_.host_budget_bytes);
      return std::nullopt;
    }
    choose_chunk_tiles({.model = model_,
                        .state = request_.state,
                        .sharding = {},
                        .placement = placement,
                        .reduction = request_.reduction},
                       request_.host_budget_bytes);
  } catch (const MemoryExhausted& error) {
    return error;
  }
  return std::nullopt;
}

bool LentChoice::fits(const Placement& placement) const {
  if (has_budget()) return !over_budget(placement);
  return held_bytes(placement) <= request_.free_bytes / 2 / request_.node_ranks;
}

/// Names what the placement keeps in host memory.
std::string LentChoice::subject(const Placement& placement) const {
  const bool state = trains_ && placement.optimizer == Tier::kHost;
  const bool params = streams_ && placement.params == Tier::kHost;
  std::string text = state ? "the state" : "";
  if (params) text += state ? " and the streamed parameters" : "the streamed parameters";
  return text;
}

/// Says how much host memory `placement` takes, and how much there is.
std::string LentChoice::need(const Placement& placement) const {
  const bool several = streams_ && placement.params == Tier::kHost;  // parameters
  if (has_budget()) {
    const std::string budget = format_bytes(request_.host_budget_bytes);
    if (const std::optional<MemoryExhausted> error = over_budget(placement)) {
      return fmt::format("`host_memory` {} is too small for {}, which {} {}", budget,
                         subject(placement), several ? "need" : "needs",
                         format_bytes(error->shortage().smallest_bytes));
    }
    return fmt::format("{} {} {} of `host_memory` {}", subject(placement),
                       several ? "take" : "takes", format_bytes(held_bytes(placement)), budget);
  }
  const std::uint64_t ranks = request_.node_ranks;
  return fmt::format("{}{} {} {}, and may take up to half of the {} of free memory",
                     subject(placement),
                     ranks > 1 ? fmt::format(" of the {} ranks on this machine", ranks) : "",
                     several ? "take" : "takes", format_bytes(ranks * held_bytes(placement)),
                     format_bytes(request_.free_bytes));
}

std::string LentChoice::reason(const Placement& chosen) const {
  const Placement wanted = candidates().front();
  std::string text;
  if (continues()) {
    text = "the directory already has a store";
  } else if (needs_nvme()) {
    text = fmt::format("`durable_every_steps={}` needs the state on NVMe",
                       request_.durable_every_steps);
  }
  if (subject(wanted).empty()) return text;
  if (!text.empty()) text += "; ";
  text += need(wanted);
  const bool same = chosen.params == wanted.params && chosen.optimizer == wanted.optimizer;
  if (same || subject(chosen).empty()) return text;
  return text + fmt::format("; {} alone {} {}", subject(chosen),
                            chosen.params == Tier::kHost && streams_ ? "take" : "takes",
                            format_bytes(held_bytes(chosen)));
}

std::uint64_t LentChoice::beside_nvme_bytes(Tier params) const {
  const Placement on_nvme{.params = params, .grads = Tier::kHost, .optimizer = Tier::kNvme};
  const std::uint64_t share = request_.free_bytes / kBesideNvmePart / request_.node_ranks;
  const std::uint64_t room = std::min(state_bytes() + kWorkBytes, share);
  if (room <= kWorkBytes) return 0;
  const HostPlan plan = plan_host(table_, on_nvme, request_.reduction, {0});
  return std::max(plan.comfortable_bytes(), held_bytes(on_nvme) + plan.staged_bytes + room);
}

/// Throws an error that says what would help.
void LentChoice::refuse() const {
  const std::vector<Placement> all = candidates();
  if (has_budget()) {
    const Placement& least = request_.has_store ? all.back() : all.front();
    if (const std::optional<MemoryExhausted> error = over_budget(least)) {
      if (request_.has_store) throw MemoryExhausted(*error);
      throw MemoryExhausted(
          error->shortage(),
          fmt::format("{}. Give that much, or `store`, a directory on a drive", error->what()));
    }
  }
  if (needs_nvme()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("`store` is missing: give a directory, because "
                            "`durable_every_steps={}` needs the state on NVMe",
                            request_.durable_every_steps));
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("`placement=auto`: {}. Give `store`, a directory on a drive, or "
                          "`placement=optimizer=host` to take the memory all the same",
                          need(all.front())));
}

LentPlacementChoice LentChoice::choose() const {
  for (const Placement& placement : candidates()) {
    const bool on_nvme = placement.params == Tier::kNvme || placement.optimizer == Tier::kNvme;
    if ((on_nvme && !request_.has_store) || !fits(placement)) continue;
    return {.placement = placement,
            .why = reason(placement),
            .state_bytes = state_bytes(),
            .beside_nvme_bytes = beside_nvme_bytes(placement.params)};
  }
  refuse();
}

}  // namespace

LentPlacementChoice choose_lent_placement(const LentPlacementRequest& request) {
  return LentChoice(request).choose();
}

}  // namespace ziggurat

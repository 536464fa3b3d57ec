// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_lent.cc: finds the parameters that a trainer lends among the units in
// which the store has them, and chooses where the state of such a trainer is kept.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/topology/limits.h"
#include "core/engine/state/training_state.h"
#include "core/plan/lent_placement.h"
#include "core/sharding/packing.h"
#include "core/sharding/piece_layout.h"
#include "optimizer/gradient.h"

namespace ziggurat {
namespace {

/// Returns how many ranks are on this rank's machine.
Task<std::uint64_t> ranks_here(Communicator& ranks) {
  const std::array<std::uint64_t, 1> own{machine_number()};
  std::vector<std::uint64_t> all(static_cast<std::size_t>(ranks.world_size()), own[0]);
  if (ranks.world_size() > 1) {
    const auto input = std::as_bytes(std::span(own));
    const auto output = std::as_writable_bytes(std::span(all));
    co_await ranks.all_gather(input, output);
  }
  co_return static_cast<std::uint64_t>(std::ranges::count(all, own[0]));
}

}  // namespace

/// Chooses the placement before anything is sized. All ranks keep their records on the same tier,
/// which decides how a step becomes durable: on NVMe if a rank has no room for its own.
Task<> TrainingState::choose_lent_placement_if_automatic(std::optional<std::string> layout) {
  if (!of_pieces() || !config_.placement.automatic) co_return;
  const std::uint64_t node_ranks = co_await ranks_here(storage_->ranks);
  LentPlacementChoice choice =
      ziggurat::choose_lent_placement({.model = model_,
                                       .state = config_.optimizer.state,
                                       .layout = std::move(layout),
                                       .continues = source_ != nullptr && load_options_.in_place,
                                       .has_store = !config_.store.empty(),
                                       .durable_every_steps = config_.durable_every_steps,
                                       .host_budget_bytes = config_.host_budget_bytes,
                                       .free_bytes = free_memory_bytes(),
                                       .node_ranks = node_ranks,
                                       .reduction = reduction()});
  Placement& placement = choice.placement;
  const bool here = placement.optimizer == Tier::kNvme;
  if (co_await storage_->quorum.max(here ? 1 : 0) != 0 && !here) {
    placement.optimizer = Tier::kNvme;
    choice.why += "; but another rank has no room for its state, and all keep it on the same tier";
  }
  config_.placement = placement;
  if (config_.host_budget_bytes == 0 && placement.optimizer == Tier::kNvme)
    config_.host_budget_bytes = choice.beside_nvme_bytes;
  notes_.push_back(
      fmt::format("placement auto: the engine chose {}: {}", to_string(placement), choice.why));
}

/// Puts the parameters into the units of `layout`, or into those of a new store.
void TrainingState::pack(const std::optional<std::string>& layout) {
  model_ =
      layout ? packed_as(model_, *layout) : packed_model(model_, config_.optimizer.state.format);
  lent_places_.clear();
  stored_params_ = 0;
  for (UnitId u = 0; u < model_.units.size(); ++u) {
    const std::vector<std::uint64_t> begins = param_begins(model_.units[u]);
    for (std::size_t p = 0; p < model_.units[u].params.size(); ++p) {
      const ParamSpec& param = model_.units[u].params[p];
      const std::size_t lent = *param.lent;
      if (lent >= lent_places_.size()) lent_places_.resize(lent + 1);
      lent_places_[lent] = {.unit = u, .param = p, .begin = begins[p], .count = param.count()};
      if (param.stored()) ++stored_params_;
    }
  }
}

/// Throws if the store's pieces have this rank's names and shapes, but lie elsewhere in their
/// tensors.
void TrainingState::require_places(const std::string& layout) const {
  const auto there = places_in(layout, model_);
  const auto here = places_of(model_);
  if (!there || !here) return;
  const auto differ = std::ranges::mismatch(*there, *here);
  if (differ.in1 == there->end()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("`store={}`: this rank has another part of '{}' than the store's: give "
                  "`resume=reshard` to divide the store anew for the parts that are there, or the "
                  "parts that the store was made with",
                  storage_->paths(),
                  differ.in1->name.empty() ? differ.in2->name : differ.in1->name));
}

std::vector<ChunkRun> TrainingState::lent_runs(ParamId param) const {
  const LentPlace& place = lent_places_[param];
  const std::uint64_t end = place.begin + place.count;
  const UnitChunks& chunks = table_->unit(place.unit);
  std::vector<ChunkRun> runs;
  for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
    const Chunk& chunk = table_->chunk(id);
    const std::uint64_t first = std::max(chunk.begin, place.begin);
    const std::uint64_t last = std::min(chunk.begin + chunk.count, end);
    if (first >= last) continue;
    runs.push_back({.chunk = id,
                    .run = {.param = place.param,
                            .lent = param,
                            .begin = first - chunk.begin,
                            .first = first - place.begin,
                            .count = last - first}});
  }
  return runs;
}

/// Returns what a run of a parameter is at home.
Task<std::vector<float>> TrainingState::values_at_home(ChunkId id, ParamRun run) {
  // A GPU copies parameters only to memory of the pool.
  const Lease memory = co_await state_lease(id, params_->item_bytes(table_->chunk(id)));
  co_await params_->bring(id, memory.bytes(), std::span(&run, 1));
  const TypedSpan<const std::byte> params = params_->destination(id, memory.bytes());
  std::vector<float> values(run.count);
  const std::function<void()> job = [&] { widen(params.subspan(run.begin, run.count), values); };
  co_await context_->run_near(id, {"widen parameters", 2 * values.size() * sizeof(float), true},
                              job);
  co_return values;
}

/// Whether a record does not exist yet, and will have what a run is at home for its masters.
bool TrainingState::is_made_from_params(const ChunkRun& its) const {
  const StateWrites::Place master{.index = StateWrites::kMaster, .begin = its.run.begin};
  const std::shared_ptr<const StateWrites::Arrays> writes = writes_->of(its.chunk);
  return sweep_->is_unmade(its.chunk) && (writes == nullptr || !writes->contains(master));
}

/// Makes all records that do not exist yet. Parameters that were written before have their masters
/// there then.
Task<> TrainingState::make_records() {
  std::vector<ParamId> made;
  for (const ParamId param : given_) {
    const std::vector<ChunkRun> runs = lent_runs(param);
    if (std::ranges::all_of(runs, [&](const ChunkRun& its) { return is_made_from_params(its); }))
      made.push_back(param);
  }
  co_await sweep_->make_all();
  for (const ParamId param : made) given_.erase(param);
}

/// Returns the masters of parameters that were written before the first step, but for those of
/// records that are made from the parameters.
Task<PieceCopy::Written> TrainingState::given_masters() {
  PieceCopy::Written given;
  if (generation_ > 0) co_return given;
  for (const ParamId param : given_) {
    for (const ChunkRun& its : lent_runs(param)) {
      const StateWrites::Place master{.index = StateWrites::kMaster, .begin = its.run.begin};
      if (is_made_from_params(its)) continue;
      std::vector<float> values = co_await values_at_home(its.chunk, its.run);
      const std::shared_ptr<const StateWrites::Arrays>& before = given[its.chunk];
      StateWrites::Arrays arrays = before != nullptr ? *before : StateWrites::Arrays();
      arrays[master] = std::make_shared<const std::vector<float>>(std::move(values));
      given[its.chunk] = std::make_shared<const StateWrites::Arrays>(std::move(arrays));
    }
  }
  co_return given;
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_lent.cc: finds the parameters that a trainer lends among the units in
// which the store has them.
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "core/engine/state/training_state.h"
#include "core/sharding/packing.h"
#include "core/sharding/piece_layout.h"

namespace ziggurat {

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

}  // namespace ziggurat

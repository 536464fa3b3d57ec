// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/lent_counts.cc: how many steps each parameter of a trainer that lends has made:
// counted with each step, stored before the trainer's blob, read and set between steps.
#include <fmt/format.h>

#include <vector>

#include "base/error.h"
#include "core/engine/lent/lent_engine_impl.h"
#include "optimizer/rounding.h"

namespace ziggurat {

/// Returns what stands in the blob with which the engine was opened.
StepsBlob LentEngineImpl::resumed_steps() const {
  const std::span<const std::byte> blob = state_.resumed_blob();
  if (state_.config().counts_steps) return StepsBlob::read(blob, state_.stored_count());
  return {.steps = {}, .of_ranks = 0, .own = blob};
}

void LentEngineImpl::require_counts(const char* call, ParamId param) const {
  require_trained(call, param);
  if (state_.config().counts_steps) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}(): this engine counts no steps: open it with "
                          "EngineConfig::counts_steps",
                          call));
}

std::uint64_t LentEngineImpl::steps_of(ParamId param) const {
  const Turn turn(turn_);
  require_counts("steps_of", param);
  return steps_[param];
}

void LentEngineImpl::set_steps(ParamId param, std::uint64_t steps) {
  const Turn turn(turn_);
  require_counts("set_steps", param);
  steps_[param] = steps;
}

void LentEngineImpl::give_blob(std::span<const std::byte> blob) {
  const Turn turn(turn_);
  if (!state_.config().counts_steps) return take_blob(blob);
  take_blob(StepsBlob{.steps = state_.counts(), .of_ranks = 0, .own = blob}.written());
}

/// Returns the step with the engine's counts of steps, where it counts.
LentEngineImpl::CountedStep LentEngineImpl::counted_step(
    std::span<const TypedSpan<const std::byte>> gradients, const StepOptions& given) const {
  CountedStep its{.steps = steps_, .groups = {}, .blob = {}, .options = given};
  if (!state_.config().counts_steps) return its;
  its.groups.assign(given.groups.begin(), given.groups.end());
  for (ParamId p = 0; p < its.steps.size(); ++p) {
    if (p < its.groups.size()) its.groups[p].steps = steps_[p] + 1;
    if (p < gradients.size() && has_gradient(gradients, p)) ++its.steps[p];
  }
  its.blob = StepsBlob{.steps = its.steps, .of_ranks = 0, .own = given.blob}.written();
  its.options.groups = its.groups;
  its.options.blob = its.blob;
  return its;
}

/// Takes the counts of steps. If a parameter's count has changed and no gradient of this step
/// rounds it, it is made again from its masters.
void LentEngineImpl::take_counts(const std::vector<bool>& present,
                                 const std::vector<std::uint64_t>& counts) {
  steps_ = counts;
  const std::vector<std::uint64_t> before = state_.take_counts(counts);
  const ChunkTable& table = state_.table();
  if (!table.rounding() || !drawn_by(table.state().format, state_.rounding()).param) return;
  const ParamSteps steps = state_.steps_in(state_.generation());
  for (ParamId p = 0; p < before.size(); ++p) {
    if (present[p] || steps.of(p) == before[p]) continue;
    for (const ChunkRun& its : state_.lent_runs(p)) state_.writes().round_again(its.chunk, its.run);
  }
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_validate.cc: checks of open(), which refuses settings that make no sense
// and a store that belongs to another run.
#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "core/engine/state/store_builder.h"
#include "core/engine/state/store_rounding.h"
#include "core/engine/state/training_state.h"
#include "tiers/store/striping.h"

namespace ziggurat {

void TrainingState::validate() {
  const auto require = [](bool good, const std::string& message) {
    if (!good) throw Error(ErrorCode::kInvalidArgument, message);
  };
  require(config_.slots == 1 || config_.slots == 2,
          fmt::format("`slots={}` must be 1 or 2", config_.slots));
  require(config_.tensor_parallel >= 1,
          fmt::format("`tp={}` must be 1 or more", config_.tensor_parallel));
  find_place();
  validate_quantization(*strategy_);
  require(config_.clip_norm >= 0,
          fmt::format("`clip={}` must be 0 (off) or a positive norm", config_.clip_norm));
  require(config_.durable_every_s >= 0,
          "`durable_every` must be 0 (never) or a positive number of seconds");
  require(config_.durable_every_steps >= 1, "`durable_every_steps` must be 1 (every step) or more");
  require(config_.durable_every_steps == 1 ||
              (config_.placement.optimizer == Tier::kNvme && config_.slots == 2),
          fmt::format("`durable_every_steps={}` needs `placement=optimizer=nvme` and `slots=2`, "
                      "because the other slot of each record is overwritten between two durable "
                      "steps; for state in memory give `durable_every` (seconds)",
                      config_.durable_every_steps));
  require(config_.speculation != EngineConfig::Speculation::kAlways ||
              (config_.placement.optimizer == Tier::kNvme && config_.slots == 2),
          "`speculate=always` needs `placement=optimizer=nvme` and `slots=2`: only there can an "
          "update be undone that started before the step's end");
  if (!of_pieces()) {
    require(!config_.counts_steps,
            "EngineConfig::counts_steps is for an engine that lends: leave it off");
    require_compatible(config_.optimizer.state.format, param_rounding(config_.optimizer),
                       model_.is_bf16());
  }
  require_undivided_scales(config_.optimizer.state.format, config_.tensor_parallel);
  require(config_.checkpoint.stall_max_s > 0,
          fmt::format("`checkpoint_stall_max={:g}` must be a positive number of seconds",
                      config_.checkpoint.stall_max_s));
  require_initial_accumulator(config_.optimizer.state.optimizer,
                              config_.optimizer.initial_accumulator);
  require(config_.store.size() <= kStripesMax,
          fmt::format("`store` has {} directories: give at most {}", config_.store.size(),
                      kStripesMax));
  if (!of_pieces() && !config_.param_groups.empty()) assign_groups(model_, config_.param_groups);
  if (hand_ != nullptr) hand_->validate();
}

void TrainingState::validate_storeless() const {
  if (!config_.store.empty()) return;
  const bool frozen =
      !config_.checkpoint.saves && std::ranges::all_of(model_.units, &UnitSpec::constant);
  const Placement& placement = config_.placement;
  if (frozen && placement.params != Tier::kNvme && placement.grads != Tier::kNvme &&
      placement.optimizer != Tier::kNvme)
    return;
  throw Error(ErrorCode::kInvalidArgument,
              "`store` is missing: give a directory, unless every parameter is frozen, nothing is "
              "on NVMe and no checkpoint is saved");
}

/// Throws if the settings need two slots and the store was made with one; a store keeps its slots.
void TrainingState::require_slots(const StoreState& state) const {
  if (config_.durable_every_steps == 1 || state.slots == 2) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("`durable_every_steps={}` needs two slots, but the store {} was made "
                          "with `slots=1`: set `durable_every_steps=1`",
                          config_.durable_every_steps, storage_->paths()));
}

/// Throws if facts that may not change at resume have changed. They are compared word by word, so
/// that the message can name the word.
void TrainingState::check_identity(const StoreState& state) {
  if (state.run_identity != config_.run_identity) {
    std::istringstream stored(state.run_identity);
    std::istringstream wanted(config_.run_identity);
    std::string differences;
    for (std::string a, b; (stored >> a) && (wanted >> b);) {
      if (a != b)
        differences += fmt::format("{}the store has {}, but this run has {}",
                                   differences.empty() ? "" : "; ", a, b);
    }
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("`store={}` belongs to another run: {}. Give the settings of that run, another "
                    "`store`, or `resume=never` to replace this one",
                    storage_->paths(),
                    differences.empty() ? fmt::format("the store has '{}', but this run has '{}'",
                                                      state.run_identity, config_.run_identity)
                                        : differences));
  }
  if (static_cast<int>(state.slots) != config_.slots) {
    notes_.push_back(
        fmt::format("the store was made with `slots={}`, which stays in force", state.slots));
  }
  if (state.numerics_fingerprint != config_.numerics_fingerprint) {
    notes_.push_back(
        fmt::format("the numerics were '{}' when the store was made and are '{}' now, so the bits "
                    "of the loss may differ",
                    state.numerics_fingerprint, config_.numerics_fingerprint));
  }
}

}  // namespace ziggurat

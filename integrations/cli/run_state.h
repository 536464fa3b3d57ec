// SPDX-License-Identifier: Apache-2.0
// integrations/cli/run_state.h: what the trainer keeps in the store beside the engine's state: who
// the run is, where it stands, and with which settings it last ran.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "integrations/cli/train_options.h"
#include "integrations/gpt/model.h"
#include "optimizer/loss_scale.h"

namespace ziggurat::cli {

/// What may not change at resume, as the words of EngineConfig::run_identity:
/// "model=12x768x12 data=0123456789abcdef seed=1 batch=2 accumulate=4 context=256".
struct RunIdentity {
  gpt::ModelConfig model;
  std::uint64_t data_hash = 0;
  std::uint64_t seed = 0;
  std::int64_t batch = 0;
  std::int64_t accumulate = 0;
  std::int64_t context = 0;

  std::string text() const;
  /// Errors: kInvalidArgument for a text that no `ziggurat train` wrote.
  static RunIdentity parse(const std::string& text);
  /// `ziggurat train` wrote it.
  static bool is_one(const std::string& text);
};

/// What changeable_settings() gives; what it was is in the blob, so that a change is reported.
using ChangeableSettings = std::map<std::string, std::string>;

/// The step with the least held-out loss.
struct BestStep {
  std::uint64_t step = 0;
  double value = 0;
};

/// The blob of a generation: JSON, small.
struct RunState {
  std::uint64_t steps_done = 0;
  /// The data cursor: batches are a function of seed and attempt. Steps that were skipped are
  /// attempts too.
  std::uint64_t attempts = 0;
  std::optional<LossScaler::State> loss_scale;  ///< of the next attempt, where there is one
  ChangeableSettings settings;
  std::optional<BestStep> best{};  ///< of those that were evaluated

  std::vector<std::byte> encode() const;
  /// Errors: kDataLoss for bytes that are no such blob.
  static RunState decode(std::span<const std::byte> blob);
};

/// "lr 0.0006 -> 0.0003", one line a difference; a setting that either side does not know is none.
std::vector<std::string> differences(const ChangeableSettings& before,
                                     const ChangeableSettings& now);

}  // namespace ziggurat::cli

// SPDX-License-Identifier: Apache-2.0
// integrations/cli/run_state.h: what the trainer keeps in the store beside the engine's state: the
// run's identity, how far it has come, and the settings with which it last ran.
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

/// What must not change at resume, in the words of EngineConfig::run_identity: "model=12x768x12
/// data=0123456789abcdef seed=1 batch=2 accumulate=4 context=256".
struct RunIdentity {
  gpt::ModelConfig model;
  std::uint64_t data_hash = 0;
  std::uint64_t seed = 0;
  std::int64_t batch = 0;
  std::int64_t accumulate = 0;
  std::int64_t context = 0;

  std::string text() const;
  /// Reads the text of an identity. Errors: kInvalidArgument for a text that no `ziggurat train`
  /// wrote.
  static RunIdentity parse(const std::string& text);
  /// Returns whether `ziggurat train` wrote the text.
  static bool is_one(const std::string& text);
};

/// The settings of changeable_settings(). The blob has their former values, so that a change is
/// reported.
using ChangeableSettings = std::map<std::string, std::string>;

/// The step with the lowest held-out loss.
struct BestStep {
  std::uint64_t step = 0;
  double value = 0;
};

/// The content of a generation's blob, which is a small JSON text.
struct RunState {
  std::uint64_t steps_done = 0;
  /// The data cursor, because a batch is a function of the seed and the attempt. Steps that were
  /// skipped are attempts too.
  std::uint64_t attempts = 0;
  std::optional<LossScaler::State> loss_scale;  ///< for the next attempt, if there is one
  ChangeableSettings settings;
  std::optional<BestStep> best{};  ///< of the steps that were evaluated

  std::vector<std::byte> encode() const;
  /// Reads a blob. Errors: kDataLoss for bytes that encode() did not make.
  static RunState decode(std::span<const std::byte> blob);
};

/// Returns a line such as "lr 0.0006 -> 0.0003" for each setting that differs. A setting that only
/// one side has is left out.
std::vector<std::string> differences(const ChangeableSettings& before,
                                     const ChangeableSettings& now);

}  // namespace ziggurat::cli

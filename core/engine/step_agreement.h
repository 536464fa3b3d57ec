// SPDX-License-Identifier: Apache-2.0
// core/engine/step_agreement.h: what the ranks tell each other at the end of a step, before it may
// change anything for good.
//
// Nobody leaves a step before all have judged it: a rank that will not make it says so in its
// message, and every rank undoes the step and throws. Private to the engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "core/engine/engine.h"

namespace ziggurat {

/// Why a rank will not make the step that it was asked for.
enum class StepRefusal : std::uint64_t {
  kNone,
  kLearningRate,  ///< not finite
  kBetas,         ///< not in [0, 1)
  kGroups,        ///< not one for each of the model's, or not alone
  kLossScale,     ///< not positive and finite
  kBlob,          ///< larger than the store holds
  kAnnounced,     ///< not what prepare_step() was given
};
/// What to say of another rank's.
const char* to_string(StepRefusal refusal);

/// What a rank says of the save that is under way there.
enum class SaveState : std::uint64_t {
  kNone,
  kUnderWay,
  kGivenUp,  ///< it can end any time, and no step waits for it
};

/// What one rank brings to a step, before its sums of squares.
struct StepFacts {
  std::uint64_t generation = 0;
  std::uint64_t options = 0;  ///< options_hash()
  std::uint64_t order = 0;    ///< of gathers
  StepRefusal refusal = StepRefusal::kNone;
  SaveState saving = SaveState::kNone;
  std::uint64_t checkpoint = 0;  ///< 1: state in memory is to be stored after this step; rank 0's
};
/// Covers all that ranks must have alike, so not the blob.
std::uint64_t options_hash(const StepOptions& options);
/// What rank `rank`, whose facts are `theirs`, has against the step; nothing if it agrees with
/// rank `own_rank`.
std::optional<std::string> objection(const StepFacts& theirs, int rank, const StepFacts& own,
                                     int own_rank);

/// How a step was judged: the same on every rank.
struct StepVerdict {
  /// It is not made: why.
  std::optional<Error> refused;
  double norm = 0;                      ///< of the gradients' mean over the ranks
  bool checkpoint = false;              ///< the step, if it is made, is stored
  SaveState saving = SaveState::kNone;  ///< the most that any rank says
};

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/engine/step_agreement.h: the messages that ranks exchange at the end of a step, before it
// may change anything permanently.
//
// No rank leaves a step before all have judged it. If a rank will not make the step, its message
// says why, and every rank undoes the step and throws. Private to the engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "core/engine/engine.h"

namespace ziggurat {

/// Why a rank refuses to make the requested step.
enum class StepRefusal : std::uint64_t {
  kNone,
  kLearningRate,  ///< not finite
  kBetas,         ///< not in [0, 1)
  kGroups,        ///< wrong number of groups, or given together with other settings
  kLossScale,     ///< not positive and finite
  kBlob,          ///< larger than the store has room for
  kAnnounced,     ///< differs from the options of prepare_step()
};
/// Describes the refusal of another rank.
const char* to_string(StepRefusal refusal);

/// The state of the save that is under way on a rank.
enum class SaveState : std::uint64_t {
  kNone,
  kUnderWay,
  kGivenUp,  ///< may end at any time, and no step waits for it
};

/// The facts about a step that one rank sends, before its sums of squares.
struct StepFacts {
  std::uint64_t generation = 0;
  std::uint64_t options = 0;  ///< options_hash()
  std::uint64_t order = 0;    ///< hash of the order of gathers
  StepRefusal refusal = StepRefusal::kNone;
  SaveState saving = SaveState::kNone;
  /// On rank 0, 1 if state in memory is to be stored after this step.
  std::uint64_t checkpoint = 0;
};
/// Returns a hash of all options that must be equal on all ranks, so not of the blob.
std::uint64_t options_hash(const StepOptions& options);
/// Returns why the step cannot be made with `theirs`, the facts of rank `rank`; none if they agree
/// with those of rank `own_rank`.
std::optional<std::string> objection(const StepFacts& theirs, int rank, const StepFacts& own,
                                     int own_rank);

/// The judgement of a step, which is the same on every rank.
struct StepVerdict {
  /// Set if the step is not made: the reason.
  std::optional<Error> refused;
  double norm = 0;                      ///< norm of the gradients' mean over the ranks
  bool checkpoint = false;              ///< the step is stored if it is made
  SaveState saving = SaveState::kNone;  ///< the highest SaveState of any rank
};

}  // namespace ziggurat

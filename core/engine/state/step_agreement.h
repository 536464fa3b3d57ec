// SPDX-License-Identifier: Apache-2.0
// core/engine/state/step_agreement.h: the messages that ranks exchange at the end of a step, before
// it may change anything permanently.
//
// No rank leaves a step before all have judged it. If a rank will not make the step, no rank makes
// it. Each message begins with the facts that any engine has; what follows them is the hand's own:
// the sums of squares of its gradients, or nothing. If a rank refuses, all exchange words in a
// second message. Private to the engine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "core/engine/engine.h"

namespace ziggurat {

/// The state of the save that is under way on a rank.
enum class SaveState : std::uint32_t {
  kNone,
  kUnderWay,
  kGivenUp,  ///< may end at any time, and no step waits for it
};

/// The facts about a step that one rank sends.
struct StepFacts {
  std::uint64_t generation = 0;
  std::uint64_t options = 0;  ///< options_hash()
  std::uint64_t groups = 0;   ///< groups_hash(); the same on all ranks if each has its own groups
  SaveState saving = SaveState::kNone;
  /// On rank 0, 1 if state in memory is to be stored after this step.
  std::uint32_t checkpoint = 0;
  std::uint32_t refusal = 0;  ///< 0 if there is none; else 1 more than the refusal's ErrorCode

  /// Says that this rank will not make the step because of `error`.
  void refuse(const Error& error) noexcept {
    refusal = 1 + static_cast<std::uint32_t>(error.code());
  }
};
/// The words of a refusal, cut to fit and ending in a zero; empty if there is none.
using RefusalWords = std::array<char, 512>;
RefusalWords words_of(const std::optional<Error>& refusal);

/// Returns a hash of all options that must be equal on all ranks whoever trains, so not of the
/// groups and of the blob.
std::uint64_t options_hash(const StepOptions& options);
std::uint64_t groups_hash(std::span<const GroupStep> groups);

/// Returns the facts at the beginning of each of `ranks` messages of one size, side by side.
std::vector<StepFacts> facts_of(std::span<const std::byte> messages, int ranks);

/// The judgement of a step, which is the same on every rank.
struct StepVerdict {
  /// Set if the step is not made: the reason.
  std::optional<Error> refused;
  double norm = 0;                      ///< norm of the gradients' mean over the ranks
  bool checkpoint = false;              ///< the step is stored if it is made
  SaveState saving = SaveState::kNone;  ///< the highest SaveState of any rank
};
/// Whether a rank refuses the step.
bool any_refuses(std::span<const StepFacts> all) noexcept;
/// Returns the verdict on a step according to the facts of `all` ranks, and their `words` if
/// another refuses. This rank is `own_rank`; its own `refusal` comes first, in full. The norm is
/// not known yet.
StepVerdict judgement(std::span<const StepFacts> all, std::span<const RefusalWords> words,
                      int own_rank, const std::optional<Error>& refusal);
/// Returns the error of the step that would have made `generation`, and was not made because of
/// `why`.
Error not_made(std::uint64_t generation, const Error& why);

}  // namespace ziggurat

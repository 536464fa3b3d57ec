// SPDX-License-Identifier: Apache-2.0
// core/engine/lent_agreement.h: the messages that ranks which lend their own parameters exchange
// before a step changes anything. Private to the engine.
//
// Gradients differ from rank to rank, and so do settings of parameters, because each trainer
// decides them for its own parameters. So the ranks must agree on little: all make the same
// generation, and none refuses. Each rank sends one message of a fixed size.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "base/error.h"
#include "core/engine/engine.h"

namespace ziggurat {

struct LentFacts {
  std::uint64_t generation = 0;
  std::uint64_t options = 0;  ///< options_hash() of the options that belong to no group
  /// On rank 0, 1 if state in memory is to be stored after this step.
  std::uint32_t checkpoint = 0;
  std::uint32_t refusal = 0;    ///< 0 if there is none; else 1 more than the refusal's ErrorCode
  std::array<char, 488> why{};  ///< the words of the refusal, cut to fit, ending in a zero
};

LentFacts lent_facts(std::uint64_t generation, const StepOptions& options, bool checkpoint,
                     const std::optional<Error>& refusal);
/// Returns why the step cannot be made, according to the facts of `all` ranks. This rank is
/// `own_rank`; its own `refusal` comes first, in full.
std::optional<Error> lent_objection(std::span<const LentFacts> all, int own_rank,
                                    const std::optional<Error>& refusal);

}  // namespace ziggurat

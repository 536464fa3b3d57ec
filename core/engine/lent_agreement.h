// SPDX-License-Identifier: Apache-2.0
// core/engine/lent_agreement.h: what ranks that lend their own parameters tell each other before a
// step changes anything. Private to the engine.
//
// Gradients are each trainer's business, and settings are those of parameters, which differ from
// rank to rank. So what must be alike is little: that all make the same generation, and that nobody
// refuses. One message of a fixed size a rank.
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
  std::uint64_t options = 0;     ///< options_hash() of what is no group's
  std::uint32_t checkpoint = 0;  ///< 1: state in memory is to be stored after this step; rank 0's
  std::uint32_t refusal = 0;     ///< 0: none; else 1 more than its ErrorCode
  std::array<char, 488> why{};   ///< a refusal's words, as many as fit, ending in a zero
};

LentFacts lent_facts(std::uint64_t generation, const StepOptions& options, bool checkpoint,
                     const std::optional<Error>& refusal);
/// What `all` ranks, of which this is `own_rank`, have against the step; its own `refusal` first,
/// in full.
std::optional<Error> lent_objection(std::span<const LentFacts> all, int own_rank,
                                    const std::optional<Error>& refusal);

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/engine/lent_agreement.cc: the messages for a step with lent gradients that is not made.
#include "core/engine/lent_agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "core/engine/step_agreement.h"

namespace ziggurat {

LentFacts lent_facts(std::uint64_t generation, const StepOptions& options, bool checkpoint,
                     const std::optional<Error>& refusal) {
  StepOptions alike = options;
  alike.groups = {};
  LentFacts facts{
      .generation = generation, .options = options_hash(alike), .checkpoint = checkpoint ? 1U : 0U};
  if (!refusal) return facts;
  facts.refusal = 1 + static_cast<std::uint32_t>(refusal->code());
  const std::string_view words = refusal->what();
  std::memcpy(facts.why.data(), words.data(), std::min(words.size(), facts.why.size() - 1));
  return facts;
}

std::optional<Error> lent_objection(std::span<const LentFacts> all, int own_rank,
                                    const std::optional<Error>& refusal) {
  const LentFacts& own = all[static_cast<std::size_t>(own_rank)];
  const auto not_made = [&](ErrorCode code, const std::string& why) {
    return Error(code,
                 fmt::format("step {}: {}; nothing was updated, and generation {} is still current",
                             own.generation, why, own.generation - 1));
  };
  if (refusal) return not_made(refusal->code(), refusal->what());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const LentFacts& theirs = all[rank];
    if (theirs.refusal != 0) {
      return not_made(static_cast<ErrorCode>(theirs.refusal - 1),
                      fmt::format("rank {} refused the step: {}", rank, theirs.why.data()));
    }
    if (theirs.generation != own.generation) {
      return not_made(
          ErrorCode::kInvalidArgument,
          fmt::format("rank {} makes step {} instead: every rank must make the same calls", rank,
                      theirs.generation));
    }
    if (theirs.options != own.options) {
      return not_made(ErrorCode::kInvalidArgument,
                      fmt::format("rank {} has another learning rate, other betas or another loss "
                                  "scale than rank {}: every rank must make the same calls",
                                  rank, own_rank));
    }
  }
  return std::nullopt;
}

}  // namespace ziggurat

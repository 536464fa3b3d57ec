// SPDX-License-Identifier: Apache-2.0
// core/engine/state/step_agreement.cc: the facts about a step, and the messages for one that is not
// made.
#include "core/engine/state/step_agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/checksum.h"

namespace ziggurat {
namespace {

std::uint64_t words_hash(std::string_view text) {
  return hash64(std::as_bytes(std::span(text)), 0);
}

/// Returns why the step cannot be made with the facts of `rank`; none if they agree with those of
/// `own_rank`.
std::optional<Error> objection(std::span<const StepFacts> all, std::span<const RefusalWords> words,
                               int rank, int own_rank) {
  const StepFacts& theirs = all[static_cast<std::size_t>(rank)];
  const StepFacts& own = all[static_cast<std::size_t>(own_rank)];
  if (theirs.refusal != 0) {
    return Error(static_cast<ErrorCode>(theirs.refusal - 1),
                 fmt::format("rank {} refused the step: {}", rank,
                             words[static_cast<std::size_t>(rank)].data()));
  }
  const auto differs = [&](const std::string& what) {
    return Error(ErrorCode::kInvalidArgument,
                 fmt::format("rank {} {}: every rank must make the same calls", rank, what));
  };
  if (theirs.generation != own.generation)
    return differs(fmt::format("makes step {} instead", theirs.generation));
  if (theirs.options != own.options) {
    return differs(fmt::format(
        "has another learning rate, other betas or another loss scale than rank {}, or only one of "
        "them saves the step",
        own_rank));
  }
  if (theirs.groups != own.groups)
    return differs(fmt::format("has other groups than rank {}", own_rank));
  return std::nullopt;
}

}  // namespace

RefusalWords words_of(const std::optional<Error>& refusal) {
  RefusalWords words{};
  if (!refusal) return words;
  const std::string_view text = refusal->what();
  std::copy_n(text.begin(), std::min(text.size(), words.size() - 1), words.begin());
  return words;
}

bool any_refuses(std::span<const StepFacts> all) noexcept {
  return std::ranges::any_of(all, [](const StepFacts& its) { return its.refusal != 0; });
}

std::uint64_t options_hash(const StepOptions& options) {
  const Betas betas = options.betas.value_or(Betas{});
  std::string text = fmt::format("{} {} {} {} {} {}", options.learning_rate,
                                 options.betas.has_value(), betas.beta1, betas.beta2,
                                 options.loss_scale.has_value(), options.loss_scale.value_or(0.0F));
  text += options.checkpoint != nullptr ? " saved" : "";
  return words_hash(text);
}

std::uint64_t groups_hash(std::span<const GroupStep> groups) {
  std::string text;
  for (const GroupStep& group : groups) {
    text += fmt::format(" {} {} {} {} {} {} {} {} {}", group.learning_rate, group.lr_decay,
                        group.beta1, group.beta2, group.eps, group.weight_decay, group.dampening,
                        group.nesterov, group.maximize);
  }
  return words_hash(text);
}

std::vector<StepFacts> facts_of(std::span<const std::byte> messages, int ranks) {
  std::vector<StepFacts> all(static_cast<std::size_t>(ranks));
  const std::size_t message_bytes = messages.size() / all.size();
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    std::memcpy(&all[rank], messages.data() + rank * message_bytes, sizeof(StepFacts));
  return all;
}

StepVerdict judgement(std::span<const StepFacts> all, std::span<const RefusalWords> words,
                      int own_rank, const std::optional<Error>& refusal) {
  StepVerdict verdict{.refused = refusal, .checkpoint = all.front().checkpoint != 0};
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    verdict.saving = std::max(verdict.saving, all[static_cast<std::size_t>(rank)].saving);
    if (!verdict.refused) verdict.refused = objection(all, words, rank, own_rank);
  }
  return verdict;
}

Error not_made(std::uint64_t generation, const Error& why) {
  return {why.code(),
          fmt::format("step {}: {}; nothing was updated, and generation {} is still current",
                      generation, why.what(), generation - 1)};
}

}  // namespace ziggurat

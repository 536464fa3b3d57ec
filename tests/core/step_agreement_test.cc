// SPDX-License-Identifier: Apache-2.0
// tests/core/step_agreement_test.cc: ranks make a step together, or none makes it and all say whose
// doing that is.
#include "core/engine/state/step_agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace ziggurat::testing {
namespace step_agreement_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

const StepOptions kOptions{.learning_rate = 0.1F, .blob = {}};

StepFacts facts(std::uint64_t generation, const StepOptions& options = kOptions) {
  return {.generation = generation, .options = options_hash(options)};
}

std::string said(std::span<const StepFacts> all, int own_rank,
                 std::span<const RefusalWords> words = {}) {
  const StepVerdict verdict = judgement(all, words, own_rank, {});
  return verdict.refused
             ? not_made(all[static_cast<std::size_t>(own_rank)].generation, *verdict.refused).what()
             : "";
}

TEST(StepAgreement, IsOnStepsWhoseFactsAreAlike) {
  std::vector<StepFacts> all(3, facts(7));
  EXPECT_FALSE(judgement(all, {}, 0, {}).refused);
  EXPECT_FALSE(judgement(all, {}, 0, {}).checkpoint);
  all[0].checkpoint = 1;
  all[1].saving = SaveState::kUnderWay;
  EXPECT_TRUE(judgement(all, {}, 2, {}).checkpoint) << "rank 0 decides";
  EXPECT_EQ(judgement(all, {}, 2, {}).saving, SaveState::kUnderWay);
  all[2].saving = SaveState::kGivenUp;
  EXPECT_EQ(judgement(all, {}, 0, {}).saving, SaveState::kGivenUp);
  all[0].checkpoint = 0;
  all[1].checkpoint = 1;
  EXPECT_FALSE(judgement(all, {}, 1, {}).checkpoint);
}

TEST(StepAgreement, NamesTheRankThatMakesAnotherStep) {
  std::vector<StepFacts> all(3, facts(7));
  all[2] = facts(8);
  EXPECT_THAT(said(all, 0), AllOf(HasSubstr("step 7"), HasSubstr("rank 2 makes step 8"),
                                  HasSubstr("nothing was updated, and generation 6 is")));
  EXPECT_THAT(said(all, 2), AllOf(HasSubstr("step 8"), HasSubstr("rank 0 makes step 7")));
}

TEST(StepAgreement, NamesTheRankWithOtherOptions) {
  std::vector<StepFacts> all(3, facts(7));
  all[2] = facts(7, {.learning_rate = 0.2F, .blob = {}});
  EXPECT_THAT(said(all, 1), HasSubstr("rank 2 has another learning rate"));
  const CheckpointRequest request{};
  all[2] = facts(7, {.learning_rate = 0.1F, .checkpoint = &request, .blob = {}});
  EXPECT_THAT(said(all, 1), HasSubstr("or only one of them saves the step"));
  const std::vector<GroupStep> groups(4);
  all[2] = facts(7, {.learning_rate = 0.1F, .groups = groups, .blob = {}});
  EXPECT_EQ(said(all, 0), "") << "not every trainer's groups are alike on all ranks";
  all[2].groups = groups_hash(groups);
  EXPECT_THAT(said(all, 2), HasSubstr("rank 0 has other groups than rank 2"));
}

TEST(StepAgreement, TellsOthersWhyARankRefuses) {
  std::vector<StepFacts> all(3, facts(7));
  EXPECT_FALSE(any_refuses(all));
  const Error longest(ErrorCode::kUnimplemented, std::string(4000, 'x'));
  all[1].refuse(longest);
  EXPECT_TRUE(any_refuses(all));
  std::vector<RefusalWords> words(3);
  words[1] = words_of(longest);
  EXPECT_EQ(judgement(all, words, 0, {}).refused->code(), ErrorCode::kUnimplemented);
  EXPECT_THAT(said(all, 0, words), HasSubstr("rank 1 refused the step: xxx"));
  EXPECT_STREQ(judgement(all, words, 1, longest).refused->what(), longest.what())
      << "its own in full";
}

TEST(StepAgreement, FindsFactsAtTheBeginningOfEachMessage) {
  constexpr std::size_t kMessageBytes = sizeof(StepFacts) + 24;
  std::vector<std::byte> messages(2 * kMessageBytes);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const StepFacts its = facts(10 + rank);
    std::memcpy(messages.data() + rank * kMessageBytes, &its, sizeof(its));
  }
  const std::vector<StepFacts> all = facts_of(messages, 2);
  EXPECT_EQ(all[0].generation, 10U);
  EXPECT_EQ(all[1].generation, 11U);
}

}  // namespace step_agreement_test
}  // namespace ziggurat::testing

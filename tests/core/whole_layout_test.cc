// SPDX-License-Identifier: Apache-2.0
// tests/core/whole_layout_test.cc: where whole parameters lie in their unit, in which messages
// ranks send their slices, and what no layout can be made of.
#include "core/engine/lent/whole_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "base/error.h"

namespace ziggurat::testing {
namespace whole_layout_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum DType;

/// Unit 0 has parameters of three sizes and two types, unit 1 an optional one that is frozen.
std::vector<WholeParam> two_units() {
  return {{.name = "scale", .count = 1, .dtype = kFloat32, .unit = 0, .trained = false},
          {.name = "expert", .count = 10, .unit = 1, .trained = false, .optional = true},
          {.name = "bias", .count = 33, .dtype = kBFloat16, .unit = 0},
          {.name = "weight", .count = 100'000, .dtype = kFloat32, .unit = 0}};
}

WholeLayout two_ranks() {
  WholeLayout layout(two_units());
  layout.set_slices(
      {{{0, 1}, {0, 4}, {0, 17}, {0, 90'000}}, {{0, 0}, {4, 6}, {17, 16}, {90'000, 10'000}}});
  return layout;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return "accepted";
}

TEST(WholeLayout, PutsTheParametersOfAUnitInTheirOrderAtMultiplesOf64Bytes) {
  const WholeLayout layout(two_units());
  ASSERT_EQ(layout.units().size(), 2U);
  EXPECT_THAT(layout.units()[0].wholes, ElementsAre(0, 2, 3));
  EXPECT_THAT(layout.units()[1].wholes, ElementsAre(1));
  EXPECT_EQ(layout.offset_of(0), 0U);
  EXPECT_EQ(layout.offset_of(2), 64U);
  EXPECT_EQ(layout.offset_of(3), 64U + 128U);
  EXPECT_EQ(layout.offset_of(1), 0U);
  EXPECT_EQ(layout.units()[0].bytes, 64U + 128U + 400'000U);
  EXPECT_EQ(layout.units()[1].bytes, 64U);
  EXPECT_EQ(layout.units()[0].elements, 100'034U);
}

TEST(WholeLayout, HasUnitsThatAreTrainedIfAnyParameterIsAndOptionalIfAllAre) {
  const WholeLayout layout(two_units());
  EXPECT_TRUE(layout.units()[0].trained);
  EXPECT_FALSE(layout.units()[0].optional);
  EXPECT_FALSE(layout.units()[1].trained);
  EXPECT_TRUE(layout.units()[1].optional);
}

TEST(WholeLayout, KnowsWhereASliceLies) {
  const WholeLayout layout = two_ranks();
  EXPECT_EQ(layout.range_of(0, 2).begin, 64U);
  EXPECT_EQ(layout.range_of(0, 2).bytes, 17U * 2U);
  EXPECT_EQ(layout.range_of(1, 2).begin, 64U + 17U * 2U);
  EXPECT_EQ(layout.range_of(1, 3).begin, 192U + 90'000U * 4U);
  EXPECT_EQ(layout.range_of(1, 3).bytes, 10'000U * 4U);
  EXPECT_EQ(layout.range_of(1, 0).bytes, 0U);
  EXPECT_EQ(layout.slice_of(1, 1).first, 4U);
}

std::vector<std::size_t> wholes_in(const WholeLayout::Message& message) {
  std::vector<std::size_t> wholes;
  for (const WholeLayout::Run& run : message.runs) wholes.push_back(run.whole);
  return wholes;
}

TEST(WholeLayout, SendsSmallSlicesTogetherAndEachLargeOneAlone) {
  const WholeLayout layout = two_ranks();
  const std::vector<WholeLayout::Message> of_0 = layout.messages_of(0, 0, WholeForm::kExact);
  ASSERT_EQ(of_0.size(), 2U);
  EXPECT_THAT(wholes_in(of_0[0]), ElementsAre(0, 2));
  EXPECT_EQ(of_0[0].bytes, 4U + 34U);
  EXPECT_THAT(wholes_in(of_0[1]), ElementsAre(3));
  EXPECT_EQ(of_0[1].bytes, 360'000U);
  const std::vector<WholeLayout::Message> of_1 = layout.messages_of(1, 0, WholeForm::kExact);
  ASSERT_EQ(of_1.size(), 1U);
  EXPECT_THAT(wholes_in(of_1[0]), ElementsAre(2, 3)) << "40 kB are little";
  EXPECT_EQ(of_1[0].bytes, 32U + 40'000U);
}

// The codes of a large slice go in messages of 1 Mi elements; those of small slices go together,
// and beside them small slices that are not quantized.
TEST(WholeLayout, SendsCodesInMessagesOfTheirOwn) {
  constexpr std::uint64_t kMost = 1024 * 1024;
  constexpr std::uint64_t kBlockBytes = 256 + 4;
  std::vector<WholeParam> wholes{{.name = "bias", .count = 700, .quantized = true},
                                 {.name = "large", .count = 2 * kMost + 300, .quantized = true},
                                 {.name = "scale", .count = 256, .quantized = true},
                                 {.name = "exact", .count = 33},
                                 {.name = "other unit", .count = 8, .unit = 1}};
  WholeLayout layout(wholes);
  EXPECT_TRUE(layout.units()[0].quantized);
  EXPECT_FALSE(layout.units()[1].quantized);
  layout.set_slices({{{0, 700}, {0, 2 * kMost + 300}, {0, 256}, {0, 33}, {0, 8}}});

  const auto messages = layout.messages_of(0, 0, WholeForm::kQuantized);
  ASSERT_EQ(messages.size(), 5U);
  EXPECT_FALSE(messages[0].quantized);
  EXPECT_THAT(wholes_in(messages[0]), ElementsAre(3));
  EXPECT_EQ(messages[0].bytes, 66U);
  EXPECT_THAT(wholes_in(messages[1]), ElementsAre(0, 2));
  EXPECT_EQ(messages[1].bytes, (2 * kBlockBytes + 700 - 512 + 4) + kBlockBytes);
  std::uint64_t first = 0;
  for (std::size_t m = 2; m < 5; ++m) {
    EXPECT_TRUE(messages[m].quantized);
    ASSERT_THAT(wholes_in(messages[m]), ElementsAre(1));
    const WholeLayout::Run& run = messages[m].runs[0];
    EXPECT_EQ(run.first, first);
    EXPECT_EQ(run.count, m < 4 ? kMost : 300U);
    EXPECT_EQ(layout.range_of(0, run).begin, layout.offset_of(1) + 2 * first);
    EXPECT_EQ(layout.range_of(0, run).bytes, 2 * run.count);
    first += run.count;
  }
  EXPECT_EQ(messages[2].bytes, kMost / 256 * kBlockBytes);
  EXPECT_EQ(messages[4].bytes, kBlockBytes + 44 + 4);

  const auto exact = layout.messages_of(0, 0, WholeForm::kExact);
  ASSERT_EQ(exact.size(), 2U);
  EXPECT_THAT(wholes_in(exact[0]), ElementsAre(0, 2, 3));
  EXPECT_EQ(exact[1].bytes, 2 * (2 * kMost + 300));
}

TEST(WholeLayout, SendsASliceOf64KiBAlone) {
  WholeLayout layout({{.name = "a", .count = 16'384, .dtype = kFloat32, .unit = 0},
                      {.name = "b", .count = 16'383, .dtype = kFloat32, .unit = 0}});
  layout.set_slices({{{0, 16'384}, {0, 16'383}}, {{0, 0}, {0, 0}}});
  const auto messages = layout.messages_of(0, 0, WholeForm::kExact);
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_THAT(wholes_in(messages[0]), ElementsAre(1));
  EXPECT_THAT(wholes_in(messages[1]), ElementsAre(0));
  EXPECT_THAT(layout.messages_of(1, 0, WholeForm::kExact), IsEmpty())
      << "a rank that has nothing sends nothing";
}

TEST(WholeLayout, RefusesUnitsWithGapsByName) {
  const auto refused = [](const std::vector<WholeParam>& wholes) {
    return refusal([&] { WholeLayout{wholes}; });
  };
  EXPECT_THAT(refused({{.name = "a", .count = 1, .unit = 1}, {.name = "b", .count = 1, .unit = 1}}),
              AllOf(HasSubstr("no whole parameter is in unit 0"), HasSubstr("without gaps")));
  EXPECT_THAT(refused({{.name = "far", .count = 1, .unit = 4'000'000'000U}}),
              AllOf(HasSubstr("'far' is in unit 4000000000"), HasSubstr("without gaps")));
}

TEST(WholeLayout, RefusesAParameterOfNoElementsOrOptionalInAUnitThatIsNotByName) {
  std::vector<WholeParam> wholes = two_units();
  wholes[2].count = 0;
  EXPECT_THAT(refusal([&] { WholeLayout{wholes}; }), HasSubstr("'bias' has no elements"));
  wholes = two_units();
  wholes[3].optional = true;
  EXPECT_THAT(refusal([&] { WholeLayout{wholes}; }),
              AllOf(HasSubstr("'weight' of unit 0"), HasSubstr("optional")));
}

TEST(WholeLayout, RefusesSlicesThatAreNotAllOfAParameterByName) {
  WholeLayout layout({{.name = "whole", .count = 10, .unit = 0}});
  const auto refused = [&](WholeLayout::Slice of_0, WholeLayout::Slice of_1) {
    return refusal([&] { layout.set_slices({{of_0}, {of_1}}); });
  };
  EXPECT_THAT(refused({0, 4}, {5, 5}),
              AllOf(HasSubstr("'whole' of 10 elements"),
                    HasSubstr("rank 1 has those from 5 on, but the ranks before it end at 4")));
  EXPECT_THAT(refused({0, 4}, {3, 7}), HasSubstr("the ranks before it end at 4"));
  EXPECT_THAT(refused({0, 4}, {4, 5}),
              HasSubstr("'whole' has 10 elements, but all ranks' slices 9"));
  EXPECT_THAT(refused({0, 4}, {4, 7}), HasSubstr("all ranks' slices 11"));
  EXPECT_THAT(refused({5, 5}, {0, 5}), HasSubstr("rank 0 has those from 5 on"))
      << "in the order of ranks";
  EXPECT_THAT(refused({0, 0}, {0, 0}), HasSubstr("all ranks' slices 0"));
}

TEST(WholeLayout, FindsTheGroupsWhoseRanksHaveAllSlices) {
  WholeLayout layout({{.name = "whole", .count = 10, .unit = 0}});
  layout.set_slices({{{0, 4}}, {{4, 6}}, {{0, 4}}, {{4, 6}}});
  EXPECT_EQ(layout.group_ranks(), 2U);
  EXPECT_EQ(layout.range_of(3, 0).begin, 8U);
  layout.set_slices({{{0, 10}}, {{0, 10}}, {{0, 10}}});
  EXPECT_EQ(layout.group_ranks(), 1U);
  layout.set_slices({{{0, 4}}, {{4, 6}}});
  EXPECT_EQ(layout.group_ranks(), 2U);
  EXPECT_THAT(refusal([&] {
                layout.set_slices({{{0, 4}}, {{4, 6}}, {{0, 4}}});
              }),
              HasSubstr("rank 2 has those from 0 on, but the ranks before it end at 10"));
}

TEST(WholeLayout, TakesRanksThatHaveNothingWhereverTheyStand) {
  WholeLayout layout({{.name = "whole", .count = 10, .unit = 0}});
  layout.set_slices({{{0, 0}}, {{0, 10}}, {{7, 0}}});
  EXPECT_EQ(layout.range_of(1, 0).bytes, 20U);
  EXPECT_EQ(layout.range_of(2, 0).bytes, 0U);
}

}  // namespace whole_layout_test
}  // namespace ziggurat::testing

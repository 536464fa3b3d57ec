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
namespace {

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

TEST(WholeLayout, SendsSmallSlicesTogetherAndEachLargeOneAlone) {
  const WholeLayout layout = two_ranks();
  const std::vector<WholeLayout::Message> of_0 = layout.messages_of(0, 0);
  ASSERT_EQ(of_0.size(), 2U);
  EXPECT_THAT(of_0[0].wholes, ElementsAre(0, 2));
  EXPECT_EQ(of_0[0].bytes, 4U + 34U);
  EXPECT_THAT(of_0[1].wholes, ElementsAre(3));
  EXPECT_EQ(of_0[1].bytes, 360'000U);
  const std::vector<WholeLayout::Message> of_1 = layout.messages_of(1, 0);
  ASSERT_EQ(of_1.size(), 1U);
  EXPECT_THAT(of_1[0].wholes, ElementsAre(2, 3)) << "40 kB are little";
  EXPECT_EQ(of_1[0].bytes, 32U + 40'000U);
}

TEST(WholeLayout, SendsASliceOf64KiBAlone) {
  WholeLayout layout({{.name = "a", .count = 16'384, .dtype = kFloat32, .unit = 0},
                      {.name = "b", .count = 16'383, .dtype = kFloat32, .unit = 0}});
  layout.set_slices({{{0, 16'384}, {0, 16'383}}, {{0, 0}, {0, 0}}});
  const std::vector<WholeLayout::Message> messages = layout.messages_of(0, 0);
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_THAT(messages[0].wholes, ElementsAre(1));
  EXPECT_THAT(messages[1].wholes, ElementsAre(0));
  EXPECT_THAT(layout.messages_of(1, 0), IsEmpty()) << "a rank that has nothing sends nothing";
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

TEST(WholeLayout, TakesRanksThatHaveNothingWhereverTheyStand) {
  WholeLayout layout({{.name = "whole", .count = 10, .unit = 0}});
  layout.set_slices({{{0, 0}}, {{0, 10}}, {{7, 0}}});
  EXPECT_EQ(layout.range_of(1, 0).bytes, 20U);
  EXPECT_EQ(layout.range_of(2, 0).bytes, 0U);
}

}  // namespace
}  // namespace ziggurat::testing

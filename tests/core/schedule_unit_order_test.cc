// SPDX-License-Identifier: Apache-2.0
// tests/core/schedule_unit_order_test.cc: the order in which units are used is learned in one step
// and expected in the next, whatever experts a router calls between.
#include "core/schedule/params/unit_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <vector>

namespace ziggurat::testing {
namespace schedule_unit_order_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Blocks A, B and C of 10 elements, which all steps use, and experts of 5, which some do.
enum Unit : UnitId { kA, kB, kC, kExpert0, kExpert1, kExpert2, kUnits };

std::vector<UnitOrder::Kind> with_experts() {
  std::vector<UnitOrder::Kind> units;
  for (UnitId u = 0; u < kUnits; ++u)
    units.push_back({.elements = u >= kExpert0 ? 5U : 10U, .optional = u >= kExpert0});
  return units;
}

class OrderOfUnits : public ::testing::Test {
 protected:
  void use(std::initializer_list<UnitId> units) {
    for (const UnitId unit : units) order_.used(unit);
  }
  void step(std::initializer_list<UnitId> units) {
    use(units);
    order_.begin_step();
  }

  UnitOrder order_{with_experts()};
};

TEST_F(OrderOfUnits, IsThatOfTheStepBefore) {
  EXPECT_FALSE(order_.known());
  step({kA, kB, kC, kB});
  EXPECT_TRUE(order_.known());
  EXPECT_THAT(order_.ahead(9), ElementsAre(kA, kB, kC, kB));
  use({kA});
  EXPECT_THAT(order_.ahead(2), ElementsAre(kB, kC));
  EXPECT_EQ(order_.next_use(kC), 11U);
  EXPECT_EQ(order_.next_use(kA), UnitOrder::kNever);
}

TEST_F(OrderOfUnits, IsLearnedAgainAfterFiveSurprises) {
  step({kA, kB, kC});
  for (const UnitId unit : {kC, kB, kA, kC}) use({unit});  // each moves the place
  order_.begin_step();
  EXPECT_TRUE(order_.known());
  for (const UnitId unit : {kC, kB, kA, kC, kB}) use({unit});
  order_.begin_step();
  EXPECT_FALSE(order_.known());
}

TEST_F(OrderOfUnits, StaysKnownWhateverExpertsAreCalled) {
  for (const UnitId expert : {kExpert0, kExpert1, kExpert2, kExpert0, kExpert1, kExpert2}) {
    step({kA, expert, kB, expert, kC, expert, kC, expert, kB, expert, kA, expert});
    EXPECT_TRUE(order_.known());
    EXPECT_THAT(order_.ahead(9), ElementsAre(kA, kB, kC, kC, kB, kA));
  }
}

TEST_F(OrderOfUnits, HasTheExpertsThatTwoStepsHaveUsedAtThePlace) {
  step({kA, kExpert0, kExpert1, kB, kExpert2});
  EXPECT_THAT(order_.ahead(9), ElementsAre(kA, kB));
  step({kA, kExpert1, kB, kExpert2});
  EXPECT_THAT(order_.ahead(9), ElementsAre(kA, kExpert1, kB, kExpert2));
  step({kA, kExpert0, kExpert1, kB});
  EXPECT_THAT(order_.ahead(9), ElementsAre(kA, kExpert1, kB)) << "expert 0 was left out between";
}

TEST_F(OrderOfUnits, IsNotLeftForAnExpertThatIsExpectedElsewhere) {
  step({kA, kB, kExpert0, kC, kC, kExpert0, kB, kA});
  use({kA, kExpert0});
  EXPECT_THAT(order_.ahead(2), ElementsAre(kB, kC)) << "it is expected behind B alone";
  EXPECT_EQ(order_.next_use(kExpert0), 11U);
}

TEST_F(OrderOfUnits, ForgetsExpertsThatAreLeftOut) {
  step({kA, kExpert0, kB, kExpert1, kC});
  for (int s = 0; s < 3; ++s) step({kA, kB, kC});
  EXPECT_TRUE(order_.known());
  EXPECT_THAT(order_.ahead(9), ElementsAre(kA, kB, kC));
}

TEST_F(OrderOfUnits, IsLearnedOfExpertsAloneToo) {
  for (int s = 0; s < 2; ++s) step({kExpert1, kExpert0});
  EXPECT_THAT(order_.ahead(9), ElementsAre(kExpert1, kExpert0));
  use({kExpert1, kExpert0});
  for (int pass = 0; pass < 100; ++pass) use({kExpert2, kExpert0});
  order_.begin_step();
  EXPECT_THAT(order_.ahead(9), ElementsAre(kExpert1, kExpert0)) << "it grows behind the last place";
  step({});
  EXPECT_FALSE(order_.known());
  EXPECT_THAT(order_.ahead(9), IsEmpty());
}

}  // namespace schedule_unit_order_test
}  // namespace ziggurat::testing

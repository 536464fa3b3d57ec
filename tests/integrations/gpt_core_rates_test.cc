// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_core_rates_test.cc: what is told apart of two timed products, also where
// another program has made one of them slow.
#include <gtest/gtest.h>

#include "integrations/gpt/core_rates.h"

namespace ziggurat::gpt {
namespace gpt_core_rates_test {

TEST(CoreRates, TellsWeightsFromRows) {
  const double row_s = 2e-5, weights_s = 1e-3;
  EXPECT_NEAR(weights_seconds({128, weights_s + 128 * row_s}, {512, weights_s + 512 * row_s}),
              weights_s, 1e-12);
  EXPECT_EQ(weights_seconds({128, 1e-3}, {512, 5e-3}), 0) << "few rows are faster, each";
}

// A rate of all rows that is not above 0 is one that no program reads again.
TEST(CoreRates, LeavesTimeForRowsWhateverWasTimed) {
  for (const double few_s : {3.9e-3, 4e-3, 4.1e-3, 1.0}) {
    const double many_s = 4e-3;
    const double weights_s = weights_seconds({128, few_s}, {512, many_s});
    EXPECT_GE(weights_s, 0) << few_s;
    EXPECT_GE(many_s - weights_s, many_s / 4) << few_s;
  }
}

}  // namespace gpt_core_rates_test
}  // namespace ziggurat::gpt

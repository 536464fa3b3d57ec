// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/cuda_test.h: a test over the double: a fresh machine, and no finding or leak at
// its end.
#pragma once

#include <gmock/gmock.h>

#include "tests/cuda_double/cuda_double.h"

namespace ziggurat::cuda_double {

class CudaTest : public testing::Test {
 protected:
  explicit CudaTest(const Options& options = {}) { reset(kSeed, options); }
  /// What a test expects it takes first; all else fails the test.
  void TearDown() override { EXPECT_THAT(report(), testing::IsEmpty()); }

  static constexpr std::uint64_t kSeed = 20261123;
};

}  // namespace ziggurat::cuda_double

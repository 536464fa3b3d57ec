// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/fresh_machine.cc: linked into a test that knows nothing of the double, so that
// it runs over one: a fresh machine for each case, another seed each time that a case is repeated,
// and no finding or leak at its end.
#include <gmock/gmock.h>

#include "tests/cuda_double/cuda_double.h"

namespace ziggurat::cuda_double {
namespace {

class FreshMachine final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { reset(++seed_); }
  // The case's own objects are gone by now.
  void OnTestEnd(const testing::TestInfo& info) override {
    EXPECT_THAT(report(), testing::IsEmpty()) << info.name() << ", seed " << seed_;
  }
  std::uint64_t seed_ = 0;
};

// GoogleTest owns it from here on.
const bool appended = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new FreshMachine);
  return true;
}();

}  // namespace
}  // namespace ziggurat::cuda_double

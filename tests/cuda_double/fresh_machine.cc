// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/fresh_machine.cc: linked into a test that knows nothing of the double, so that
// it runs over one: a fresh machine for each case, another seed each time that a case is repeated,
// and no finding or leak at its end.
//
// ZIGGURAT_REPLAY: each seed is used twice, in repetitions beside each other, with time that goes
// on only when all threads are idle, and the two must have the same trace.
#include <gmock/gmock.h>

#include <cstdlib>
#include <map>
#include <string>

#include "tests/cuda_double/cuda_double.h"

namespace ziggurat::cuda_double {
namespace {

class FreshMachine final : public testing::EmptyTestEventListener {
  void OnTestIterationStart(const testing::UnitTest&, int iteration) override {
    repetition_ = static_cast<std::uint64_t>(iteration);
    case_ = 0;
  }
  void OnTestStart(const testing::TestInfo&) override {
    constexpr std::uint64_t kCasesMax = 1000;
    seed_ = (replays_ ? repetition_ / 2 : repetition_) * kCasesMax + ++case_;
    reset(seed_, {.pace = replays_ ? Pace::kWhenQuiet : Pace::kWhenWaitedFor});
  }
  // The case's own objects are gone by now.
  void OnTestEnd(const testing::TestInfo& info) override {
    EXPECT_THAT(report(), testing::IsEmpty()) << info.name() << ", seed " << seed_;
    if (!replays_) return;
    const std::uint64_t trace = trace_hash();
    if (repetition_ % 2 == 0) {
      traces_[seed_] = trace;
    } else {
      EXPECT_EQ(trace, traces_[seed_]) << info.name() << ", seed " << seed_ << ", twice";
    }
  }

  const bool replays_ = std::getenv("ZIGGURAT_REPLAY") != nullptr;
  std::uint64_t repetition_ = 0;
  std::uint64_t case_ = 0;
  std::uint64_t seed_ = 0;
  std::map<std::uint64_t, std::uint64_t> traces_;
};

// GoogleTest owns it from here on.
const bool appended = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new FreshMachine);
  return true;
}();

}  // namespace
}  // namespace ziggurat::cuda_double

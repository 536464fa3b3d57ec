// SPDX-License-Identifier: Apache-2.0
// tests/base/error_test.cc: codes say what to do next, messages name the errno, degraded modes are
// kept.
#include "base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/log.h"

namespace ziggurat {
namespace error_test {

TEST(SystemError, ChoosesTheCodeByWhatTheCallerDoesNext) {
  EXPECT_EQ(system_error(ENOSPC, "write").code(), ErrorCode::kResourceExhausted);
  EXPECT_EQ(system_error(ENOMEM, "mmap").code(), ErrorCode::kResourceExhausted);
  EXPECT_EQ(system_error(EDQUOT, "write").code(), ErrorCode::kResourceExhausted);
  EXPECT_EQ(system_error(ENOENT, "open").code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(system_error(EINVAL, "open").code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(system_error(EIO, "read").code(), ErrorCode::kUnavailable);
}

TEST(SystemError, MessageNamesWhatFailedAndTheErrno) {
  const Error error = system_error(ENOSPC, "write /store/data");
  EXPECT_STREQ(error.what(), "write /store/data: ENOSPC (No space left on device)");
  EXPECT_EQ(error.native(), ENOSPC);
}

TEST(ErrnoText, GivesTheNumberOfWhatHasNoName) { EXPECT_EQ(errno_text(98765), "errno 98765"); }

TEST(ErrorCode, EveryCodeHasAName) {
  for (int code = 0; code <= static_cast<int>(ErrorCode::kNotFinite); ++code) {
    EXPECT_NE(to_string(static_cast<ErrorCode>(code)), "unknown");
  }
}

TEST(DegradedModes, KeepTheFirstExplanationOfEachKeyInOrder) {
  note_degraded("test-disk", "no O_DIRECT");
  note_degraded("test-ring", "forbidden");
  note_degraded("test-disk", "said again");
  EXPECT_THAT(degraded_modes(),
              ::testing::IsSupersetOf({"test-disk: no O_DIRECT", "test-ring: forbidden"}));
  EXPECT_THAT(degraded_modes(), ::testing::Not(::testing::Contains("test-disk: said again")));
}

TEST(DegradedModes, MayBeNotedFromManyThreads) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([] { note_degraded("test-once", "seen"); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(::testing::Matches(::testing::Contains("test-once: seen"))(degraded_modes()), true);
}

TEST(CheckDeathTest, PrintsTheExpressionAndTheOperands) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const int index = 9;
  EXPECT_DEATH(ZIGGURAT_CHECK(index < 3, "chunk {} of {}", index, 3), "index < 3: chunk 9 of 3");
}

TEST(Check, EvaluatesItsConditionOnce) {
  int evaluated = 0;
  ZIGGURAT_CHECK(++evaluated > 0, "never printed");
  EXPECT_EQ(evaluated, 1);
}

}  // namespace error_test
}  // namespace ziggurat

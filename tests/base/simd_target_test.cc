// SPDX-License-Identifier: Apache-2.0
// tests/base/simd_target_test.cc: which target is in force, and who may say so.
#include <gmock/gmock.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/numerics/simd_target.h"
#include "optimizer/gradient.h"

namespace ziggurat {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(SimdTarget, ListsTheBestFirstAndTheSpecificationLast) {
  const auto targets = simd_targets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(targets.back(), "scalar");
#if defined(__x86_64__)
  EXPECT_THAT(targets, ::testing::Contains("SSSE3"));
#endif
}

TEST(SimdTarget, ForcingHoldsUntilTheEmptyName) {
  for (const auto target : simd_targets()) {
    force_simd_target(target);
    EXPECT_EQ(simd_target(), target);
  }
  force_simd_target("");
  EXPECT_EQ(simd_target(), simd_targets().front());
}

TEST(SimdTarget, AnUnknownNameIsOneClearErrorAndChangesNothing) {
  force_simd_target("scalar");
  try {
    force_simd_target("AVX9000");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("AVX9000"));
    for (const auto target : simd_targets())
      EXPECT_THAT(error.what(), HasSubstr(std::string(target)));
    EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
  }
  EXPECT_EQ(simd_target(), "scalar");
}

// The environment is read once in a process, so each of these runs in a fresh one.
class SimdEnvironmentDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

/// Ends the process: 0 and the target's name on stderr, or 3 and the error.
[[noreturn]] void report_target(const char* environment) {
  ::setenv("ZIGGURAT_SIMD", environment, 1);
  try {
    const std::string target(simd_target());
    std::fprintf(stderr, "target=%s;\n", target.c_str());
    std::exit(0);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", std::string(to_string(error.code())).c_str(), error.what());
    std::exit(3);
  }
}

TEST_F(SimdEnvironmentDeathTest, EachNameIsObeyed) {
  for (const auto target : simd_targets()) {
    const std::string name(target);
    EXPECT_EXIT(report_target(name.c_str()), ::testing::ExitedWithCode(0), "target=" + name + ";");
  }
}

TEST_F(SimdEnvironmentDeathTest, EmptyMeansTheBest) {
  EXPECT_EXIT(report_target(""), ::testing::ExitedWithCode(0),
              "target=" + std::string(simd_targets().front()) + ";");
}

TEST_F(SimdEnvironmentDeathTest, AnUnknownNameIsAnErrorThatListsTheValidOnes) {
  EXPECT_EXIT(report_target("neon9"), ::testing::ExitedWithCode(3),
              "invalid argument: ZIGGURAT_SIMD=neon9 names no .*valid names are .*scalar");
}

/// Kernels cannot throw: they say so once in the log and give the same bits at the best target.
[[noreturn]] void round_under_unknown_target() {
  ::setenv("ZIGGURAT_SIMD", "neon9", 1);
  const std::vector<float> values(100, 1.0f);
  std::vector<bf16> out(100);
  round_to_bf16(values, out);
  std::exit(out[99] == 0x3f80 ? 0 : 4);
}

TEST_F(SimdEnvironmentDeathTest, AKernelThatMeetsAnUnknownNameLogsIt) {
  EXPECT_EXIT(round_under_unknown_target(), ::testing::ExitedWithCode(0), "ZIGGURAT_SIMD=neon9");
}

}  // namespace
}  // namespace ziggurat

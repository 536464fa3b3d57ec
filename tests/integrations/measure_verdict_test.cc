// SPDX-License-Identifier: Apache-2.0
// tests/integrations/measure_verdict_test.cc: which figures are believed, which are flagged, and
// which are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/bytes.h"
#include "integrations/measure/verdict.h"

namespace ziggurat::measure {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

Evidence good() {
  Evidence evidence;
  evidence.seconds = 5;
  evidence.gb_per_second = {3.0, 3.1, 2.95, 3.05, 3.0};
  evidence.gb_per_s = 3.0;
  evidence.file_bytes = 8 * kGiB;
  evidence.drive_bytes = 1000 * kGiB;
  evidence.extents = {.known = true};
  evidence.cache = {.direct = true};
  evidence.sample = {.pages = 1000, .verified = true};
  return evidence;
}

std::vector<Doubt> doubts(const Evidence& evidence) {
  std::vector<Doubt> all;
  for (const Flag& flag : judge(evidence)) {
    EXPECT_FALSE(flag.text.empty());
    all.push_back(flag.doubt);
  }
  return all;
}

TEST(BenchVerdict, AGoodRunHasNoFlag) {
  EXPECT_THAT(doubts(good()), IsEmpty());
  EXPECT_FALSE(refused(judge(good())));
}

TEST(BenchVerdict, HolesAndUnwrittenExtentsAreRefused) {
  Evidence evidence = good();
  evidence.extents.hole_bytes = 8192;
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kHole));
  EXPECT_TRUE(refused(judge(evidence)));
  evidence = good();
  evidence.extents.unwritten_bytes = kMiB;
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kUnwritten));
  EXPECT_TRUE(refused(judge(evidence)));
}

TEST(BenchVerdict, ThePageCacheIsRefused) {
  Evidence evidence = good();
  evidence.cache.direct = false;
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kCached));
  evidence.cache = {.direct = true, .resident_share = 0.5};
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kCached));
  EXPECT_TRUE(refused(judge(evidence)));
  evidence.cache.resident_share = 0.001;
  EXPECT_THAT(doubts(evidence), IsEmpty());
  evidence.cache.residency_known = false;
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kCached));
  EXPECT_FALSE(refused(judge(evidence))) << "nothing was seen that speaks against it";
}

TEST(BenchVerdict, BytesThatADriveCanMakeLightOfAreRefused) {
  Evidence evidence = good();
  evidence.sample = {.pages = 1000, .constant_pages = 20};
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kZeros));
  EXPECT_TRUE(refused(judge(evidence)));
  evidence.sample = {.pages = 1000, .thin_pages = 300};
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kCompressible));
  EXPECT_TRUE(refused(judge(evidence)));
  evidence.sample = {.pages = 1000, .constant_pages = 5, .thin_pages = 100};
  EXPECT_THAT(doubts(evidence), IsEmpty()) << "a checkpoint has some";
}

TEST(BenchVerdict, WrongBytesAreRefusedWhateverElseTheyAre) {
  Evidence evidence = good();
  evidence.sample.wrong_pages = 1;
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kWrong));
  EXPECT_TRUE(refused(judge(evidence)));
  evidence.sample.verified = false;
  EXPECT_THAT(doubts(evidence), IsEmpty()) << "somebody's file cannot be wrong";
}

TEST(BenchVerdict, ShortUnsteadyAndSmallAreFlaggedButBelieved) {
  Evidence evidence = good();
  evidence.seconds = 1;
  evidence.gb_per_second = {3.0};
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kShort));
  EXPECT_FALSE(refused(judge(evidence)));

  evidence = good();
  evidence.gb_per_second = {3.0, 3.0, 3.0, 3.0, 2.3};
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kUnsteady));

  evidence = good();
  evidence.file_bytes = 2 * kGiB;
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kSmall)) << "less than a second's worth";
  evidence.file_bytes = 8 * kGiB;
  evidence.drive_bytes = 16'000 * kGiB;
  EXPECT_THAT(doubts(evidence), ElementsAre(Doubt::kSmall)) << "less than the drive's DRAM";
}

TEST(BenchVerdict, SteadinessIsExcursionAndSlopeOverFiveSeconds) {
  EXPECT_FALSE(steadiness({1, 1, 1, 1}).judged);
  const Steadiness flat = steadiness({2, 2, 2, 2, 2});
  EXPECT_TRUE(flat.steady());
  EXPECT_DOUBLE_EQ(flat.excursion, 0);
  EXPECT_DOUBLE_EQ(flat.slope, 0);
  const Steadiness falling = steadiness({1.08, 1.04, 1.0, 0.96, 0.92});
  EXPECT_NEAR(falling.excursion, 0.16, 1e-12);
  EXPECT_NEAR(falling.slope, 0.16, 1e-12);
  EXPECT_FALSE(falling.steady()) << "within the excursion, and still drifting";
  const Steadiness jagged = steadiness({1.15, 0.85, 1.15, 0.85, 1.0});
  EXPECT_FALSE(jagged.steady()) << "no drift, but no rate either";
  EXPECT_FALSE(steadiness({0, 0, 0, 0, 0}).steady());
}

}  // namespace
}  // namespace ziggurat::measure

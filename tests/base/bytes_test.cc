// SPDX-License-Identifier: Apache-2.0
// tests/base/bytes_test.cc: sizes as people write them, and those we refuse.
#include "base/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace ziggurat {
namespace bytes_test {

TEST(ParseSize, ReadsBinaryAndDecimalUnitsInAnyCase) {
  EXPECT_EQ(parse_size("160MiB", "--device-memory"), 160 * kMiB);
  EXPECT_EQ(parse_size("384M", "x"), 384 * kMiB);
  EXPECT_EQ(parse_size("1.5GiB", "x"), 3 * kGiB / 2);
  EXPECT_EQ(parse_size("2GB", "x"), 2'000'000'000U);
  EXPECT_EQ(parse_size("2gb", "x"), 2'000'000'000U);
  EXPECT_EQ(parse_size("64 KiB", "x"), 64 * kKiB);
  EXPECT_EQ(parse_size("3TiB", "x"), 3072 * kGiB);
  EXPECT_EQ(parse_size("4096", "x"), 4096U);
  EXPECT_EQ(parse_size("17B", "x"), 17U);
  EXPECT_EQ(parse_size("0", "x"), 0U);
}

TEST(ParseSize, RefusesEverythingElseAndNamesTheParameter) {
  for (const char* text : {"", "MiB", "-1GiB", "1.2.3G", "12X", "1e3", "inf", "nan", "0x10", "ten",
                           " 5G", "9999999999TiB", "1GiB1"}) {
    try {
      parse_size(text, "--host-memory");
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("--host-memory"));
    }
  }
}

TEST(FormatBytes, UsesTheUnitThatReadsWell) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(172'072'960), "164.1 MiB");
  EXPECT_EQ(format_bytes(3 * kGiB / 2), "1.50 GiB");
}

TEST(RoundUp, TakesAnyPositiveAlignment) {
  EXPECT_EQ(round_up(0, 512), 0U);
  EXPECT_EQ(round_up(1, 512), 512U);
  EXPECT_EQ(round_up(512, 512), 512U);
  EXPECT_EQ(round_up(10, 3), 12U);
}

}  // namespace bytes_test
}  // namespace ziggurat

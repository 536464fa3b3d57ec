// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_world_test.cc: what the world does to a run: disks that are full or
// read-only, stores that are damaged. One clear error each, nothing lost.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "tests/integrations/cli_process.h"
#include "tests/support/loop_filesystem.h"
#include "tiers/store/store_layout.h"
#include "tiers/store/superblock.h"

namespace ziggurat::test {
namespace cli_world_test {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

#define SKIP_WITHOUT(filesystem) \
  if (!(filesystem).why_not().empty()) GTEST_SKIP() << (filesystem).why_not()

Arguments train_in(const TemporaryFolder& folder, const std::string& store, int steps) {
  return tiny_train(folder, "unused", steps) + Arguments{"--store", store};
}

void expect_world_error(const Output& output) {
  EXPECT_EQ(output.exit_code, 1) << output.out << output.err;
  EXPECT_THAT(output.err, StartsWith("ziggurat: error: "));
  EXPECT_THAT(output.out, Not(HasSubstr("loss-bits")));
}

TEST(CliWorld, AFullDiskIsNamedWithWhatIsMissingAndLeavesNoStore) {
  const TemporaryFolder folder;
  const LoopFilesystem disk(64 * kMiB);
  SKIP_WITHOUT(disk);
  disk.fill_up_to(1 * kMiB);
  const Output output = ziggurat(folder.path(), train_in(folder, disk / "store", 2));
  expect_world_error(output);
  EXPECT_THAT(output.err, HasSubstr(disk / "store"));
  EXPECT_THAT(output.err, HasSubstr("free"));

  // What it left behind does not stand in the way once there is room.
  fs::remove(disk.path() / "filler");
  const Output room = ziggurat(folder.path(), train_in(folder, disk / "store", 2));
  EXPECT_EQ(room.exit_code, 0) << room.err;
}

TEST(CliWorld, ADiskThatFillsUpUnderARunDoesNotStopIt) {
  const TemporaryFolder folder;
  const LoopFilesystem disk(64 * kMiB);
  SKIP_WITHOUT(disk);
  const Output whole = ziggurat(folder.path(), tiny_train(folder, "whole", 6));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  ASSERT_EQ(ziggurat(folder.path(), train_in(folder, disk / "store", 2)).exit_code, 0);
  disk.fill_up_to(0);
  const Output rest = ziggurat(folder.path(), train_in(folder, disk / "store", 6));
  ASSERT_EQ(rest.exit_code, 0) << rest.err;
  for (const auto& [step, bits] : loss_bits(rest.out))
    EXPECT_EQ(bits, loss_bits(whole.out).at(step)) << step;
}

// A report is not worth a run, and another --store would not help it.
TEST(CliWorld, ADiskThatIsTooSmallForAReportEndsNoRun) {
  const TemporaryFolder folder;
  const LoopFilesystem disk(64 * kMiB);
  SKIP_WITHOUT(disk);
  disk.fill_up_to(16 * kKiB);
  const Output output = ziggurat(
      folder.path(), tiny_train(folder, "store", 40) + Arguments{"--json", disk / "run.json"});
  EXPECT_EQ(output.exit_code, 1) << "all is done but the report";
  EXPECT_THAT(output.out, HasSubstr("generation 40 is durable"));
  EXPECT_THAT(output.err, HasSubstr("--json " + (disk / "run.json") + ": ENOSPC"));
  EXPECT_THAT(output.err, Not(HasSubstr("--store")));
  EXPECT_EQ(std::count(output.err.begin(), output.err.end(), '\n'), 1) << output.err;
  const auto report = nlohmann::json::parse(contents(disk / "run.json"));
  EXPECT_GT(report.at("steps").size(), 0U);
  EXPECT_LT(report.at("steps").size(), 40U);
}

TEST(CliWorld, ATraceThatCannotBeWrittenEndsNoRunAndItsErrnoIsTheRightOne) {
  const TemporaryFolder folder;
  const Output output =
      ziggurat(folder.path(), tiny_train(folder, "store", 4) + Arguments{"--trace", "/dev/full"});
  EXPECT_EQ(output.exit_code, 1) << "all is done but the report";
  EXPECT_THAT(output.out, HasSubstr("generation 4 is durable"));
  EXPECT_THAT(output.err, HasSubstr("the trace /dev/full: ENOSPC"));
  EXPECT_EQ(std::count(output.err.begin(), output.err.end(), '\n'), 1) << output.err;
}

TEST(CliWorld, AReportThatCannotBeMadeIsRefusedBeforeAnythingIsBegun) {
  const TemporaryFolder folder;
  const Output output = ziggurat(folder.path(), tiny_train(folder, "store", 4) +
                                                    Arguments{"--json", folder / "none/run.json"});
  expect_world_error(output);
  EXPECT_THAT(output.err, HasSubstr(folder / "none/run.json"));
  EXPECT_FALSE(fs::exists(folder / "store"));
}

TEST(CliWorld, AReadOnlyFilesystemIsSaidAndTheStoreGoesOnLater) {
  const TemporaryFolder folder;
  const LoopFilesystem disk(64 * kMiB);
  SKIP_WITHOUT(disk);
  ASSERT_EQ(ziggurat(folder.path(), train_in(folder, disk / "store", 2)).exit_code, 0);
  disk.remount_read_only();
  for (const char* name : {"store", "new"}) {
    SCOPED_TRACE(name);
    const Output output = ziggurat(folder.path(), train_in(folder, disk / name, 4));
    expect_world_error(output);
    EXPECT_THAT(output.err, HasSubstr("Read-only file system"));
    EXPECT_THAT(output.err, HasSubstr(disk / name));
  }
}

/// By the format of its records.
class DamagedStore : public ::testing::TestWithParam<const char*> {
 protected:
  Arguments train(const std::string& store, int steps) const {
    return tiny_train(folder_, store, steps) + Arguments{"--state-format", GetParam()};
  }
  void SetUp() override {
    ASSERT_EQ(ziggurat(folder_.path(), train("store", 3)).exit_code, 0);
    for (const auto& entry : fs::directory_iterator(folder_ / "store")) {
      if (fs::file_size(entry.path()) > kRegionBytes) file_ = entry.path();
    }
    ASSERT_FALSE(file_.empty());
  }

  void damage_superblocks(unsigned parity) {
    std::string bytes = contents(file_);
    for (int copy = 0; copy < kSuperblockCopies; ++copy)
      bytes[StoreLayout::superblock_offset(parity, copy, bytes.size()) + 100] ^= 1;
    write_file(file_, bytes);
  }

  TemporaryFolder folder_;
  fs::path file_;
};

INSTANTIATE_TEST_SUITE_P(Formats, DamagedStore, ::testing::Values("fp32", "8bit", "split"),
                         [](const auto& one) { return "of_" + std::string(one.param); });

TEST_P(DamagedStore, WithoutItsNewestSuperblockGoesBackOneGenerationAndSaysSo) {
  const Output whole = ziggurat(folder_.path(), train("whole", 5));
  damage_superblocks(1);
  const Output output = ziggurat(folder_.path(), train("store", 5));
  ASSERT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.err, HasSubstr("superblock"));
  EXPECT_THAT(output.out, HasSubstr("resumed at step 2"));
  const auto bits = loss_bits(output.out);
  ASSERT_EQ(bits.size(), 3U);
  for (const auto& [step, value] : bits) EXPECT_EQ(value, loss_bits(whole.out).at(step));
}

TEST_P(DamagedStore, WithoutAnySuperblockIsRefusedNamingWhatRemainsAndStaysAsItIs) {
  damage_superblocks(0);
  damage_superblocks(1);
  const std::string before = contents(file_);
  const Output output = ziggurat(folder_.path(), train("store", 5));
  expect_world_error(output);
  EXPECT_THAT(output.err, HasSubstr(file_.string()));
  EXPECT_THAT(output.err, HasSubstr("both superblocks are damaged"));
  EXPECT_EQ(contents(file_), before);
}

}  // namespace cli_world_test
}  // namespace ziggurat::test

// SPDX-License-Identifier: Apache-2.0
// tests/faults/checkpoint_shutdown_test.cc: the filesystem of checkpoints, or of checkpoints and
// the store, is shut down (FS_IOC_SHUTDOWN) at a call of a save: what was not synced is gone, as
// after a power cut, but for what the filesystem's own rules keep. Mounted again, it has every
// checkpoint that was committed, none by half, and a store that goes on from where it was durable.
//
// ext4 and XFS in an image, as root. Some calls are struck; ZIGGURAT_FAULTS=all strikes each call
// until a run ends without having been struck.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <memory>

#include "base/bytes.h"
#include "tests/faults/struck_jobs.h"
#include "tests/support/loop_filesystem.h"

namespace ziggurat::testing {
namespace {

using test::LoopFilesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

constexpr std::uint64_t kSteps = 7;
constexpr std::uint64_t kMoreSteps = 9;
constexpr std::uint64_t kSampled = 1;  // of each way on each rank
constexpr std::uint64_t kDiskBytes = 320 * kMiB;

struct Setting {
  const char* name;
  LoopFilesystem::Kind kind;
  bool with_store;  ///< the store is on the same filesystem
};
std::ostream& operator<<(std::ostream& out, const Setting& setting) { return out << setting.name; }

/// What the log and the data in memory become: FS_IOC_SHUTDOWN's flags.
struct Way {
  const char* name;
  std::uint32_t flags;
};
constexpr Way kWays[] = {
    {"everything is written", 0}, {"the log is written", 1}, {"nothing is written", 2}};

class CheckpointShutdown : public ::testing::TestWithParam<Setting> {
 protected:
  std::string path(const std::string& name) const { return scratch_.path() + "/" + name; }
  std::string store() const { return GetParam().with_store ? disk_ / "store" : path("store"); }
  std::string target() const { return disk_ / "target"; }
  Job job(std::uint64_t last_step) const {
    return {.ranks = 2,
            .store = store(),
            .target = target(),
            .last_step = last_step,
            .opened_copy = path("opened"),
            .last_copy = path("last")};
  }
  /// For good: a shutdown would bring back what was removed and not synced.
  void clear() const {
    for (const std::string& folder : {store(), target(), path("opened"), path("last")})
      fs::remove_all(folder);
    disk_.sync();
  }

  void SetUp() override {
    if (!disk_.why_not().empty()) GTEST_SKIP() << disk_.why_not();
    expected_ = states_of_steps(job(kMoreSteps));
    ASSERT_FALSE(expected_.empty());
    clear();
    const std::vector<RankReport> sound = run_job(job(kSteps));
    ASSERT_EQ(trouble(sound), "");
    for (const RankReport& rank : sound) calls_.push_back(rank.calls);
  }

  /// Whether the call was made.
  bool shut_down_at(const Strike& strike) {
    clear();
    const std::vector<RankReport> ranks = run_job(job(kSteps), strike);
    for (const RankReport& rank : ranks) {
      EXPECT_THAT(rank.problems, IsEmpty());
      if (GetParam().with_store && struck(ranks)) continue;
      // Training goes on without its checkpoints, to its end.
      EXPECT_EQ(rank.error, "");
      EXPECT_TRUE(rank.ended);
    }
    if (!GetParam().with_store) {
      EXPECT_THAT(look_at_checkpoints(path("last"), expected_).whole, ElementsAre(kSteps));
    }
    disk_.mount_again();
    expect_kept(job(kSteps), expected_, ranks);
    expect_next_goes_on(job(kMoreSteps), expected_, ranks);
    return struck(ranks);
  }

  ScratchDirectory scratch_;
  LoopFilesystem disk_{kDiskBytes, GetParam().kind};
  States expected_;
  std::vector<std::uint64_t> calls_;  // of each rank, in a sound run
};

TEST_P(CheckpointShutdown, LosesNoCheckpointAndNoStep) {
  for (const Way& way : kWays) {
    for (int rank = 0; rank < 2; ++rank) {
      const Strike strike{.effect = Strike::Effect::kShutdown,
                          .rank = rank,
                          .filesystem = disk_.path().string(),
                          .shutdown_flags = way.flags};
      const std::uint64_t struck = strike_calls(
          strike, calls_, kSampled, [this](const Strike& s) { return shut_down_at(s); });
      fmt::print("  {}, {}: {} calls of rank {} struck\n", GetParam().name, way.name, struck, rank);
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Filesystems, CheckpointShutdown,
    ::testing::Values(Setting{"Ext4", LoopFilesystem::Kind::kExt4, false},
                      Setting{"Ext4WithStore", LoopFilesystem::Kind::kExt4, true},
                      Setting{"Xfs", LoopFilesystem::Kind::kXfs, false},
                      Setting{"XfsWithStore", LoopFilesystem::Kind::kXfs, true}),
    [](const auto& its) { return its.param.name; });

}  // namespace
}  // namespace ziggurat::testing

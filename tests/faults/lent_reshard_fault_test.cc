// SPDX-License-Identifier: Apache-2.0
// tests/faults/lent_reshard_fault_test.cc: the store of ranks that lend pieces is divided anew in a
// process that is killed at any call of its drives. What is left is the old store or the new one,
// whole, and the next start goes on with the bits of a run that nobody killed. After each call one
// of two starts follows; ZIGGURAT_FAULTS=all makes both.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <set>

#include "tests/core/piece_world.h"
#include "tests/faults/campaign.h"
#include "tests/faults/striker.h"
#include "tiers/store/store_files.h"
#include "tiers/store/store_succession.h"

namespace ziggurat::testing {
namespace {

using Resume = EngineConfig::Resume;
namespace fs = std::filesystem;

PieceWorld small_world(const std::string& directory) {
  PieceWorld world({StateFormat::kFp32, DType::kFloat32}, directory, kFewWholes);
  world.host_budget_bytes = 8 * kMiB;
  return world;
}

/// How far the division was when it was killed.
enum class Came { kToTheOld, kToADecision, kToTheNew };

struct From {
  int ranks;
  int to;
};

class LentReshardFaults : public ::testing::TestWithParam<From> {
 protected:
  PieceWorld world(const std::string& name) const { return small_world(path(name)); }
  std::string path(const std::string& name) const { return scratch_.path() + "/" + name; }
  void copy(const std::string& from, const std::string& to) const {
    fs::remove_all(path(to));
    fs::copy(path(from), path(to), fs::copy_options::recursive);
  }
  Division before() const { return {GetParam().ranks, Cut::kRuns}; }
  Division after() const { return {GetParam().to, Cut::kRuns}; }

  void SetUp() override {
    state_ = world("kept").trained(before(), Resume::kAuto, 2);
    copy("kept", "next");
    next_ = world("next").trained(before(), Resume::kAuto, 1);
  }

  int files(const std::string& name) const {
    int files = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator(path(name)))
      files += is_store_file(entry.path().filename().string()) ? 1 : 0;
    return files;
  }
  Came came() const {
    if (fs::exists(fs::path(path("store")) / StoreSuccession::kFolder / StoreSuccession::kNote))
      return Came::kToADecision;
    return files("store") == after().ranks ? Came::kToTheNew : Came::kToTheOld;
  }

  /// Makes a step after what the kill has left.
  void expect_goes_on(const Division& division, Resume resume) const {
    copy("store", "next");
    EXPECT_EQ(world("next").trained(division, resume, 1), next_)
        << division.ranks << " ranks, resume " << static_cast<int>(resume);
    EXPECT_EQ(files("next"), division.ranks);
    EXPECT_FALSE(fs::exists(StoreSuccession::folder_in(path("next"))));
  }

  ScratchDirectory scratch_;
  WholeState state_;  // of the old store
  WholeState next_;   // a step later
};

TEST_P(LentReshardFaults, LeaveOneOfTheTwoStoresWhole) {
  std::set<Came> found;
  bool ended = false;
  for (std::uint64_t call = 0; !ended && !HasFailure(); ++call) {
    SCOPED_TRACE(fmt::format("killed at call {}", call));
    copy("kept", "store");
    ended = survives([&] {
      Striker striker(call);
      PieceWorld dying = world("store");
      dying.prepare = [&](Runtime& runtime) { striker.take(runtime); };
      expect_none(dying.run(after(), Resume::kReshard, [](const PieceWorld::Rank&) {}));
    });
    const Came its = came();
    found.insert(its);
    EXPECT_EQ(world("store").state(), state_);
    // A sample has one of the two starts after each call.
    const bool both = all_faults_wanted();
    if (both || call % 2 == 0) expect_goes_on(after(), Resume::kReshard);
    if (both || call % 2 == 1)
      expect_goes_on(its == Came::kToTheOld ? before() : after(), Resume::kAuto);
  }
  EXPECT_EQ(found, (std::set{Came::kToTheOld, Came::kToADecision, Came::kToTheNew}));
}

INSTANTIATE_TEST_SUITE_P(Ranks, LentReshardFaults, ::testing::Values(From{2, 1}, From{1, 2}),
                         [](const auto& its) {
                           return fmt::format("{}To{}", its.param.ranks, its.param.to);
                         });

/// A new store replaces one of more ranks, and is killed at any call.
TEST(ReplacedStoreFaults, LeaveOneOfTheTwoStoresForWhoeverComesNext) {
  const ScratchDirectory scratch;
  const std::string kept = scratch.path() + "/kept";
  const std::string store = scratch.path() + "/store";
  const WholeState older = small_world(kept).trained({3, Cut::kRuns}, Resume::kAuto, 3);
  WholeState newer;
  {
    const ScratchDirectory alone;
    newer = small_world(alone.path()).trained({2, Cut::kRuns}, Resume::kAuto, 1);
  }
  std::set<bool> replaced;
  bool ended = false;
  for (std::uint64_t call = 0; !ended && !::testing::Test::HasFailure(); ++call) {
    SCOPED_TRACE(fmt::format("killed at call {}", call));
    fs::remove_all(store);
    fs::copy(kept, store);
    ended = survives([&] {
      Striker striker(call);
      PieceWorld dying = small_world(store);
      dying.prepare = [&](Runtime& runtime) { striker.take(runtime); };
      expect_none(dying.run({2, Cut::kRuns}, Resume::kNever,
                            [](const PieceWorld::Rank& rank) { rank.trainer.step(rank.engine); }));
    });
    const WholeState found = small_world(store).trained({1, Cut::kCopies}, Resume::kReshard, 0);
    EXPECT_TRUE(found == older || found == newer);
    replaced.insert(found == newer);
  }
  EXPECT_EQ(replaced, (std::set{false, true}));
}

}  // namespace
}  // namespace ziggurat::testing

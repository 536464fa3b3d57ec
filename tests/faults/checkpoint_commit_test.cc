// SPDX-License-Identifier: Apache-2.0
// tests/faults/checkpoint_commit_test.cc: a checkpoint of two ranks takes the place of an older
// one, and the power goes at every event: with every subset of the operations that were not synced
// then, one of the two is there whole, nothing is taken for one that is not, and the next save
// removes what is left.
//
// A simulated disk in virtual time. ZIGGURAT_FAULTS=all tries every pair of events where a save was
// killed and another one after it loses the power; a sample of the first is tried otherwise.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <array>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "aio/faulty_engine.h"
#include "aio/simulated_engine.h"
#include "aio/text_file.h"
#include "base/error.h"
#include "collectives/simulated/simulated_communicator.h"
#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/checkpoint_save.h"
#include "tests/faults/campaign.h"

namespace ziggurat::testing {
namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kElements = 600;
constexpr std::size_t kSubsetsMax = 4096;  // of one cut; of more, as many are drawn
const std::string kFolder = "/target";

std::vector<StateTensor> tensors() {
  std::vector<StateTensor> all;
  for (const char* const name : {"first", "second"})
    all.push_back({.name = name,
                   .owner = name,
                   .array = "master",
                   .type = TensorType::kF32,
                   .shape = {kElements}});
  return all;
}
StateContent content(std::uint64_t step) {
  StateContent its;
  its.model = "small";
  its.units = {{.name = "unit", .params = {"first", "second"}}};
  its.tensors = tensors();
  its.step = step;
  its.layout.ranks = kRanks;
  return its;
}
/// Each rank has one of the tensors.
ShardPlan plan_of(int rank) {
  ShardPlan plan = plan_whole_tensors({tensors()[static_cast<std::size_t>(rank)]});
  plan.pieces[0].tensor = static_cast<std::uint32_t>(rank);
  plan.files[0].name = fmt::format("rank-{:05}-of-{:05}-00000.safetensors", rank, kRanks);
  return plan;
}
std::vector<float> values_of(std::uint64_t step, int rank) {
  std::vector<float> values(kElements);
  std::iota(values.begin(), values.end(), static_cast<float>(step * 10'000 + 1'000U * rank));
  return values;
}

class CheckpointCommit : public ::testing::Test {
 protected:
  /// Saves `step` from two ranks, keeping one checkpoint; whether all of them were told that it is
  /// whole.
  bool save(SimulatedDisk& disk, std::uint64_t step,
            const std::function<void(FaultPoint, Communicator&)>& before_calls_of_rank_0 = {}) {
    const auto ranks = SimulatedCommunicator::create(
        reactor_,
        {.ranks = kRanks, .ranks_per_node = kRanks, .within_node = {1e9, Nanoseconds(1)}});
    std::vector<std::unique_ptr<FaultyEngine>> engines;
    int told = 0;
    const auto all = [&]() -> Task<> {
      WorkGroup group(reactor_);
      for (int rank = 0; rank < kRanks; ++rank) {
        SimulatedEngineOptions options;
        options.seed = static_cast<std::uint64_t>(rank) + 1;
        engines.push_back(std::make_unique<FaultyEngine>(
            reactor_, std::make_unique<SimulatedEngine>(reactor_, disk, options)));
        if (rank == 0 && before_calls_of_rank_0) {
          engines.back()->set_gate([&](FaultPoint point) {
            before_calls_of_rank_0(point, *ranks[0]);
            return 0;
          });
        }
        group.spawn(save_part(*engines.back(), *ranks[static_cast<std::size_t>(rank)], step, told));
      }
      co_await group.wait_idle();
    };
    reactor_.block_on(all());
    return told == kRanks;
  }

  Task<> save_part(IoEngine& io, Communicator& ranks, std::uint64_t step, int& told) {
    try {
      Task<std::unique_ptr<CheckpointSave>> beginning = CheckpointSave::begin(
          {.reactor = reactor_, .workers = workers_, .io = io, .ranks = ranks},
          {.folder = kFolder,
           .retention = {.keep_last = 1},
           .content = content(step),
           .plan = plan_of_rank_(ranks.rank())});
      const std::unique_ptr<CheckpointSave> checkpoint = co_await std::move(beginning);
      const std::vector<float> values = values_of(step, ranks.rank());
      const TensorRun run{.first = 0, .count = values.size(), .at = 0};
      std::exception_ptr failure;
      try {
        co_await checkpoint->sink().write(static_cast<std::size_t>(ranks.rank()),
                                          std::span(&run, 1), std::as_bytes(std::span(values)));
      } catch (...) {
        failure = std::current_exception();
      }
      co_await checkpoint->commit(failure);
      ++told;
    } catch (const std::exception& error) {
      said_[static_cast<std::size_t>(ranks.rank())] = error.what();
    }
  }

  /// The steps whose checkpoints are taken for whole; what is wrong with them goes to `fault`.
  std::vector<std::uint64_t> found(SimulatedDisk& disk, std::string& fault) {
    SimulatedEngine io(reactor_, disk);
    std::vector<std::uint64_t> steps;
    for (const CheckpointEntry& its : whole_checkpoints(io, kFolder)) steps.push_back(its.step);
    for (const std::uint64_t step : steps) {
      try {
        reactor_.block_on(prove(io, step));
      } catch (const Error& error) {
        fault = fmt::format("step {} is taken for whole: {}", step, error.what());
      }
    }
    const std::string latest = kFolder + "/latest";
    if (!io.exists(latest)) return steps;
    const std::string text = reactor_.block_on(read_text({reactor_, io}, latest, 100));
    const auto is_it = [&](std::uint64_t step) { return checkpoint_name(step) + "\n" == text; };
    if (std::ranges::none_of(steps, is_it)) fault = fmt::format("latest says '{}'", text);
    return steps;
  }

  Task<> prove(IoEngine& io, std::uint64_t step) {
    Task<std::unique_ptr<CheckpointReader>> opening =
        CheckpointReader::open({reactor_, workers_, io}, kFolder + "/" + checkpoint_name(step));
    const std::unique_ptr<CheckpointReader> reader = co_await std::move(opening);
    for (std::size_t file = 0; file < reader->manifest().files.size(); ++file)
      co_await reader->prove_header(file);
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<float> values(kElements);
      const TensorRun run{.first = 0, .count = values.size(), .at = 0};
      co_await reader->read(static_cast<std::size_t>(rank), std::span(&run, 1),
                            std::as_writable_bytes(std::span(values)));
      if (values != values_of(step, rank)) throw Error(ErrorCode::kDataLoss, "other values");
    }
  }

  /// A disk on which step 1 was saved and everything is durable.
  SimulatedDisk with_first() {
    SimulatedDisk disk;
    EXPECT_TRUE(save(disk, 1));
    EXPECT_EQ(disk.unsynced(), 0U);
    return disk;
  }

  /// Every subset of what was not synced on `cut`, where the power went. `told`: whoever saved
  /// `newest` was told that it is whole.
  void expect_one_whole_of_every_subset(const SimulatedDisk& cut, std::uint64_t newest, bool told) {
    ASSERT_FALSE(cut.unsynced_overlap()) << "their order would matter";
    const std::size_t count = cut.unsynced();
    most_unsynced_ = std::max(most_unsynced_, count);
    const std::uint64_t subsets = std::uint64_t{1} << count;
    const bool drawn = subsets > subsets_max_;
    if (drawn) ++cuts_drawn_;
    std::mt19937_64 random(count);
    for (std::uint64_t i = 0; i < std::min(subsets, subsets_max_); ++i) {
      const std::uint64_t subset = drawn ? random() : i;
      std::vector<bool> kept(count);
      for (std::size_t op = 0; op < count; ++op) kept[op] = (subset >> op & 1) != 0;
      SimulatedDisk disk = cut;
      disk.crash_keeping(kept);
      ++outcomes_;
      std::string fault;
      const std::vector<std::uint64_t> steps = found(disk, fault);
      ASSERT_EQ(fault, "") << "subset " << subset << " of " << count;
      ASSERT_FALSE(steps.empty()) << "subset " << subset << " of " << count;
      if (told) {
        ASSERT_EQ(steps.back(), newest);
      }
      ++(steps.back() == newest ? new_stands_ : old_stands_);
      if (i % 7 == 0) expect_next_save_cleans(disk, newest + 1);
      if (HasFatalFailure()) return;
    }
  }

  void expect_next_save_cleans(SimulatedDisk& disk, std::uint64_t step) {
    ASSERT_TRUE(save(disk, step));
    SimulatedEngine io(reactor_, disk);
    EXPECT_THAT(io.names_in(kFolder),
                ::testing::ElementsAre(".lock", "latest", checkpoint_name(step)));
    std::string fault;
    EXPECT_THAT(found(disk, fault), ::testing::ElementsAre(step));
    ASSERT_EQ(fault, "");
  }

  Reactor reactor_{Clock::Kind::kVirtual};
  WorkerPool workers_{{.threads = 1, .cpus = {}}};
  std::function<ShardPlan(int rank)> plan_of_rank_ = plan_of;
  std::array<std::string, kRanks> said_;  ///< why a save failed there
  std::uint64_t outcomes_ = 0, old_stands_ = 0, new_stands_ = 0;
  std::size_t most_unsynced_ = 0;
  std::uint64_t subsets_max_ = kSubsetsMax;
  std::uint64_t cuts_drawn_ = 0;  ///< cuts with too many subsets to try all
};

TEST_F(CheckpointCommit, LeavesOneOfTheTwoWholeWheneverThePowerGoes) {
  const SimulatedDisk first = with_first();
  std::uint64_t events = 0;
  for (bool ended = false; !ended; ++events) {
    SCOPED_TRACE(fmt::format("power cut after event {}", events + 1));
    SimulatedDisk disk = first;
    disk.cut_power_after(events + 1);
    const bool told = save(disk, 2);
    ended = !disk.power_is_off();
    expect_one_whole_of_every_subset(disk, 2, told);
    if (HasFatalFailure()) return;
  }
  fmt::print("  {} events, {} outcomes, at most {} operations unsynced; old {} new {}\n", events,
             outcomes_, most_unsynced_, old_stands_, new_stands_);
  EXPECT_EQ(cuts_drawn_, 0U);
  EXPECT_GT(old_stands_, 100U);
  EXPECT_GT(new_stands_, 20U);
}

/// The ranks are parted while rank 0 gives the manifest its name, and the others do not hear of it:
/// the checkpoint may be there for good, so they leave their files.
TEST_F(CheckpointCommit, KeepsWhatTheManifestNamesWhereNobodyHearsOfIt) {
  SimulatedDisk disk = with_first();
  EXPECT_FALSE(save(disk, 2, [](FaultPoint point, Communicator& ranks) {
    if (point == FaultPoint::kRename) ranks.abort("rank 0 is gone");
  }));
  std::string fault;
  EXPECT_THAT(found(disk, fault), ::testing::ElementsAre(2));
  EXPECT_EQ(fault, "");
}

/// The text of a rank's files is the last that it makes alone: no text has a name that is not
/// UTF-8.
TEST_F(CheckpointCommit, FailsOnAllRanksWhereOneCannotSayWhatItWrote) {
  for (const int failing : {0, 1}) {
    SCOPED_TRACE(failing);
    SimulatedDisk disk = with_first();
    plan_of_rank_ = [&](int rank) {
      ShardPlan plan = plan_of(rank);
      if (rank == failing) plan.files[0].name = "rank-\xff.safetensors";
      return plan;
    };
    EXPECT_FALSE(save(disk, 2));
    plan_of_rank_ = plan_of;
    const auto of = [&](int rank) { return said_[static_cast<std::size_t>(rank)]; };
    EXPECT_THAT(of(failing), ::testing::HasSubstr("UTF-8"));
    EXPECT_THAT(of(1 - failing),
                ::testing::HasSubstr(fmt::format("rank {} could not save its part", failing)));
    std::string fault;
    EXPECT_THAT(found(disk, fault), ::testing::ElementsAre(1));
    EXPECT_EQ(fault, "");
  }
}

/// A process that was killed leaves what can be read and is not durable. The next one saves the
/// same step again, or another one, and the power goes.
TEST_F(CheckpointCommit, LeavesOneWholeWhenThePowerGoesAfterAKill) {
  const SimulatedDisk first = with_first();
  if (!all_faults_wanted()) subsets_max_ = 32;
  std::uint64_t pairs = 0;
  const std::uint64_t stride = all_faults_wanted() ? 1 : 9;
  std::uint64_t kill = all_faults_wanted() ? 1 : 1 + std::random_device{}() % stride;
  for (bool ended = false; !ended; kill += stride) {
    SimulatedDisk killed = first;
    killed.cut_power_after(kill);
    save(killed, 2);
    ended = !killed.power_is_off();
    killed.kill(kill);
    std::string fault;
    const bool is_there = found(killed, fault).back() == 2;
    for (const std::uint64_t step : {2, 3}) {
      if (step == 2 && is_there) continue;  // it is not written over
      bool second_ended = false;
      for (std::uint64_t event = 1; !second_ended; ++event, ++pairs) {
        SCOPED_TRACE(fmt::format("killed after event {}, power cut after event {} of step {}", kill,
                                 event, step));
        SimulatedDisk disk = killed;
        disk.cut_power_after(event);
        const bool told_again = save(disk, step);
        second_ended = !disk.power_is_off();
        expect_one_whole_of_every_subset(disk, step, told_again);
        if (HasFatalFailure()) return;
      }
    }
    ASSERT_EQ(fault, "");
  }
  fmt::print(
      "  {} pairs of events, {} outcomes, at most {} operations unsynced; {} cuts drawn from\n",
      pairs, outcomes_, most_unsynced_, cuts_drawn_);
}

}  // namespace
}  // namespace ziggurat::testing

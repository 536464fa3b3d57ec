// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_placement_test.cc: an engine that chooses where its state is says why, keeps to
// its choice, and trains with the bits of every other placement, among ranks too.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "base/memory_exhausted.h"
#include "core/plan/lent_placement.h"
#include "tests/core/lent_world.h"
#include "tiers/device/host_device.h"

namespace ziggurat::testing {
namespace lent_placement_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Too little for the state of the pieces of any rank, and enough for a few records.
constexpr std::uint64_t kLittle = 4 * kMiB;

EngineConfig automatic(const std::string& directory, std::uint64_t host_budget_bytes) {
  EngineConfig config = config_of(Where::kHost, directory);
  config.placement = parse_placement("auto");
  config.host_budget_bytes = host_budget_bytes;
  return config;
}

std::vector<UnitId> all_units() {
  std::vector<UnitId> all;
  for (UnitId u = 0; u < kCounts.size(); ++u) all.push_back(u);
  return all;
}

class LentAuto : public ::testing::Test {
 protected:
  std::unique_ptr<LentEngine> open(const EngineConfig& config) {
    return LentEngine::open(trainer_.own_model(), config, *runtime_, trainer_.lent());
  }
  void train(LentEngine& engine) {
    for (int i = 0; i < 2; ++i) trainer_.step(engine);
    engine.wait_all_updated();
    EXPECT_TRUE(trainer_.same());
  }

  const ScratchDirectory directory_;
  std::unique_ptr<Runtime> runtime_ = Runtime::create({.threads = 2, .trace_path = ""});
  LentTrainer trainer_ = trainer_of(all_units());
};

TEST_F(LentAuto, KeepsASmallStateInHostMemoryAndSaysSo) {
  EngineConfig config = automatic(directory_.path(), 0);
  config.store.clear();
  const auto engine = open(config);
  EXPECT_THAT(engine->description(),
              Contains(AllOf(StartsWith("placement auto: the engine chose "
                                        "params=host,grads=host,optimizer=host: the state takes "),
                             HasSubstr(" of free memory"))));
  train(*engine);
}

TEST_F(LentAuto, CountsWhatTheEngineThenTakes) {
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::kBf16Moments,
                                   StateFormat::k8Bit, StateFormat::kSplit, StateFormat::kBf16}) {
    const ModelSpec model = lent_model(kCounts, DType::kBFloat16);
    EngineConfig config = automatic(directory_.path(), 0);
    config.store.clear();
    config.optimizer.state.format = format;
    LentTrainer trainer(model, config.optimizer.state);
    const auto engine = LentEngine::open(model, config, *runtime_, trainer.lent());
    const LentPlacementChoice choice = choose_lent_placement(
        {.model = model, .state = config.optimizer.state, .free_bytes = 64 * kGiB});
    // A lease of a large record may take a page more.
    const std::uint64_t used_bytes = engine->host_account().used_bytes();
    EXPECT_GE(used_bytes, choice.state_bytes) << to_string(format);
    EXPECT_LE(used_bytes, choice.state_bytes + choice.state_bytes / 32) << to_string(format);
  }
}

TEST_F(LentAuto, PutsAStateThatDoesNotFitIntoTheStoreAndKeepsToItsBudget) {
  const auto engine = open(automatic(directory_.path(), kLittle));
  EXPECT_THAT(engine->description(),
              Contains(AllOf(HasSubstr("chose params=host,grads=host,optimizer=nvme: "),
                             HasSubstr("`host_memory` 4.0 MiB is too small for the state"))));
  EXPECT_THAT(engine->description(), Contains(HasSubstr("every finished step becomes durable")));
  train(*engine);
  EXPECT_LE(engine->host_account().peak_bytes(), kLittle);
}

TEST_F(LentAuto, IsRefusedWithoutAStoreForAStateThatDoesNotFit) {
  EngineConfig config = automatic(directory_.path(), kLittle);
  config.store.clear();
  EXPECT_THROW(open(config), MemoryExhausted);
}

// The first has no store yet. From then on the state is on NVMe, with any memory.
TEST_F(LentAuto, LeavesTheStateOfAStoreOnNvme) {
  constexpr std::array kBudgets{32 * kMiB, kLittle, 32 * kMiB};
  for (std::size_t i = 0; i < kBudgets.size(); ++i) {
    SCOPED_TRACE(i);
    const auto engine = open(automatic(directory_.path(), kBudgets[i]));
    const char* const tier = i == 0 ? "optimizer=host: " : "optimizer=nvme: ";
    EXPECT_THAT(engine->description(), Contains(HasSubstr(tier)));
    ASSERT_EQ(engine->generation(), 2 * i);
    EXPECT_TRUE(trainer_.same());
    train(*engine);
    engine->make_durable();
    trainer_.forget();
  }
}

TEST_F(LentAuto, KeepsStreamedParametersInHostMemoryOrOnNvme) {
  ModelSpec model = lent_model({300'000, 2'000'000}, DType::kBFloat16);
  for (std::uint32_t p = 0; p < 2; ++p) model.units[p].params[0].streamed = p;
  model.units[1].params[0].frozen = true;
  const auto described = [&](std::uint64_t budget_bytes) {
    const ScratchDirectory directory;
    const auto device = HostDevice::create(runtime_->reactor, 6 * kMiB);
    const std::vector<TypedSpan<std::byte>> none(2);
    return LentEngine::open(model, automatic(directory.path(), budget_bytes), *runtime_, none,
                            device.get())
        ->description();
  };
  EXPECT_THAT(described(32 * kMiB), Contains(HasSubstr("params=host,grads=host,optimizer=host")));
  EXPECT_THAT(described(7 * kMiB), Contains(HasSubstr("params=host,grads=host,optimizer=nvme")));
}

/// Two ranks, each with a budget of its own.
std::vector<std::exception_ptr> run_two(const std::array<EngineConfig, 2>& configs,
                                        const std::function<void(World::Rank)>& body) {
  std::vector<LentTrainer> trainers;
  for (const std::vector<UnitId>& own : kTwo) trainers.push_back(trainer_of(own));
  const auto runtimes = connected_runtimes(2, 2, std::chrono::minutes(1));
  std::barrier<> both_done(2);
  return run_ranks(2, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    auto engine =
        LentEngine::open(trainers[r].own_model(), configs[r], *runtimes[r], trainers[r].lent());
    body({.number = rank, .trainer = trainers[r], .engine = *engine});
    both_done.arrive_and_wait();
  });
}

TEST(LentAutoRanks, KeepTheirRecordsOnNvmeIfOneHasNoRoom) {
  const ScratchDirectory zero, one;
  // Rank 0 has most of the elements.
  expect_none(run_two(
      {automatic(zero.path(), 2 * kMiB), automatic(one.path(), 32 * kMiB)}, [](World::Rank rank) {
        EXPECT_THAT(rank.engine.description(), Contains(HasSubstr("optimizer=nvme: ")));
        EXPECT_EQ(rank.number == 1,
                  ::testing::Value(rank.engine.description(),
                                   Contains(HasSubstr("another rank has no room"))));
        rank.trainer.step(rank.engine);
        rank.engine.wait_all_updated();
        EXPECT_TRUE(rank.trainer.same());
      }));
}

TEST(LentAutoRanks, AllHearOfARankThatHasNoRoomAndNoStore) {
  std::array<EngineConfig, 2> configs{automatic("", 32 * kMiB), automatic("", 64 * kKiB)};
  for (EngineConfig& config : configs) config.store.clear();
  const auto errors = run_two(configs, [](World::Rank) { FAIL(); });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(thrown_by([&] { std::rethrow_exception(error); }).what(),
                HasSubstr("`host_memory` 64.0 KiB is too small"));
  }
}

TEST(LentAutoRanks, AllChooseOrNoneDoes) {
  const ScratchDirectory zero, one;
  std::array<EngineConfig, 2> configs{automatic(zero.path(), 32 * kMiB),
                                      automatic(one.path(), 32 * kMiB)};
  configs[1].placement = parse_placement("optimizer=nvme");
  for (const std::exception_ptr& error : run_two(configs, [](World::Rank) { FAIL(); })) {
    EXPECT_THAT(thrown_by([&] { std::rethrow_exception(error); }).what(),
                HasSubstr("differ in `placement`"));
  }
}

}  // namespace lent_placement_test
}  // namespace ziggurat::testing

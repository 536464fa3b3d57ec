// SPDX-License-Identifier: Apache-2.0
// tests/faults/first_step_test.cc: records on NVMe are made in the first step. A process that is
// killed at any call of its drives until the second step is durable leaves no store, or one that
// goes on with the bits of a run that nobody killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "tests/core/lent_kinds.h"
#include "tests/faults/striker.h"

namespace ziggurat::testing {
namespace first_step_test {

constexpr std::uint64_t kSteps = 2;

/// Small ones that share a record, and one of several chunks.
const std::vector<std::int64_t> kCounts{1, 105, 16'385, 200'000};

/// A format, and how many drives the store lies on.
class FirstStep : public ::testing::TestWithParam<std::tuple<LentKind, std::size_t>> {
 protected:
  ModelSpec model() const { return lent_model(kCounts, kind().dtype); }
  const LentKind& kind() const { return std::get<0>(GetParam()); }
  EngineConfig config() const {
    EngineConfig config = config_of(kind(), Where::kNvme, directory_);
    config.store.clear();
    for (std::size_t stripe = 0; stripe < std::get<1>(GetParam()); ++stripe) {
      const std::string path = directory_.path() + "/drive" + std::to_string(stripe);
      std::filesystem::create_directories(path);
      config.store.push_back({path});
    }
    config.host_budget_bytes = budget_;
    config.counts_steps = true;
    return config;
  }
  LentTrainer trainer() const { return LentTrainer(model(), {.format = kind().format}); }

  /// Trains in a process that is killed at its `call`-th call. Returns whether it got to its end.
  bool train_until(std::uint64_t call) const {
    return survives([&] {
      Striker striker(call);
      LentTrainer its = trainer();
      const auto runtime = runtime_of(2);
      striker.take(*runtime);
      const auto engine = LentEngine::open(model(), config(), *runtime, its.lent());
      while (engine->generation() < kSteps) its.step(*engine, {.left_out = {1}});
      engine->make_durable();
    });
  }

  ScratchDirectory directory_;
  std::uint64_t budget_ = 64 * kMiB;
};

INSTANTIATE_TEST_SUITE_P(
    Formats, FirstStep,
    ::testing::Values(std::tuple(LentKind{StateFormat::kFp32, DType::kBFloat16}, 1),
                      std::tuple(LentKind{StateFormat::k8Bit, DType::kFloat32}, 2)),
    [](const auto& one) {
      return name_of(std::get<0>(one.param)) + "_on_" + std::to_string(std::get<1>(one.param));
    });

TEST_P(FirstStep, IsThereAsAWholeOrNotAtAll) {
  if (std::get<1>(GetParam()) == 2) {  // no record stays in memory
    budget_ = smallest_budget(model(), config());
  }
  std::set<std::uint64_t> found;
  bool ended = false;
  for (std::uint64_t call = 0; !ended; ++call) {
    std::filesystem::remove_all(directory_.path());
    std::filesystem::create_directories(directory_.path());
    ended = train_until(call);
    // What the run that nobody killed has, step by step.
    LentTrainer its = trainer();
    const auto runtime = runtime_of(2);
    std::uint64_t generation = 0;
    {
      LentTrainer look = trainer();  // how far it came is known only when it is open
      look.forget();
      const auto engine = LentEngine::open(model(), config(), *runtime, look.lent());
      generation = engine->generation();
      found.insert(engine->resumed() ? generation : 0);
      EXPECT_EQ(engine->resumed(), generation > 0) << "killed at call " << call;
    }
    ASSERT_LE(generation, kSteps);
    for (std::uint64_t s = 1; s <= generation; ++s) its.plain_step(s, {.left_out = {1}});
    if (generation > 0) its.forget();
    const auto engine = LentEngine::open(model(), config(), *runtime, its.lent());
    ASSERT_TRUE(its.same()) << "killed at call " << call << ", found step " << generation;
    its.step(*engine, {.left_out = {0}});
    engine->make_durable();
    ASSERT_TRUE(its.same()) << "killed at call " << call << ", after step " << generation + 1;
  }
  EXPECT_EQ(found, (std::set<std::uint64_t>{0, 1, 2}));
}

}  // namespace first_step_test
}  // namespace ziggurat::testing

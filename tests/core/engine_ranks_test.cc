// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_ranks_test.cc: engines of several ranks against the same training in plain
// arrays: every stage, placement, bucket size and type of reduction gives one set of bits; a run
// goes on where all ranks stand; ranks that part ways are told so, and none waits for ever.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <utility>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "base/error.h"
#include "core/schedule/gradients/gradient_norm.h"
#include "tests/core/ranks_harness.h"
#include "tests/support/hard_floats.h"

namespace ziggurat::testing {
namespace engine_ranks_test {

using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;
constexpr auto kGuess = EngineConfig::Speculation::kAlways;
constexpr const char* kDemo = "params=host,grads=host,optimizer=nvme";

struct World {
  const char* name;
  int ranks = 2;
  int stage = 2;
  const char* placement = kDemo;
  float clip_norm = 1.0F;
  std::size_t threads = 1;
  std::uint64_t bucket_elements = std::uint64_t{4} << 20;
  DType dtype = DType::kBFloat16;
  std::optional<DType> reduce_dtype{};
  std::uint64_t device_bytes = 8 * kMiB;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kAuto;
  int shard_group = 0;
  int node_ranks = 0;
  bool mixed = false;  ///< units have types of their own
  std::uint64_t prefetch_elements = kElementsMax;
};

void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

class EngineRanks : public ::testing::TestWithParam<World> {
 protected:
  EngineConfig config() const {
    const World& world = GetParam();
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(world.placement);
    config.clip_norm = world.clip_norm;
    config.strategy.zero_stage = world.stage;
    config.reduce_bucket_elements = world.bucket_elements;
    config.reduce_dtype = world.reduce_dtype;
    config.speculation = world.speculation;
    config.strategy.shard_group = world.shard_group;
    if (world.shard_group > 0) config.strategy.name = StrategyName::kHybrid;
    config.strategy.hpz = world.node_ranks;
    config.prefetch_elements_max = world.prefetch_elements;
    return config;
  }
  ModelSpec model() const {
    ModelSpec model = GetParam().mixed ? mixed_model() : small_model();
    model.dtype = GetParam().dtype;
    return model;
  }
  PlainTraining plain() const {
    PlainTraining plain(model(), GetParam().clip_norm);
    plain.world_size = GetParam().ranks;
    plain.reduce_dtype = GetParam().reduce_dtype;
    plain.shard_group = GetParam().shard_group;
    return plain;
  }
  const ScratchDirectory directory_;
};

TEST_P(EngineRanks, GiveTheBitsOfPlainArrays) {
  constexpr std::uint64_t kSteps = 4;
  const World& world = GetParam();
  const auto runtimes = connected_runtimes(world.ranks, world.threads);
  PlainTraining expected = plain();
  std::vector<double> norms;
  for (std::uint64_t step = 0; step < kSteps; ++step)
    norms.push_back(expected.step(step, kLearningRate));
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model(), config(), world.device_bytes);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const StepResult result =
          train_step(*rig.engine, model(), step, kLearningRate, {}, 1.0F, rank);
      EXPECT_EQ(result.grad_norm, norms[step]) << "rank " << rank << ", step " << step;
    }
    EXPECT_TRUE(same_params(*rig.engine, expected, model())) << "rank " << rank;
    rig.engine->make_durable();
    EXPECT_EQ(rig.engine->durable_generation(), kSteps);
  });
  expect_none(errors);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineRanks,
    ::testing::Values(
        World{.name = "Stage0", .stage = 0}, World{.name = "Stage1", .stage = 1},
        World{.name = "Stage2", .stage = 2}, World{.name = "Stage3", .stage = 3},
        World{.name = "Stage0AllNvme", .stage = 0, .placement = "all=nvme"},
        World{.name = "Stage1AllNvme", .stage = 1, .placement = "all=nvme"},
        World{.name = "Stage2AllNvme", .stage = 2, .placement = "all=nvme"},
        World{.name = "Stage3AllNvme", .stage = 3, .placement = "all=nvme"},
        World{.name = "Stage0AllDevice", .stage = 0, .placement = "all=device"},
        World{.name = "Stage2AllDevice", .stage = 2, .placement = "all=device"},
        World{.name = "Stage3AllDevice", .stage = 3, .placement = "all=device"},
        World{.name = "Stage2AllHost", .stage = 2, .placement = "all=host", .threads = 2},
        World{.name = "Stage3AllHost", .stage = 3, .placement = "all=host"},
        World{.name = "Stage0Unclipped", .stage = 0, .clip_norm = 0},
        World{.name = "Stage2Unclipped", .stage = 2, .clip_norm = 0},
        World{.name = "Stage3Unclipped", .stage = 3, .clip_norm = 0},
        World{.name = "Stage0GuessesRight", .stage = 0, .clip_norm = 1e6F, .speculation = kGuess},
        World{.name = "Stage2GuessesRight", .stage = 2, .clip_norm = 1e6F, .speculation = kGuess},
        World{.name = "Stage2GuessesWrong", .stage = 2, .speculation = kGuess},
        World{.name = "Stage3GuessesWrong", .stage = 3, .speculation = kGuess},
        World{.name = "Stage3NvmeGuessesWrong",
              .stage = 3,
              .placement = "all=nvme",
              .speculation = kGuess},
        World{.name = "TwoGroupsOfTwoStage3", .ranks = 4, .stage = 3, .shard_group = 2},
        World{.name = "TwoGroupsOfTwoStage2OneTileBuckets",
              .ranks = 4,
              .stage = 2,
              .bucket_elements = 1,
              .shard_group = 2},
        World{.name = "TwoGroupsOfTwoNvmeGuessesWrong",
              .ranks = 4,
              .stage = 3,
              .placement = "all=nvme",
              .speculation = kGuess,
              .shard_group = 2},
        World{.name = "OneGroupOfAll", .ranks = 2, .stage = 3, .shard_group = 2},
        World{.name = "TwoNodesOfTwo", .ranks = 4, .stage = 3, .node_ranks = 2},
        World{.name = "TwoNodesOfTwoGuessWrong",
              .ranks = 4,
              .stage = 3,
              .placement = "all=nvme",
              .device_bytes = 5 * kMiB / 2,
              .speculation = kGuess,
              .node_ranks = 2},
        World{.name = "ThreeRanksStage0", .ranks = 3, .stage = 0},
        World{.name = "ThreeRanksStage2", .ranks = 3, .stage = 2, .bucket_elements = 1},
        World{.name = "FourRanksStage3", .ranks = 4, .stage = 3, .bucket_elements = 100'000},
        World{.name = "Stage0OneTileBuckets", .stage = 0, .threads = 2, .bucket_elements = 1},
        World{.name = "Stage3OneTileBuckets", .stage = 3, .threads = 2, .bucket_elements = 1},
        World{
            .name = "Stage3NothingAhead", .stage = 3, .bucket_elements = 1, .prefetch_elements = 1},
        World{.name = "Stage0Fp32Sums", .stage = 0, .reduce_dtype = DType::kFloat32},
        World{.name = "Stage2Fp32Sums", .stage = 2, .reduce_dtype = DType::kFloat32},
        World{
            .name = "Stage2Fp32InBf16", .dtype = DType::kFloat32, .reduce_dtype = DType::kBFloat16},
        World{.name = "Stage0Fp32InBf16",
              .stage = 0,
              .dtype = DType::kFloat32,
              .reduce_dtype = DType::kBFloat16},
        World{.name = "Stage3Fp16", .stage = 3, .dtype = DType::kFloat16},
        World{.name = "MixedStage0", .stage = 0, .mixed = true},
        World{.name = "MixedStage1", .stage = 1, .placement = "all=device", .mixed = true},
        World{.name = "MixedStage2",
              .stage = 2,
              .placement = "all=nvme",
              .bucket_elements = 1,
              .mixed = true},
        World{.name = "MixedStage3", .stage = 3, .threads = 2, .mixed = true},
        World{.name = "MixedStage3Fp32Sums",
              .stage = 3,
              .placement = "all=nvme",
              .reduce_dtype = DType::kFloat32,
              .speculation = kGuess,
              .mixed = true},
        World{.name = "MixedTwoNodesOfTwo", .ranks = 4, .stage = 3, .node_ranks = 2, .mixed = true},
        World{.name = "Stage3LittleDeviceMemory", .stage = 3, .device_bytes = 5 * kMiB / 2}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(EngineRanksSimd, GiveTheSameBitsOnEveryTarget) {
  constexpr std::uint64_t kSteps = 2;
  const ModelSpec model = small_model();
  force_simd_target("scalar");  // the specification
  PlainTraining expected(model, 1.0F);
  expected.world_size = 2;
  for (std::uint64_t step = 0; step < kSteps; ++step) expected.step(step, kLearningRate);
  int stage = 0;
  for_each_target([&] {
    const ScratchDirectory directory;
    EngineConfig config = small_config(directory.path());
    config.strategy.zero_stage = stage++ % 4;
    const auto runtimes = connected_runtimes(2, 1);
    const auto errors = run_ranks(2, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
      for (std::uint64_t step = 0; step < kSteps; ++step)
        train_step(*rig.engine, model, step, kLearningRate, {}, 1.0F, rank);
      EXPECT_TRUE(same_params(*rig.engine, expected, model)) << "rank " << rank;
      rig.engine->make_durable();
    });
    expect_none(errors);
  });
}

class EngineRanksOverflow : public EngineRanks {};
INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineRanksOverflow,
    ::testing::Values(World{.name = "Stage0", .stage = 0}, World{.name = "Stage2", .stage = 2},
                      World{.name = "Stage2Guesses", .stage = 2, .speculation = kGuess},
                      World{.name = "Stage3Unclipped", .stage = 3, .clip_norm = 0}),
    [](const auto& one) { return std::string(one.param.name); });

// What overflows on one rank overflows in the sum, so all skip the step.
TEST_P(EngineRanksOverflow, SkipAStepThatOverflowedOnOneOfThem) {
  const World& world = GetParam();
  const auto runtimes = connected_runtimes(world.ranks, world.threads);
  PlainTraining expected = plain();
  expected.loss_scale = 16;
  for (const std::uint64_t step : {0U, 2U}) expected.step(step, kLearningRate);
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    const ModelSpec spec = model();
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], spec, config(), world.device_bytes);
    for (std::uint64_t step = 0; step < 3; ++step) {
      const StepOptions options{.learning_rate = kLearningRate, .loss_scale = 16.0F, .blob = {}};
      rig.engine->prepare_step(options);
      for (auto u = static_cast<UnitId>(spec.units.size()); u-- > 0;) {
        const auto params = HostDevice::view(rig.engine->acquire(u));
        const auto gradient = HostDevice::view(rig.engine->gradient(u));
        for (std::size_t i = 0; i < params.count(); ++i)
          gradient[i] += 16 * gradient_of(value_at(params, i), u, i, step, rank);
        if (step == 1 && rank == 1 && u == 2) gradient[7] = std::numeric_limits<float>::infinity();
        rig.engine->release(u);
        rig.engine->finish_gradient(u);
      }
      EXPECT_EQ(rig.engine->step(options).skipped, step == 1) << "rank " << rank;
    }
    EXPECT_TRUE(same_params(*rig.engine, expected, spec)) << "rank " << rank;
    rig.engine->make_durable();
  });
  expect_none(errors);
}

class EngineRanksFrozen : public EngineRanks {};
INSTANTIATE_TEST_SUITE_P(Stages, EngineRanksFrozen,
                         ::testing::Values(World{.name = "Stage0", .stage = 0},
                                           World{.name = "Stage2", .stage = 2},
                                           World{.name = "Stage3", .stage = 3}),
                         [](const auto& one) { return std::string(one.param.name); });

// The trainer has no gradient for unit 0, and no rank sends any, nor parameters that nobody
// changes.
TEST_P(EngineRanksFrozen, LeaveAUnitAsItIsAndSendNoGradientOfIt) {
  constexpr std::uint64_t kSteps = 3;
  const World& world = GetParam();
  const auto sent = [&](bool freeze) {
    EngineConfig settings = config();
    settings.placement = parse_placement("all=host");
    settings.resume = EngineConfig::Resume::kNever;
    if (freeze) settings.param_groups = {{.params = "unit0.*", .frozen = true}};
    ModelSpec grouped = model();
    assign_groups(grouped, settings.param_groups);
    PlainTraining expected(grouped, world.clip_norm);
    expected.world_size = world.ranks;
    expected.make_scalars = [freeze](const OptimizerStep::Settings& its) {
      OptimizerStep::Settings none = its;
      none.learning_rate = none.weight_decay = 0;
      StepScalars steps{OptimizerStep::make(its)};
      if (freeze) steps.push_back(OptimizerStep::make(none));
      return steps;
    };
    for (std::uint64_t step = 0; step < kSteps; ++step) expected.step(step, kLearningRate);
    const auto runtimes = connected_runtimes(world.ranks, world.threads);
    const auto errors = run_ranks(world.ranks, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model(), settings, world.device_bytes);
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        pass_step(*rig.engine, model(), step, kLearningRate, 1.0F, freeze ? 1 : 0, rank);
        rig.engine->step({.learning_rate = kLearningRate, .blob = {}});
      }
      EXPECT_TRUE(same_params(*rig.engine, expected, model())) << "rank " << rank;
      rig.engine->make_durable();
    });
    expect_none(errors);
    return runtimes[0]->ranks->traffic().same_host.payload_bytes;
  };
  const std::uint64_t padded = slice_elements(model().units[0].count(), world.ranks) *
                               static_cast<std::uint64_t>(world.ranks);
  const std::uint64_t reduced = padded * size_bytes(world.dtype) / 2;  // (n - 1) / n of it
  // Stage 0 gathers the sums, too, stage 2 the new parameters.
  EXPECT_EQ(sent(false) - sent(true), kSteps * reduced * (world.stage == 3 ? 1 : 2));
}

// A weight of three tiles and a part of one: of some slices a chunk is constant, and of others it
// is not.
TEST_P(EngineRanksFrozen, TrainWhatIsNotFrozenOfAUnitAndGoOn) {
  const World& world = GetParam();
  EngineConfig settings = config();
  settings.param_groups = {{.params = "unit4.weight", .frozen = true}};
  ModelSpec grouped = model();
  assign_groups(grouped, settings.param_groups);
  PlainTraining expected(grouped, world.clip_norm);
  expected.world_size = world.ranks;
  expected.make_scalars = [](const OptimizerStep::Settings& its) {
    OptimizerStep::Settings none = its;
    none.learning_rate = none.weight_decay = 0;
    return StepScalars{OptimizerStep::make(its), OptimizerStep::make(none)};
  };
  for (std::uint64_t first = 0; first < 4; first += 2) {
    for (std::uint64_t step = first; step < first + 2; ++step) expected.step(step, kLearningRate);
    const auto runtimes = connected_runtimes(world.ranks, world.threads);
    const auto errors = run_ranks(world.ranks, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model(), settings, world.device_bytes);
      EXPECT_EQ(rig.engine->generation(), first);
      for (std::uint64_t step = first; step < first + 2; ++step)
        train_step(*rig.engine, model(), step, kLearningRate, {}, 1.0F, rank);
      EXPECT_TRUE(same_params(*rig.engine, expected, model())) << "rank " << rank;
      rig.engine->make_durable();
    });
    expect_none(errors);
  }
}

TEST(EngineRanksStore, GoesOnInAnyStageThatHasSlices) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  PlainTraining expected(model, 1.0F);
  expected.world_size = 2;
  std::uint64_t first = 0;
  const std::pair<int, const char*> launches[] = {
      {1, kDemo}, {3, "all=nvme"}, {2, "all=host"}, {3, kDemo}, {2, "all=device"}};
  for (const auto& [stage, placement] : launches) {
    EngineConfig config = small_config(directory.path());
    config.strategy.zero_stage = stage;
    config.placement = parse_placement(placement);
    const auto runtimes = connected_runtimes(2, 1);
    for (std::uint64_t step = first; step < first + 2; ++step) expected.step(step, kLearningRate);
    const auto errors = run_ranks(2, [&, stage = stage](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
      EXPECT_EQ(rig.engine->generation(), first);
      for (std::uint64_t step = first; step < first + 2; ++step)
        train_step(*rig.engine, model, step, kLearningRate, {}, 1.0F, rank);
      EXPECT_TRUE(same_params(*rig.engine, expected, model)) << "stage " << stage;
      rig.engine->make_durable();
    });
    expect_none(errors);
    first += 2;
  }
}

TEST(EngineRanksStore, RefusesAnotherNumberOfRanks) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const EngineConfig config = small_config(directory.path());
  const auto open_with = [&](int world_size) {
    const auto runtimes = connected_runtimes(world_size, 1);
    return run_ranks(world_size, [&](int rank) {
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
      rig.engine->make_durable();
    });
  };
  expect_none(open_with(2));
  for (const int world_size : {1, 3}) {
    for (const std::exception_ptr& thrown : open_with(world_size)) {
      const Error error = error_in(thrown);
      EXPECT_THAT(
          error.what(),
          HasSubstr(fmt::format("the store was made by 2 ranks, but is opened by {}", world_size)))
          << "every rank names the first cause, also one that has no part in that store";
    }
  }
  expect_none(open_with(2));
}

// Its writes together take longer than ranks may stand still; the other rank's are done long
// before.
TEST(EngineRanksStore, ARankWithASlowDriveIsWaitedForHoweverLongItTakes) {
  using namespace std::chrono_literals;
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const EngineConfig config = small_config(directory.path());
  const auto runtimes = connected_runtimes(2, 1, /*timeout=*/5s);
  runtimes[1]->io_engine = [](Reactor& reactor, const std::string& path) {
    auto slow = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
    slow->plan(Fault::slow(FaultPoint::kWrite, 1200ms).from_then_on());
    return slow;
  };
  expect_none(run_ranks(2, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
    rig.engine->make_durable();
  }));
  const auto again = connected_runtimes(2, 1);
  expect_none(run_ranks(2, [&](int rank) {
    RankRig rig(*again[static_cast<std::size_t>(rank)], model, config);
    rig.engine->make_durable();  // the other rank may be opening still
  }));
}

Traffic traffic_of(Runtime& runtime) {
  return runtime.reactor.block_on(
      [](Communicator& ranks) -> Task<Traffic> { co_return ranks.traffic(); }(*runtime.ranks));
}

/// Payload that this rank has sent so far.
std::uint64_t sent_bytes(Runtime& runtime) {
  const Traffic traffic = traffic_of(runtime);
  return traffic.same_host.payload_bytes + traffic.other_hosts.payload_bytes;
}

// Rajbhandari et al. 2020, section 7: of P parameters, 2 P (N - 1) / N elements a step in stages 0
// to 2, half of them gradients, and 3 P (N - 1) / N in stage 3, which gathers for forward and
// backward; here less by what the device keeps from one to the other.
TEST(EngineRanksTraffic, IsThatOfTheFormulasAfterPadding) {
  constexpr int kWorld = 3;
  constexpr std::uint64_t kSteps = 3;
  const ModelSpec model = small_model();
  for (const int stage : {0, 1, 2, 3}) {
    const ScratchDirectory directory;
    EngineConfig config = small_config(directory.path());
    config.strategy.zero_stage = stage;
    config.max_reuse_distance = 0;  // what backward needs again is gathered again
    const auto runtimes = connected_runtimes(kWorld, 1);
    const auto errors = run_ranks(kWorld, [&](int rank) {
      Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
      RankRig rig(runtime, model, config);
      train_step(*rig.engine, model, 0, kLearningRate, {}, 1.0F, rank);
      rig.engine->make_durable();
      const std::uint64_t before = sent_bytes(runtime);
      for (std::uint64_t step = 1; step <= kSteps; ++step)
        train_step(*rig.engine, model, step, kLearningRate, {}, 1.0F, rank);
      rig.engine->make_durable();
      const ChunkTable table(model, 1000, {}, {stage, rank, kWorld});
      const std::uint64_t slice_bytes = table.padded_count() / kWorld * sizeof(bf16);
      const std::uint64_t times = stage == 3 ? 3 : 2;
      const auto sent = static_cast<double>(sent_bytes(runtime) - before) / kSteps;
      const auto formula = static_cast<double>(times * (kWorld - 1) * slice_bytes);
      const std::size_t message_bytes = GradientNorm::kHeadBytes + table.tile_count() / kWorld * 8;
      const auto norm = static_cast<double>((kWorld - 1) * message_bytes);
      EXPECT_NEAR(sent, formula + norm, 256) << "stage " << stage << ", rank " << rank;
    });
    expect_none(errors);
  }
}

// ZeRO++'s hpZ: of stage 3's three times P (N - 1) / N, the gather for backward stays in the node.
TEST(EngineRanksTraffic, OfASecondPartitionLeavesTheNodeForForwardAndGradientsOnly) {
  constexpr int kWorld = 4;
  constexpr int kNode = 2;
  constexpr std::uint64_t kSteps = 2;
  const ModelSpec model = small_model();
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.strategy.zero_stage = 3;
  config.strategy.hpz = kNode;
  config.max_reuse_distance = 0;
  const auto runtimes = connected_runtimes(kWorld, 1, std::chrono::minutes(1), kNode);
  const auto errors = run_ranks(kWorld, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    RankRig rig(runtime, model, config);
    train_step(*rig.engine, model, 0, kLearningRate, {}, 1.0F, rank);
    rig.engine->make_durable();
    const Traffic before = traffic_of(runtime);
    for (std::uint64_t step = 1; step <= kSteps; ++step)
      train_step(*rig.engine, model, step, kLearningRate, {}, 1.0F, rank);
    rig.engine->make_durable();
    const Traffic after = traffic_of(runtime);
    const ChunkTable table(model, 1000, {}, {3, rank, kWorld});
    const auto slice = static_cast<double>(table.padded_count() / kWorld * sizeof(bf16));
    const auto norm =
        static_cast<double>(GradientNorm::kHeadBytes + table.tile_count() / kWorld * 8);
    const auto sent = [&](auto member) {
      return static_cast<double>((after.*member).payload_bytes - (before.*member).payload_bytes) /
             kSteps;
    };
    constexpr int kAway = kWorld - kNode;
    EXPECT_NEAR(sent(&Traffic::other_hosts), 2 * kAway * slice + kAway * norm, 256);
    // Within it, a part for backward is that of kWorld / kNode slices.
    constexpr int kNear = kNode - 1;
    EXPECT_NEAR(sent(&Traffic::same_host), (2 + kWorld / kNode) * kNear * slice + kNear * norm,
                256);
  });
  expect_none(errors);
}

/// Two ranks in `stage`, whose second does a step of its own kind; what each threw.
template <class SecondStep>
std::vector<std::exception_ptr> part_ways(int stage, const SecondStep& second_step,
                                          Nanoseconds timeout = std::chrono::minutes(1)) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.strategy.zero_stage = stage;
  const auto runtimes = connected_runtimes(2, 1, timeout);
  return run_ranks(2, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
    for (std::uint64_t step = 0; step < 2; ++step)
      train_step(*rig.engine, model, step, kLearningRate, {}, 1.0F, rank);
    if (rank == 0) {
      train_step(*rig.engine, model, 2, kLearningRate);
      rig.engine->make_durable();
    } else {
      second_step(*rig.engine, model);
    }
  });
}

class EngineRanksApart : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, EngineRanksApart, ::testing::Values(0, 2, 3));

TEST_P(EngineRanksApart, AreToldThatTheirStepsDiffer) {
  const auto errors = part_ways(GetParam(), [](Engine& engine, const ModelSpec& model) {
    train_step(engine, model, 2, 2 * kLearningRate, {}, 1.0F, 1);
  });
  for (const std::exception_ptr& thrown : errors) {
    const Error error = error_in(thrown);
    EXPECT_THAT(error.what(), HasSubstr("another learning rate"));
    EXPECT_THAT(error.what(), HasSubstr("generation"));
  }
}

TEST_P(EngineRanksApart, LearnThatOneOfThemHasGone) {
  const auto errors = part_ways(GetParam(), [](Engine& engine, const ModelSpec& model) {
    pass_step(engine, model, 2, kLearningRate, 1.0F, 3, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // what was under way has ended
    throw Error(ErrorCode::kInvalidArgument, "the trainer's own");
  });
  EXPECT_EQ(error_in(errors[0]).code(), ErrorCode::kUnavailable);
  EXPECT_THAT(error_in(errors[0]).what(), HasSubstr("rank 1"));
  EXPECT_THAT(error_in(errors[1]).what(), HasSubstr("the trainer's own"));
}

// It has exchanged nothing of the step yet.
TEST_P(EngineRanksApart, LearnThatOneOfThemHasGoneWithAStepBegun) {
  for (const bool announced : {true, false}) {
    const auto errors = part_ways(GetParam(), [announced](Engine& engine, const ModelSpec&) {
      if (announced) {
        engine.prepare_step({.learning_rate = kLearningRate, .blob = {}});
      } else {
        engine.gradient(4);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // what was under way has ended
      throw Error(ErrorCode::kInvalidArgument, "the trainer's own");
    });
    EXPECT_THAT(error_in(errors[0]).what(),
                ::testing::AllOf(HasSubstr("rank 1"), HasSubstr("the engine was closed")));
  }
}

// A step that one rank never makes: the others wait as long as they are told to, and no longer.
TEST_P(EngineRanksApart, WaitNoLongerThanTheyAreToldTo) {
  const auto errors = part_ways(
      GetParam(),
      [](Engine& engine, const ModelSpec&) {
        std::this_thread::sleep_for(std::chrono::seconds(2));
        engine.make_durable();
      },
      std::chrono::milliseconds(500));
  const Error error = error_in(errors[0]);
  EXPECT_TRUE(error.code() == ErrorCode::kDeadlineExceeded ||
              error.code() == ErrorCode::kUnavailable)
      << error.what();
}

TEST(EngineRanksOrder, UnitsOutOfTheLearnedOrderAreServedWhereAllUseThemSo) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  config.strategy.zero_stage = 3;
  PlainTraining expected(model, 1.0F);
  expected.world_size = 2;
  std::vector<PlainTraining> at;
  for (std::uint64_t step = 0; step < 4; ++step) {
    expected.step(step, kLearningRate);
    at.push_back(expected);
  }
  const auto runtimes = connected_runtimes(2, 1);
  const auto errors = run_ranks(2, [&](int rank) {
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config, 5 * kMiB / 2);
    for (std::uint64_t step = 0; step < 4; ++step) {
      train_step(*rig.engine, model, step, kLearningRate, {}, 1.0F, rank);
      for (const UnitId u : {3U, 0U, 4U, 1U, 1U}) {
        const auto got = HostDevice::view(rig.engine->acquire(u));
        EXPECT_TRUE(std::ranges::equal(got.bytes, at[step].params(u).bytes)) << "unit " << u;
        rig.engine->release(u);
      }
    }
    rig.engine->make_durable();
  });
  expect_none(errors);
}

// Its gather meets another unit's, or none.
TEST(EngineRanksOrder, AUnitThatOneRankGathersAloneIsAnErrorOnBoth) {
  const auto errors = part_ways(
      3,
      [](Engine& engine, const ModelSpec& model) {
        engine.acquire(4);
        engine.release(4);
        train_step(engine, model, 2, kLearningRate, {}, 1.0F, 1);
      },
      std::chrono::milliseconds(500));
  for (const std::exception_ptr& thrown : errors) error_in(thrown);
}

TEST(EngineRanksOpen, RefusesRanksWithOtherSettingsByName) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const auto runtimes = connected_runtimes(2, 1);
  const auto errors = run_ranks(2, [&](int rank) {
    EngineConfig config = small_config(directory.path());
    config.clip_norm = rank == 0 ? 1.0F : 2.0F;
    config.strategy.zero_stage = 2 + rank;
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
  });
  for (const std::exception_ptr& thrown : errors)
    EXPECT_THAT(error_in(thrown).what(),
                HasSubstr("differ in `clip` (rank 0 has 1 and rank 1 has 2) and in `zero_stage` "
                          "(rank 0 has 2 and rank 1 has 3);"));
}

TEST(EngineRanksOpen, NamesTheRanksThatResumeInDifferentWays) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const auto runtimes = connected_runtimes(2, 1);
  const auto errors = run_ranks(2, [&](int rank) {
    EngineConfig config = small_config(directory.path());
    config.resume = rank == 0 ? EngineConfig::Resume::kReshard : EngineConfig::Resume::kNever;
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
  });
  for (const std::exception_ptr& thrown : errors) {
    EXPECT_THAT(error_in(thrown).what(),
                HasSubstr("differ in `resume` (rank 0 has reshard and rank 1 has never);"));
  }
}

TEST(EngineRanksOpen, ARankThatCannotOpenEndsTheOthersOpeningToo) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const auto runtimes = connected_runtimes(2, 1);
  const auto errors = run_ranks(2, [&](int rank) {
    EngineConfig config = small_config(directory.path());
    if (rank == 1) config.host_budget_bytes = 64 * kKiB;
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config);
  });
  EXPECT_EQ(error_in(errors[1]).code(), ErrorCode::kResourceExhausted);
  EXPECT_EQ(error_in(errors[0]).code(), ErrorCode::kUnavailable);
  EXPECT_THAT(error_in(errors[0]).what(), HasSubstr("`host_memory`"));
}

}  // namespace engine_ranks_test
}  // namespace ziggurat::testing

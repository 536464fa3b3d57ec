// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_traffic_test.cc: the bytes that ranks sent in a step, counted where they are
// sent, against what core/plan/traffic.h said they would be.
#include <gtest/gtest.h>

#include <barrier>

#include "core/plan/traffic.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_traffic_test {

constexpr std::uint64_t kSteps = 2;

/// Units that pad differently on every number of ranks.
ModelSpec medium_model() {
  ModelSpec model{.name = "medium", .units = {}};
  for (const std::int64_t rows : {1300, 2000, 2049, 1500}) {
    const std::string unit = "unit" + std::to_string(rows);
    model.units.push_back({.name = unit, .params = {{unit + ".weight", {rows, 256}}}});
  }
  return model;
}

/// Payload that this rank has sent so far.
SentBytes payload_sent(Runtime& runtime) {
  return runtime.reactor.block_on([](Runtime& its) -> Task<SentBytes> {
    const Traffic traffic = its.ranks->traffic();
    co_return SentBytes{.same_node = traffic.same_host.payload_bytes,
                        .other_nodes = traffic.other_hosts.payload_bytes};
  }(runtime));
}

/// Its destructor waits for all ranks.
struct Together {
  std::barrier<>& all;
  ~Together() { all.arrive_and_wait(); }
};

struct World {
  const char* name;
  int ranks;
  StrategyRequest request;
  std::optional<DType> reduce_dtype{};
  Quantization quantization{};
  int ranks_per_node = 64;
  int passes = 1;
  /// Units are dropped after each use; else there is room for all of them.
  bool dropped = true;
};

void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

EngineConfig config_of(const World& world, const ScratchDirectory& directory) {
  EngineConfig config = small_config(directory.path());
  const Strategy strategy = resolve(world.request, world.ranks);
  config.host_budget_bytes = 64 * kMiB;
  config.strategy = world.request;
  config.strategy.zero_stage = strategy.zero_stage;
  config.reduce_dtype = world.reduce_dtype;
  config.quantization = world.quantization;
  config.ranks_per_node = world.ranks_per_node;
  if (world.dropped) config.max_reuse_distance = 0;
  return config;
}

/// What each rank sent in a step, on average over kSteps, all of it done.
std::vector<SentBytes> sent_in_a_step(const World& world) {
  const ScratchDirectory directory;
  const EngineConfig config = config_of(world, directory);
  const ModelSpec model = medium_model();
  const auto runtimes = connected_runtimes(world.ranks, 1, std::chrono::minutes(1),
                                           static_cast<std::size_t>(world.ranks_per_node));
  std::vector<SentBytes> sent(runtimes.size());
  std::barrier<> all_done(world.ranks);
  const auto errors = run_ranks(world.ranks, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    RankRig rig(runtime, model, config, 32 * kMiB);
    const Together leaving{all_done};  // an engine that closes ends what others are still in
    const auto steps = [&](std::uint64_t first, std::uint64_t count) {
      for (std::uint64_t step = first; step < first + count; ++step)
        train_passes(*rig.engine, model, step, world.passes, rank);
      rig.engine->make_durable();
      for (UnitId u = 0; config.strategy.zero_stage < 3 && u < model.units.size(); ++u) {
        rig.engine->acquire(u);  // once new parameters have come from all ranks
        rig.engine->release(u);
      }
      return payload_sent(runtime);
    };
    const SentBytes before = steps(0, 1);
    const SentBytes after = steps(1, kSteps);
    sent[static_cast<std::size_t>(rank)] = {
        .same_node = (after.same_node - before.same_node) / kSteps,
        .other_nodes = (after.other_nodes - before.other_nodes) / kSteps};
  });
  expect_none(errors);
  return sent;
}

StepTraffic planned(const World& world) {
  const ModelSpec model = medium_model();
  return step_traffic({.model = model_size(model, 1),
                       .recipe = {.reduce_dtype = world.reduce_dtype.value_or(model.dtype)},
                       .strategy = resolve(world.request, world.ranks),
                       .quantization = world.quantization,
                       .dp_ranks_per_node = world.ranks_per_node,
                       .passes = world.passes});
}

/// Psi: of all parameters, padded to equal slices, in the model's type.
double padded_bytes(int ranks) {
  return static_cast<double>(ChunkTable(medium_model(), 1000, {}, {3, 0, ranks}).padded_count() *
                             sizeof(bf16));
}

/// Norms and agreements are beside what is planned: 8 bytes a tile of 16,384 elements, to every
/// other rank, and some words a step.
void expect_planned(std::uint64_t sent, std::uint64_t expected) {
  EXPECT_GE(sent, expected);
  EXPECT_LE(sent, expected + 2000);
}

class EngineTraffic : public ::testing::TestWithParam<World> {};

TEST_P(EngineTraffic, IsWhatWasPlanned) {
  const World& world = GetParam();
  const SentBytes expected = planned(world).sent();
  for (const SentBytes& sent : sent_in_a_step(world)) {
    expect_planned(sent.same_node, expected.same_node);
    expect_planned(sent.other_nodes, expected.other_nodes);
  }
}

constexpr Quantization kWeights{.weights = true};
constexpr Quantization k8Bits{.gradient_bits = 8};
constexpr Quantization k4Bits{.gradient_bits = 4};
constexpr Quantization kBoth{.weights = true, .gradient_bits = 4};

World two_nodes(const char* name, Quantization quantization, int hpz = 0, int passes = 1) {
  return {.name = name,
          .ranks = 4,
          .request = {.hpz = hpz},
          .quantization = quantization,
          .ranks_per_node = 2,
          .passes = passes};
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, EngineTraffic,
    ::testing::Values(
        World{"Stage0", 2, {.zero_stage = 0}}, World{"Stage1", 2, {.zero_stage = 1}},
        World{"Stage2", 2, {.zero_stage = 2}}, World{"Stage3", 2, {.zero_stage = 3}},
        World{"Stage0Fp32Sums", 2, {.zero_stage = 0}, DType::kFloat32},
        World{"Stage2Fp32Sums", 2, {.zero_stage = 2}, DType::kFloat32},
        World{"Stage3Fp32Sums", 2, {.zero_stage = 3}, DType::kFloat32},
        World{"Stage0Of3", 3, {.zero_stage = 0}}, World{"Stage2Of3", 3, {.zero_stage = 2}},
        World{"Stage3Of3", 3, {.zero_stage = 3}}, World{"Stage1Of4", 4, {.zero_stage = 1}},
        World{"Stage3Of4", 4, {.zero_stage = 3}}, World{"HpzOf4", 4, {.hpz = 2}},
        World{"Hybrid2x2", 4, {.name = StrategyName::kHybrid, .shard_group = 2}},
        World{
            "HybridStage2", 4, {.zero_stage = 2, .name = StrategyName::kHybrid, .shard_group = 2}}),
    [](const auto& one) { return std::string(one.param.name); });

INSTANTIATE_TEST_SUITE_P(TwoNodes, EngineTraffic,
                         ::testing::Values(two_nodes("AsTheyAre", {}),
                                           two_nodes("Weights", kWeights),
                                           two_nodes("Gradients8", k8Bits),
                                           two_nodes("Gradients4", k4Bits),
                                           two_nodes("Both", kBoth), two_nodes("SecondCut", {}, 2),
                                           two_nodes("BothAndSecondCut", kBoth, 2),
                                           two_nodes("BothTwoPasses", kBoth, 0, 2),
                                           two_nodes("AllTwoPasses", kBoth, 2, 2)),
                         [](const auto& one) { return std::string(one.param.name); });

World in_passes(const char* name, int stage, int passes) {
  return {.name = name, .ranks = 2, .request = {.zero_stage = stage}, .passes = passes};
}

INSTANTIATE_TEST_SUITE_P(
    Passes, EngineTraffic,
    ::testing::Values(in_passes("Stage0Two", 0, 2), in_passes("Stage0Four", 0, 4),
                      in_passes("Stage1Four", 1, 4), in_passes("Stage2Two", 2, 2),
                      in_passes("Stage2Four", 2, 4), in_passes("Stage3Two", 3, 2),
                      in_passes("Stage3Four", 3, 4)),
    [](const auto& one) { return std::string(one.param.name); });

// Rajbhandari et al. 2020, section 7, with a ring's (N - 1) / N: 2 Psi in stages 0 to 2 however
// many micro-batches, (2 K + 1) Psi in stage 3; less where units stay from use to use.
TEST(EngineTrafficPasses, AreThoseOfTheFormulas) {
  constexpr int kRanks = 2;
  const double psi = padded_bytes(kRanks) * (kRanks - 1) / kRanks;
  for (const int passes : {1, 2, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      const double times = stage == 3 ? 2 * passes + 1 : 2;
      const auto sent = sent_in_a_step(in_passes("", stage, passes)).front().total();
      EXPECT_NEAR(static_cast<double>(sent) / psi, times, 0.003)
          << "stage " << stage << ", " << passes << " passes";
    }
    World kept = in_passes("", 3, passes);
    kept.dropped = false;
    EXPECT_NEAR(static_cast<double>(sent_in_a_step(kept).front().total()) / psi, 2, 0.003);
  }
}

// Wang et al. 2023, table 1: what leaves a node in a step is 0.5 Psi of parameters in 8 bits, none
// for backward, and 0.25 Psi of gradients in 4, after the scales, 4 bytes for 256 elements each.
TEST(EngineTrafficTwoNodes, OfZeroPlusPlusIsThreeQuartersOfPsiBetweenThem) {
  const auto all = sent_in_a_step(two_nodes("", kBoth, 2));
  const double of_node = static_cast<double>(all[0].other_nodes + all[1].other_nodes);
  const double psi = padded_bytes(4) / 2;  // half of it is a node's own
  const double scales = 2 * 4.0 / 256 / sizeof(bf16);
  EXPECT_NEAR(of_node / psi - scales, 0.75, 0.003);
}

}  // namespace engine_traffic_test
}  // namespace ziggurat::testing

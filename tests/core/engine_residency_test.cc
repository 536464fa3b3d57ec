// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_residency_test.cc: the limits on which parameters stay on the device, by the
// bytes that a step loads; and that they never change bits.
#include <gtest/gtest.h>

#include "core/schedule/params/residency.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {
namespace engine_residency_test {

constexpr std::uint64_t kWarmSteps = 2;
constexpr std::uint64_t kSteps = 3;

/// In kSteps steps.
struct Loaded {
  std::uint64_t bytes = 0;  ///< to the device
  std::uint64_t hits = 0;   ///< acquires that found their unit there
};

/// What the units from `first` to before `end` take as they are held: padded.
std::uint64_t param_bytes(const ModelSpec& model, UnitId first, UnitId end) {
  const ChunkTable table(model, 1U << 20, {});
  std::uint64_t bytes = 0;
  for (UnitId u = first; u < end; ++u) bytes += table.unit_param_bytes(u);
  return bytes;
}

/// Forward and backward use every unit once each, on a device with room for all of them.
Loaded loaded_in_steps(const std::function<void(EngineConfig&)>& limit) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  EngineConfig config = small_config(directory.path());
  limit(config);
  Rig rig(model, config);
  PlainTraining plain(model, config.clip_norm);
  for (std::uint64_t step = 0; step < kWarmSteps; ++step) {
    train_step(*rig.engine, model, step, 0.01F);
    plain.step(step, 0.01F);
  }
  rig.engine->make_durable();
  const auto value = [&](Counter counter) { return rig.runtime->metrics.value(counter); };
  const std::uint64_t bytes = value(Counter::kHostToDeviceBytes);
  const std::uint64_t hits = value(Counter::kPrefetchHits);
  for (std::uint64_t step = kWarmSteps; step < kWarmSteps + kSteps; ++step) {
    train_step(*rig.engine, model, step, 0.01F);
    plain.step(step, 0.01F);
  }
  const Loaded loaded{.bytes = value(Counter::kHostToDeviceBytes) - bytes,
                      .hits = value(Counter::kPrefetchHits) - hits};
  EXPECT_TRUE(same_params(*rig.engine, plain, model));
  return loaded;
}

TEST(EngineResidency, AUnitStaysFromForwardToBackwardWhereThereIsRoom) {
  const ModelSpec model = small_model();
  EXPECT_LT(loaded_in_steps([](EngineConfig&) {}).bytes, kSteps * 2 * param_bytes(model, 0, 5));
}

TEST(EngineResidency, AReuseDistanceOfZeroLoadsEveryUnitForEachUse) {
  const ModelSpec model = small_model();
  const auto limit = [](EngineConfig& config) { config.max_reuse_distance = 0; };
  // The first units of the first step that counts may have been prefetched before it began.
  const std::uint64_t prefetched = param_bytes(model, 0, ResidencyLimits{}.prefetch_units_max);
  EXPECT_GE(loaded_in_steps(limit).bytes + prefetched, kSteps * 2 * param_bytes(model, 0, 5));
}

TEST(EngineResidency, WithoutLiveParametersNothingIsLoadedAhead) {
  const auto limit = [](EngineConfig& config) {
    config.max_reuse_distance = 0;
    config.max_live_parameters = 0;
  };
  EXPECT_EQ(loaded_in_steps(limit).hits, 0U);
}

// Units 0 and 1 are at most 129 x 128 elements.
TEST(EngineResidency, SmallUnitsPersistAndAreLoadedOnceAStep) {
  const ModelSpec model = small_model();
  const auto limit = [](EngineConfig& config) {
    config.max_reuse_distance = 0;
    config.max_live_parameters = 0;
  };
  const auto persist = [&](EngineConfig& config) {
    limit(config);
    config.param_persistence_threshold = 129 * 128;
  };
  const std::uint64_t all = loaded_in_steps(limit).bytes;
  const Loaded fewer = loaded_in_steps(persist);
  EXPECT_EQ(all - fewer.bytes, kSteps * param_bytes(model, 0, 2));
  EXPECT_EQ(fewer.hits, 2 * kSteps) << "in backward";
}

}  // namespace engine_residency_test
}  // namespace ziggurat::testing

// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_divided_test.cc: records on several tiers, chosen by hand or from the budgets,
// and generations that become durable every k steps: the same bits, budgets kept to the byte, and a
// store that goes on from the last durable step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "core/plan/auto_placement.h"
#include "tests/core/engine_harness.h"
#include "tests/core/equal_units.h"

namespace ziggurat::testing {
namespace engine_divided_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using Speculation = EngineConfig::Speculation;

constexpr float kLearningRate = 0.01F;
constexpr std::uint64_t kDeviceBytes = 8 * kMiB;
constexpr std::uint64_t kRecordBytes = 12 * kTileElements;  // a tile's

/// Five units of eight tiles each.
ModelSpec wide_model() { return equal_units("wide", 5, 1000); }
constexpr float kClip = 45.0F;  // norms of about 23, and four times that
float loudness_of(std::uint64_t step) { return step % 3 == 1 ? 4.0F : 1.0F; }

struct Case {
  const char* name;
  const char* placement;
  std::uint64_t every;
  Speculation speculation;
};

class EveryKSteps : public ::testing::TestWithParam<Case> {
 protected:
  EngineConfig config() const {
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement(GetParam().placement);
    config.host_budget_bytes = 4 * kMiB;
    config.clip_norm = kClip;
    config.speculation = GetParam().speculation;
    config.durable_every_steps = GetParam().every;
    return config;
  }

  const ModelSpec model_ = wide_model();
  const ScratchDirectory directory_;
};

// Every engine is left without a word: what was not durable is trained again.
TEST_P(EveryKSteps, GoesOnFromTheLastDurableStepWithTheSameBits) {
  const std::uint64_t every = GetParam().every;
  PlainTraining plain(model_, kClip);
  std::uint64_t trained = 0;
  for (const std::uint64_t steps : {7U, 4U, 6U}) {
    Rig rig(model_, config(), 2, kDeviceBytes);
    const std::uint64_t resumed = rig.engine->generation();
    EXPECT_LE(resumed, trained);
    // What ends with the process is sealed as it would be; later steps are not.
    EXPECT_GE(resumed + every + 1, trained);
    EXPECT_EQ(resumed % every, 0U);
    for (std::uint64_t step = resumed; step < resumed + steps; ++step) {
      train_step(*rig.engine, model_, step, kLearningRate, {}, loudness_of(step));
      if (step < trained) continue;
      plain.step(step, kLearningRate, loudness_of(step));
      trained = step + 1;
      ASSERT_TRUE(same_params(*rig.engine, plain, model_)) << "step " << step;
      ASSERT_LE(rig.engine->durable_generation(), trained);
    }
  }
}

TEST_P(EveryKSteps, AnyStepBecomesDurableWhenAskedFor) {
  PlainTraining plain(model_, kClip);
  for (std::uint64_t step = 0; step < 9; ++step) {
    Rig rig(model_, config(), 2, kDeviceBytes);
    ASSERT_EQ(rig.engine->generation(), step);
    for (UnitId u = 0; u < model_.units.size(); ++u)
      ASSERT_EQ(master_of(*rig.engine, u), plain.master(u)) << "unit " << u;
    train_step(*rig.engine, model_, step, kLearningRate, {}, loudness_of(step));
    plain.step(step, kLearningRate, loudness_of(step));
    rig.engine->make_durable();
    ASSERT_EQ(rig.engine->durable_generation(), step + 1);
  }
}

constexpr const char* kNvme = "params=host,grads=host,optimizer=nvme";
constexpr const char* kDivided = "params=host,grads=host,optimizer=device:2MiB,host:1MiB,nvme";

INSTANTIATE_TEST_SUITE_P(Engine, EveryKSteps,
                         ::testing::Values(Case{"Divided1", kDivided, 1, Speculation::kAlways},
                                           Case{"Divided2", kDivided, 2, Speculation::kAlways},
                                           Case{"Divided5", kDivided, 5, Speculation::kAlways},
                                           Case{"Divided5Never", kDivided, 5, Speculation::kNever},
                                           Case{"Nvme5", kNvme, 5, Speculation::kAlways},
                                           Case{"AllNvme3", "all=nvme", 3, Speculation::kAuto}),
                         [](const auto& one) { return std::string(one.param.name); });

/// Bytes of records that a step reads and writes once the run is warm.
struct Moved {
  std::uint64_t read_bytes;
  std::uint64_t write_bytes;
};
Moved moved_in(const char* placement, std::uint64_t every, std::uint64_t steps) {
  const ScratchDirectory directory;
  const ModelSpec model = wide_model();
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement(placement);
  config.host_budget_bytes = 4 * kMiB;
  config.durable_every_steps = every;
  config.speculation = Speculation::kNever;
  Rig rig(model, config, 2, kDeviceBytes);
  const auto value = [&](Counter counter) { return rig.runtime->metrics.value(counter); };
  for (std::uint64_t step = 0; step < steps; ++step)
    train_step(*rig.engine, model, step, kLearningRate);
  rig.engine->make_durable();
  return {value(Counter::kStateReadBytes), value(Counter::kStateWriteBytes)};
}

// 40 tiles of records: those that stay are the first chunks that 2 MiB and 1 MiB hold.
TEST(DividedRecords, ThoseThatStayAreNotReadAndWrittenForSealsAlone) {
  constexpr std::uint64_t kSteps = 10;
  const Moved all = moved_in("params=host,grads=host,optimizer=host:0MiB,nvme", 1, kSteps);
  EXPECT_EQ(all.read_bytes, kSteps * 40 * kRecordBytes);
  EXPECT_EQ(all.write_bytes, kSteps * 40 * kRecordBytes);
  const Moved divided = moved_in(kDivided, 1, kSteps);
  const std::uint64_t stays = 40 * kRecordBytes - divided.read_bytes / kSteps;
  EXPECT_EQ(divided.write_bytes, kSteps * 40 * kRecordBytes) << "every step is durable";
  EXPECT_GE(stays, 2 * kMiB);
  EXPECT_LE(stays, 3 * kMiB);
  const Moved fifth = moved_in(kDivided, 5, kSteps);
  EXPECT_EQ(fifth.read_bytes, divided.read_bytes);
  EXPECT_EQ(fifth.write_bytes, kSteps * (40 * kRecordBytes - stays) + kSteps / 5 * stays);
}

TEST(DividedRecords, SaysWhatStaysWhere) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement(kDivided);
  config.host_budget_bytes = 4 * kMiB;
  config.durable_every_steps = 5;
  const Rig rig(wide_model(), config, 2, kDeviceBytes);
  EXPECT_THAT(rig.engine->description(),
              AllOf(Contains(AllOf(HasSubstr("records stay: "), HasSubstr(" on the device, "),
                                   HasSubstr(" in host memory"))),
                    Contains(HasSubstr("one step in 5 (durable_every_steps)"))));
}

TEST(DividedRecords, RefusesStepsBetweenSealsWithoutASecondSlot) {
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.durable_every_steps = 2;
  const auto refused = [&](const char* why) {
    try {
      const Rig rig(small_model(), config);
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  };
  config.slots = 1;
  refused("`slots=2`");
  config.slots = 2;
  config.placement = parse_placement("all=host");
  refused("`placement=optimizer=nvme`");
  config.placement = {};
  config.durable_every_steps = 1;
  config.slots = 1;
  { const Rig rig(small_model(), config); }
  config.slots = 2;
  config.durable_every_steps = 2;
  refused("was made with `slots=1`");
}

/// From everything on NVMe to everything on the device.
TEST(AutoPlacement, KeepsToTheBudgetsAndTrainsWithTheSameBits) {
  const ModelSpec model = wide_model();
  for (const std::uint64_t device_bytes : {1600 * kKiB, 2 * kMiB, 3 * kMiB, 5 * kMiB, 16 * kMiB}) {
    for (const std::uint64_t host_bytes : {1 * kMiB, 3 * kMiB, 12 * kMiB}) {
      SCOPED_TRACE(::testing::Message() << device_bytes << " " << host_bytes);
      const ScratchDirectory directory;
      EngineConfig config = small_config(directory.path());
      config.placement = parse_placement("auto");
      config.host_budget_bytes = host_bytes;
      PlainTraining plain(model, config.clip_norm);
      for (std::uint64_t run = 0; run < 2; ++run) {
        Rig rig(model, config, 2, device_bytes);
        EXPECT_THAT(rig.engine->description(), Contains(HasSubstr("placement auto: ")));
        for (std::uint64_t step = 2 * run; step < 2 * run + 2; ++step) {
          train_step(*rig.engine, model, step, kLearningRate);
          plain.step(step, kLearningRate);
        }
        EXPECT_TRUE(same_params(*rig.engine, plain, model));
        rig.engine->make_durable();
        EXPECT_LE(rig.device->account().peak_bytes(), device_bytes);
        EXPECT_LE(rig.engine->host_account().peak_bytes(), host_bytes);
      }
    }
  }
}

RunRequest request_of(std::uint64_t device_bytes, std::uint64_t host_bytes) {
  return {.model = wide_model(),
          .budgets = {.device_bytes = device_bytes, .host_bytes = host_bytes}};
}

TEST(AutoPlacement, TakesAsManyRecordsAsFitAndNotOneMore) {
  std::size_t before = 0;
  for (std::uint64_t device_bytes = 2 * kMiB; device_bytes <= 14 * kMiB; device_bytes += kMiB / 4) {
    RunRequest request = request_of(device_bytes, 4 * kMiB);
    request.placement = choose_placement(request).placement;
    const RunPlan plan = plan_run(request);
    const ChunkTable table(request.model, plan.chunk_tiles, request.state, request.sharding);
    EXPECT_LE(comfortable_device_bytes(table, request.placement, request.device), device_bytes);
    EXPECT_GE(plan.host.device_chunks + 1, before) << "more memory, fewer records";
    before = plan.host.device_chunks;
    if (plan.host.device_chunks == plan.chunk_count) continue;
    request.placement.device_record_bytes = device_record_bytes(table, plan.host.device_chunks + 1);
    EXPECT_GT(comfortable_device_bytes(table, request.placement, request.device), device_bytes);
  }
  EXPECT_GT(before, 0U);
}

TEST(AutoPlacement, SaysWhatIsMissingWhereNothingFits) {
  try {
    choose_placement(request_of(64 * kKiB, 4 * kMiB));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("`device_memory`"));
  }
  try {
    choose_placement(request_of(8 * kMiB, 64 * kKiB));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("`host_memory`"));
  }
}

}  // namespace engine_divided_test
}  // namespace ziggurat::testing

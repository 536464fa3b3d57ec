// SPDX-License-Identifier: Apache-2.0
// tests/core/rehearsal_test.cc: the engine on twins, against closed forms and against real runs.
#include "core/rehearsal/rehearsal.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include "aio/simulated_engine.h"
#include "base/bytes.h"
#include "base/error.h"
#include "tests/core/engine_harness.h"
#include "tests/core/rehearsed_units.h"
#include "tests/support/environment_number.h"

namespace ziggurat {
namespace {

using namespace std::chrono_literals;
using namespace testing::rehearsed;

TEST(Rehearsal, BoundByDrive) {
  RehearsalRequest request = equal_run(Tier::kNvme);
  request.config.host_budget_bytes = kGiB;
  request.machine.drive.read_bytes_per_second = 3e9;
  request.machine.drive.write_bytes_per_second = 1.5e9;
  request.machine.drive.latency = 100us;
  const RehearsedRank rank = rehearse(request).front();
  const double read = static_cast<double>(rank.counted(Counter::kStateReadBytes));
  const double kept = static_cast<double>(rank.counted(Counter::kRecordCacheHitBytes));
  EXPECT_EQ(read + kept, 4 * 12 * kCount);
  EXPECT_EQ(static_cast<double>(rank.counted(Counter::kStateWriteBytes)), 4 * 12 * kCount);
  EXPECT_GT(kept, 0);
  expect_within(steady(rank), read / 4 / 3e9 + 12 * kCount / 1.5e9, 0.01);
}

/// Records stay in memory and are only written, so every generation waits for the seal of the one
/// before, and nothing hides seven latencies: those of its last record, of table, blob and flush,
/// and of two superblocks and a flush.
TEST(Rehearsal, CountsTheLatencyOfTheDrive) {
  RehearsalRequest request = equal_run(Tier::kNvme);
  request.machine.drive.write_bytes_per_second = 1.5e9;
  const double without = seconds_of(rehearse(request).front());
  expect_within(without, 4 * 12 * kCount / 1.5e9, 0.01);
  request.machine.drive.latency = 1ms;
  const double with = seconds_of(rehearse(request).front());
  expect_within(with - without, 4 * 7 * 1e-3, 0.01);
}

TEST(Rehearsal, BoundByTheBandwidthOfHostMemory) {
  RehearsalRequest request = equal_run(Tier::kHost);
  request.machine.workers.bytes_per_second = 10e9;
  const RehearsedRank rank = rehearse(request).front();
  // AdamW moves 28 bytes a parameter; its gradient is cleared in 4, and read and rounded in 6.
  expect_within(steady(rank), (28 + 4 + 6) * kCount / 10e9, 0.01);
}

TEST(Rehearsal, BoundByTheLinkToTheDevice) {
  RehearsalRequest request = equal_run(Tier::kHost);
  request.machine.device.memory_bytes = 256 * kMiB;
  request.machine.device.to_device.bytes_per_second = 1e9;
  const RehearsedRank rank = rehearse(request).front();
  // Beside two accumulators there is room for three units, which stay from forward to backward.
  expect_within(steady(rank), (2 * kUnits - 3) * kUnitBytes / 1e9, 0.01);
}

TEST(Rehearsal, BoundByCompute) {
  RehearsalRequest request = equal_run(Tier::kNvme);
  request.costs.assign(kUnits, {.forward_s = 1e-2, .backward_s = 2e-2});
  expect_within(steady(rehearse(request).front()), kUnits * 3e-2, 0.01);
}

/// A trainer on a GPU queues its kernels, and the engine's copies wait for them there.
TEST(Rehearsal, BoundByComputeOnAGpu) {
  RehearsalRequest request = equal_run(Tier::kHost);
  request.machine.device.host_accessible = false;
  request.machine.device.memory_bytes = 256 * kMiB;
  request.machine.device.to_device.bytes_per_second = 50e9;
  request.costs.assign(kUnits, {.forward_s = 1e-2, .backward_s = 2e-2});
  const RehearsedRank rank = rehearse(request).front();
  expect_within(steady(rank), kUnits * 3e-2, 0.01);
}

TEST(Rehearsal, BoundByTheNetwork) {
  RehearsalRequest request = equal_run(Tier::kHost);
  request.config.strategy.zero_stage = 3;
  request.machine.network = {.ranks = 4,
                             .ranks_per_node = 4,
                             .within_node = {.bytes_per_s = 1e9, .latency = 1us},
                             .between_nodes = {}};
  // All units have room on the device, so each is gathered once, and reduced once.
  const std::vector<RehearsedRank> ranks = rehearse(request);
  ASSERT_EQ(ranks.size(), 4u);
  for (const RehearsedRank& rank : ranks)
    expect_within(steady(rank), 2 * 0.75 * 2 * kCount / 1e9, 0.01);
}

/// Whatever order transfers end in, the same bytes take the same links.
TEST(Rehearsal, TheOrderOfCompletionsChangesNoBytes) {
  RehearsalRequest request = equal_run(Tier::kNvme);
  request.config.host_budget_bytes = kGiB;
  request.machine.drive.read_bytes_per_second = 3e9;
  request.machine.drive.write_bytes_per_second = 1.5e9;
  request.machine.drive.latency = 100us;
  const RehearsedRank even = rehearse(request).front();
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    request.order_seed = seed;
    request.machine.drive.jitter = seed % 2 == 0 ? 20 : 0;
    request.machine.drive.seed = seed;
    const RehearsedRank rank = rehearse(request).front();
    for (const Counter counter : {Counter::kStateReadBytes, Counter::kStateWriteBytes,
                                  Counter::kHostToDeviceBytes, Counter::kDeviceToHostBytes}) {
      EXPECT_EQ(rank.counted(counter), even.counted(counter)) << to_string(counter) << ' ' << seed;
    }
  }
}

std::uint64_t peak_memory_bytes() {
  struct ::rusage usage {};
  EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * kKiB;
}

TEST(Rehearsal, StateTakesNoMemory) {
  RehearsalRequest request = equal_run(Tier::kNvme);
  request.model = equal_units(16, std::uint64_t{900} << 20);
  request.costs.assign(16, {.forward_s = 0.1, .backward_s = 0.2});
  request.config.host_budget_bytes = 128 * kGiB;
  request.machine.device.memory_bytes = 80 * kGiB;
  request.steps = 2;
  const std::uint64_t before = peak_memory_bytes();
  const RehearsedRank rank = rehearse(request).front();
  EXPECT_GT(rank.host.peak_bytes(), 100 * kGiB);
  EXPECT_LT(peak_memory_bytes() - before, 300 * kMiB) << "for 15 billion parameters";
}

/// Prints what a large world costs; ZIGGURAT_REHEARSED_RANKS=1000 is the promise.
TEST(Rehearsal, ManyRanksLiveOnOneThread) {
  const auto ranks = static_cast<int>(testing::number_of("ZIGGURAT_REHEARSED_RANKS", 24));
  RehearsalRequest request = equal_run(Tier::kHost);
  request.model = equal_units(8, static_cast<std::uint64_t>(ranks) * (32 << 10));
  request.config.strategy.zero_stage = 3;
  request.config.host_budget_bytes = kGiB;
  request.steps = 3;
  request.machine.network = {.ranks = ranks,
                             .ranks_per_node = 1,
                             .within_node = {},
                             .between_nodes = {.bytes_per_s = 1e10, .latency = 5us}};
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<RehearsedRank> all = rehearse(request);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%d ranks: %.1f s, peak memory %s; a step %.6f s\n", ranks, took.count(),
              format_bytes(peak_memory_bytes()).c_str(), steady(all.front()));
  for (const RehearsedRank& rank : all) {
    ASSERT_EQ(rank.steps.size(), 3u);
    EXPECT_EQ(rank.counted(Counter::kOptimizerBytes),
              all.front().counted(Counter::kOptimizerBytes));
  }
}

TEST(Rehearsal, FailsAsARunWould) {
  RehearsalRequest request = equal_run(Tier::kHost);
  request.config.host_budget_bytes = 64 * kMiB;
  try {
    rehearse(request);
    FAIL() << "64 MiB hold nothing of this model";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted) << error.what();
  }
  request = equal_run(Tier::kHost);
  request.costs.pop_back();
  EXPECT_THROW(rehearse(request), Error);
}

/// A setting of which a real run and its rehearsal are compared.
struct Setting {
  const char* placement;
  std::uint64_t host_bytes;
  std::uint64_t device_bytes;
  int passes;
};

constexpr int kSteps = 10;

EngineConfig config_of(const Setting& setting, const std::string& directory) {
  EngineConfig config = testing::small_config(directory);
  config.placement = parse_placement(setting.placement);
  config.host_budget_bytes = setting.host_bytes;
  config.clip_norm = 0;  // a rehearsal never clips
  return config;
}

/// A runtime in real time, of which only the drive is simulated.
std::unique_ptr<Runtime> real_runtime(SimulatedDisk& disk, const SimulatedEngineOptions& drive) {
  RuntimeOptions options;
  options.threads = 2;
  options.io_engine = [&disk, drive](Reactor& reactor, const std::string&) {
    return std::make_unique<SimulatedEngine>(reactor, disk, drive);
  };
  return Runtime::create(options);
}

std::vector<std::uint64_t> real_bytes(const Setting& setting) {
  const testing::ScratchDirectory scratch;
  SimulatedDisk disk(kGiB, SimulatedDisk::Keeps::kAll);
  const ModelSpec model = testing::small_model();
  SimulatedEngineOptions drive;
  drive.read_bytes_per_second = drive.write_bytes_per_second = 1e9;
  const auto runtime = real_runtime(disk, drive);
  const auto device =
      HostDevice::create(runtime->reactor, setting.device_bytes, nullptr, &runtime->metrics);
  const auto engine = Engine::open(model, config_of(setting, scratch.path()), *runtime, *device,
                                   testing::initialize);
  std::vector<std::uint64_t> bytes;
  for (const Counter link : kLinks) bytes.push_back(runtime->metrics.value(link));
  for (int step = 1; step <= kSteps; ++step)
    testing::train_passes(*engine, model, static_cast<std::uint64_t>(step), setting.passes);
  engine->make_durable();
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = runtime->metrics.value(kLinks[i]) - bytes[i];
  return bytes;
}

TEST(Rehearsal, MovesTheBytesOfARealRun) {
  const Setting settings[] = {
      {"params=host,grads=host,optimizer=nvme", 8 * kMiB, 4 * kMiB, 1},
      {"params=host,grads=host,optimizer=nvme", 4 * kMiB, 4 * kMiB, 1},
      {"params=host,grads=host,optimizer=nvme", 8 * kMiB, 1 * kMiB, 1},
      {"params=host,grads=host,optimizer=host", 8 * kMiB, 4 * kMiB, 1},
      {"params=host,grads=host,optimizer=host", 8 * kMiB, 4 * kMiB, 3},
      {"params=host,grads=nvme,optimizer=nvme", 8 * kMiB, 4 * kMiB, 1},
      {"params=nvme,grads=host,optimizer=nvme", 8 * kMiB, 4 * kMiB, 1},
      {"params=nvme,grads=nvme,optimizer=nvme", 4 * kMiB, 4 * kMiB, 1},
      {"params=nvme,grads=nvme,optimizer=nvme", 8 * kMiB, 4 * kMiB, 2},
      {"params=device,grads=device,optimizer=nvme", 8 * kMiB, 4 * kMiB, 1},
      {"params=device,grads=host,optimizer=host", 8 * kMiB, 4 * kMiB, 1},
      {"params=device,grads=device,optimizer=device:1MiB,nvme", 8 * kMiB, 8 * kMiB, 1},
  };
  for (const Setting& setting : settings) {
    SCOPED_TRACE(::testing::Message()
                 << setting.placement << ", host " << setting.host_bytes << ", device "
                 << setting.device_bytes << ", passes " << setting.passes);
    RehearsalRequest request;
    request.model = testing::small_model();
    request.config = config_of(setting, "store");
    request.machine = fast_machine();
    request.machine.workers.threads = 2;
    request.machine.device.memory_bytes = setting.device_bytes;
    request.machine.drive.read_bytes_per_second = request.machine.drive.write_bytes_per_second =
        1e9;
    request.machine.drive.latency = 50us;
    request.costs.assign(request.model.units.size(), {.forward_s = 1e-4, .backward_s = 2e-4});
    request.steps = kSteps;
    request.micro_batches = setting.passes;
    const RehearsedRank rank = rehearse(request).front();
    const std::vector<std::uint64_t> real = real_bytes(setting);
    for (std::size_t i = 0; i < real.size(); ++i)
      EXPECT_EQ(rank.counted(kLinks[i]), real[i]) << to_string(kLinks[i]);
  }
}

/// Prints the seconds of a real run, whose trainer sleeps and whose drive is slow, beside those of
/// its rehearsal. For a machine that does nothing else: ZIGGURAT_REAL_STEPS=5 runs it.
TEST(Rehearsal, TakesTheTimeOfARealRun) {
  const auto steps = static_cast<int>(testing::number_of("ZIGGURAT_REAL_STEPS", 0));
  if (steps == 0) GTEST_SKIP() << "set ZIGGURAT_REAL_STEPS";
  const testing::ScratchDirectory scratch;
  RehearsalRequest request;
  request.model = equal_units(8, 1 << 20);
  request.config =
      config_of({"params=host,grads=host,optimizer=nvme", 64 * kMiB, 0, 1}, scratch.path());
  request.machine = fast_machine();
  request.machine.workers = {.threads = 2, .bytes_per_second = 4e9, .latency = 50us};
  request.machine.device.memory_bytes = 64 * kMiB;
  request.machine.drive.read_bytes_per_second = 200e6;
  request.machine.drive.write_bytes_per_second = 100e6;
  request.machine.drive.latency = 1ms;
  request.costs.assign(8, {.forward_s = 0.02, .backward_s = 0.04});
  request.steps = steps;
  const double rehearsed = seconds_of(rehearse(request).front());

  SimulatedDisk disk(kGiB, SimulatedDisk::Keeps::kAll);
  SimulatedEngineOptions drive;
  drive.read_bytes_per_second = request.machine.drive.read_bytes_per_second;
  drive.write_bytes_per_second = request.machine.drive.write_bytes_per_second;
  drive.latency = request.machine.drive.latency;
  drive.jitter = 0;
  const auto runtime = real_runtime(disk, drive);
  const auto device = HostDevice::create(runtime->reactor, 64 * kMiB);
  const auto engine =
      Engine::open(request.model, request.config, *runtime, *device, testing::initialize);
  const auto began = std::chrono::steady_clock::now();
  for (int step = 0; step < steps; ++step) {
    engine->prepare_step({.learning_rate = 1e-3F, .blob = {}});
    for (UnitId u = 0; u < 8; ++u) {
      engine->acquire(u);
      std::this_thread::sleep_for(20ms);
      engine->release(u);
    }
    for (UnitId u = 8; u-- > 0;) {
      engine->acquire(u);
      engine->gradient(u);
      std::this_thread::sleep_for(40ms);
      engine->release(u);
      engine->finish_gradient(u);
    }
    engine->step({.learning_rate = 1e-3F, .blob = {}});
  }
  engine->make_durable();
  const std::chrono::duration<double> real = std::chrono::steady_clock::now() - began;
  std::printf("%d steps: %.3f s, rehearsed %.3f s (%+.1f %%)\n", steps, real.count(), rehearsed,
              100 * (rehearsed / real.count() - 1));
}

}  // namespace
}  // namespace ziggurat

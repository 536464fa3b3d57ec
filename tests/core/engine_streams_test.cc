// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_streams_test.cc: what the engine owes a trainer whose work is still queued when
// it calls: memory that is read is neither reused nor overwritten. On the emulated device, with a
// stream whose events the test makes happen. What streams of a GPU add is in engine_cuda_test.cc.
//
// Where the engine must wait, a test gives it a moment to do wrong before it lets it go on. One
// that keeps its word passes however long the moment is.
#include <gmock/gmock.h>

#include <chrono>
#include <future>
#include <latch>
#include <thread>

#include "core/engine/engine.h"
#include "tests/core/engine_harness.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace engine_streams_test {

using ::testing::HasSubstr;

constexpr float kLearningRate = 0.01F;
constexpr std::chrono::milliseconds kMoment{30};

/// A stream that computes on the CPU, late.
class LateStream final : public StreamRef {
 public:
  explicit LateStream(Reactor& reactor) : reactor_(reactor) {}
  Event record() override {
    recorded_.push_back(std::make_shared<EventState>(reactor_, nullptr, nullptr));
    return Event(recorded_.back());
  }
  void wait(const Event& event) override { Host().wait(event); }

  /// Everything that was queued has run.
  void catch_up() {
    for (const std::shared_ptr<EventState>& state : std::exchange(recorded_, {}))
      state->happen(nullptr);
  }

 private:
  Reactor& reactor_;
  std::vector<std::shared_ptr<EventState>> recorded_;
};

/// A unit that a late stream reads after its release: for a moment its bytes stay, and then the
/// stream has read them.
class LateReader {
 public:
  LateReader(Engine& engine, Reactor& reactor, UnitId unit) : stream_(reactor) {
    read_ = HostDevice::view(engine.acquire(unit, stream_)).bytes;
    expected_.assign(read_.begin(), read_.end());
    engine.release(unit, stream_);
  }
  void begin_to_read() {
    thread_ = std::thread([this] {
      std::this_thread::sleep_for(kMoment);
      same_ = std::ranges::equal(read_, expected_);
      stream_.catch_up();
    });
  }
  /// What it read was what it acquired.
  bool read_well() {
    thread_.join();
    return same_;
  }
  bool overlaps(std::span<const std::byte> bytes) const {
    return bytes.data() < read_.data() + read_.size() && read_.data() < bytes.data() + bytes.size();
  }

 private:
  LateStream stream_;
  std::span<const std::byte> read_;
  std::vector<std::byte> expected_;
  std::thread thread_;
  bool same_ = false;
};

void compute(Engine& engine, UnitId unit, std::uint64_t step, int rank = 0) {
  const auto params = HostDevice::view(engine.acquire(unit));
  const auto gradient = HostDevice::view(engine.gradient(unit));
  for (std::size_t i = 0; i < params.count(); ++i)
    gradient[i] += gradient_of(value_at(params, i), unit, i, step, rank);
  engine.release(unit);
  engine.finish_gradient(unit);
}

/// Updates of parameters that the trainer uses where they live begin in backward.
TEST(EngineStreams, ParamsAreUpdatedInPlaceWhenTheirReadersHaveRead) {
  const ModelSpec model = small_model();
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.placement = parse_placement("params=device,grads=host,optimizer=nvme");
  config.speculation = EngineConfig::Speculation::kAlways;
  PlainTraining plain(model, config.clip_norm);
  Rig rig(model, config);
  for (std::uint64_t step = 0; step < 2; ++step) {
    rig.engine->prepare_step({.learning_rate = kLearningRate, .blob = {}});
    LateReader reader(*rig.engine, rig.runtime->reactor, 4);
    for (UnitId u = 5; u-- > 0;) compute(*rig.engine, u, step);
    reader.begin_to_read();
    const StepResult result = rig.engine->step({.learning_rate = kLearningRate, .blob = {}});
    EXPECT_TRUE(reader.read_well()) << "step " << step;
    EXPECT_EQ(result.grad_norm, plain.step(step, kLearningRate));
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, model));
}

/// Room for little more than the smallest plan.
constexpr std::uint64_t kTightBytes = 1280 * kKiB;

TEST(EngineStreams, AnAccumulatorIsClearedWhenTheReadersOfItsMemoryHaveRead) {
  const ModelSpec model = small_model();
  const ScratchDirectory directory;
  EngineConfig config = small_config(directory.path());
  config.max_reuse_distance = 0;
  Rig rig(model, config, 2, kTightBytes);
  LateReader reader(*rig.engine, rig.runtime->reactor, 3);
  reader.begin_to_read();
  const auto gradient = HostDevice::view(rig.engine->gradient(0));
  EXPECT_TRUE(reader.overlaps(std::as_bytes(gradient))) << "the case that is meant";
  EXPECT_TRUE(std::ranges::all_of(gradient, [](float value) { return value == 0.0F; }));
  EXPECT_TRUE(reader.read_well());
}

TEST(EngineStreams, AGatherFillsAPlaceWhenItsReadersHaveRead) {
  const ModelSpec model = small_model();
  const ScratchDirectory directory;
  const auto runtimes = connected_runtimes(2, 1);
  PlainTraining plain(model, 0);
  plain.world_size = 2;
  plain.step(0, kLearningRate);
  bool met = false;
  expect_none(run_ranks(2, [&](int rank) {
    EngineConfig config = small_config(directory.path());
    config.clip_norm = 0;
    config.max_reuse_distance = 0;
    config.strategy.zero_stage = 3;
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config, 2 * kMiB);
    Engine& engine = *rig.engine;
    std::unique_ptr<LateReader> reader;
    if (rank == 0) {
      reader = std::make_unique<LateReader>(engine, rig.runtime.reactor, 0);
      reader->begin_to_read();
    } else {
      engine.acquire(0);
      engine.release(0);
    }
    for (UnitId u = 1; u < 5; ++u) {
      const auto params = HostDevice::view(engine.acquire(u));
      if (reader) met = met || reader->overlaps(params.bytes);
      engine.release(u);
    }
    EXPECT_TRUE(!reader || reader->read_well());
    for (UnitId u = 5; u-- > 0;) compute(engine, u, 0, rank);
    engine.step({.learning_rate = kLearningRate, .blob = {}});
    EXPECT_TRUE(same_params(engine, plain, model)) << "rank " << rank;
    engine.make_durable();
  }));
  EXPECT_TRUE(met) << "the case that is meant";
}

/// A stream on which nothing waits: what is queued on it never begins.
class IdleStream final : public StreamRef {
 public:
  Event record() override { return {}; }
  void wait(const Event&) override {}
};

/// Parameters still come to one rank's device when its trainer closes: no other rank waits for it.
TEST(EngineStreams, AnEngineIsClosedInPeaceWhileItsOwnParametersCome) {
  const ModelSpec model = small_model();
  const ScratchDirectory directory;
  const auto runtimes = connected_runtimes(2, 1);
  std::latch closed(1);
  expect_none(run_ranks(2, [&](int rank) {
    EngineConfig config = small_config(directory.path());
    config.max_reuse_distance = 0;  // a unit that is released gives its place to the next
    RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, config, 2 * kMiB);
    Reactor& reactor = rig.runtime.reactor;
    rig.engine->acquire(4);
    rig.engine->release(4);
    if (rank == 0) {
      LateReader reader(*rig.engine, reactor, 4);
      IdleStream idle;
      EXPECT_TRUE(reader.overlaps(HostDevice::view(rig.engine->acquire(4, idle)).bytes))
          << "the case that is meant";
      reader.begin_to_read();
      rig.engine.reset();
      EXPECT_TRUE(reader.read_well());
      closed.count_down();
    } else {
      closed.wait();
      rig.engine->acquire(4);
      rig.engine->release(4);
    }
    reactor.block_on([](Communicator& ranks) -> Task<> {
      co_await ranks.barrier();  // which begins on the thread that calls it
    }(*rig.runtime.ranks));
  }));
}

/// Threads of one trainer, each with units of its own.
TEST(EngineStreams, CallsComeFromAnyThread) {
  const ModelSpec model = small_model();
  const ScratchDirectory directory;
  const EngineConfig config = small_config(directory.path());
  PlainTraining plain(model, config.clip_norm);
  Rig rig(model, config);
  for (std::uint64_t step = 0; step < 4; ++step) {
    std::vector<std::thread> threads;
    for (const UnitId first : {0U, 1U}) {
      threads.emplace_back([&, first] {
        for (UnitId u = first; u < 5; u += 2) {
          EXPECT_EQ(rig.engine->generation(), step);
          compute(*rig.engine, u, step);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const StepResult result = rig.engine->step({.learning_rate = kLearningRate, .blob = {}});
    EXPECT_EQ(result.grad_norm, plain.step(step, kLearningRate));
  }
  EXPECT_TRUE(same_params(*rig.engine, plain, model));
}

}  // namespace engine_streams_test
}  // namespace ziggurat::testing

// SPDX-License-Identifier: Apache-2.0
// tests/faults/engine_fault_test.cc: a drive that fails under training: whatever it does, at any
// call, the trainer is told, and what was promised to be durable is there afterwards, bit for bit.
//
// The real engine on a real file, everything on NVMe, a fault planted between the two. Where the
// calls of one kind are many, some of them are struck, evenly.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <optional>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "base/error.h"
#include "base/log.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {
namespace engine_fault_test {

constexpr std::uint64_t kSteps = 3;
constexpr float kLearningRate = 0.01F;
constexpr std::uint64_t kOnceMax = 5;  // of one kind's calls
constexpr std::uint64_t kPersistentMax = 3;

struct Kind {
  const char* name;
  Fault fault;
  bool passes = false;  ///< one of it must not be noticed
};

std::vector<Kind> kinds() {
  using enum FaultPoint;
  std::vector<Kind> all{{"read EIO", Fault::fail(kRead, EIO)},
                        {"read EAGAIN", Fault::fail(kRead, EAGAIN), true},
                        {"read short", Fault::shorten(kRead, 4096)},
                        {"read zero", Fault::zero(kRead)},
                        {"write EIO", Fault::fail(kWrite, EIO)},
                        {"write ENOSPC", Fault::fail(kWrite, ENOSPC)},
                        {"write EINTR", Fault::fail(kWrite, EINTR), true},
                        {"write short", Fault::shorten(kWrite, 4096)},
                        {"write zero", Fault::zero(kWrite)},
                        {"write misdirected", Fault::misdirect(65536)},
                        {"sync EIO", Fault::fail(kSync, EIO)},
                        {"sync ENOSPC", Fault::fail(kSync, ENOSPC)}};
  for (const auto point :
       {kOpen, kFileSize, kAllocate, kAlignment, kRename, kRemove, kExists, kSyncDirectory})
    all.push_back({"name-level EIO", Fault::fail(point, EIO)});
  return all;
}

class EngineFaults : public ::testing::Test {
 protected:
  EngineFaults() {
    log().set_level(LogLevel::kOff);  // hundreds of runs fail alike
    expected.emplace_back(model, config().clip_norm);
    while (expected.size() <= kSteps + 1) {
      expected.push_back(expected.back());
      expected.back().step(expected.size() - 2, kLearningRate);
    }
  }

  EngineConfig config() const {
    EngineConfig all_nvme = small_config(directory);
    all_nvme.placement = parse_placement("all=nvme");
    return all_nvme;
  }

  struct Outcome {
    std::optional<Error> error;
    std::uint64_t promised = 0;  ///< newest generation that was said to be durable
    bool made = false;           ///< open() succeeded: generation 0 is promised
  };

  /// Trains on a drive of which `fault` is true; `watch` sees it while it still stands.
  Outcome train(const Fault* fault, const std::function<void(const FaultyEngine&)>& watch = {}) {
    std::filesystem::remove_all(directory);
    std::filesystem::create_directories(directory);
    FaultyEngine* drive = nullptr;
    RuntimeOptions options{.threads = 2, .trace_path = ""};
    options.io_engine = [&](Reactor& reactor, const std::string& path) {
      auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
      if (fault != nullptr) faulty->plan(*fault);
      drive = faulty.get();
      return faulty;
    };
    const auto runtime = Runtime::create(options);
    const auto device = HostDevice::create(runtime->reactor, 4 * kMiB, nullptr, &runtime->metrics);
    Outcome outcome;
    std::unique_ptr<Engine> engine;
    try {
      engine = Engine::open(model, config(), *runtime, *device, initialize);
      outcome.made = true;
      for (std::uint64_t step = 0; step < kSteps; ++step)
        train_step(*engine, model, step, kLearningRate);
      engine->make_durable();
      EXPECT_TRUE(same_params(*engine, expected[kSteps], model)) << "wrong, and no word of it";
    } catch (const Error& error) {
      outcome.error = error;
    }
    if (engine) outcome.promised = engine->durable_generation();
    if (engine && watch) watch(*drive);
    return outcome;
  }

  /// Opens what is left on a sound drive and compares it.
  void expect_kept(const Outcome& outcome, const Kind& kind) {
    const auto runtime = Runtime::create({.threads = 2, .trace_path = ""});
    const auto device = HostDevice::create(runtime->reactor, 4 * kMiB, nullptr, &runtime->metrics);
    std::unique_ptr<Engine> engine;
    try {
      engine = Engine::open(model, config(), *runtime, *device, initialize);
    } catch (const Error& error) {
      // Only a drive that lied may have lost a generation that it acknowledged.
      EXPECT_EQ(kind.fault.effect, Fault::Effect::kMisdirect) << error.what();
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss) << error.what();
      return;
    }
    if (!outcome.made && !engine->resumed()) return;  // it had not got so far
    EXPECT_TRUE(engine->resumed());
    ASSERT_LE(engine->generation(), kSteps);
    EXPECT_TRUE(same_params(*engine, expected[engine->generation()], model));
    if (kind.fault.effect == Fault::Effect::kMisdirect) return;
    EXPECT_GE(engine->generation(), outcome.promised);
  }

  void strike(const Kind& kind, const Fault& fault) {
    SCOPED_TRACE(fmt::format("{} {} call {} of its point ({})", kind.name,
                             fault.persistent ? "from" : "at", fault.position,
                             static_cast<int>(fault.point)));
    const Outcome outcome = train(&fault);
    if (kind.passes && !fault.persistent) {
      EXPECT_FALSE(outcome.error) << outcome.error->what();
    }
    if (outcome.error) {
      ++noticed;
      EXPECT_THAT(outcome.error->what(), ::testing::HasSubstr(directory)) << "names the path";
      if (fault.effect == Fault::Effect::kErrno) {
        EXPECT_EQ(outcome.error->native(), fault.error_number) << outcome.error->what();
      }
    }
    expect_kept(outcome, kind);
    ++placed;
  }

  ScratchDirectory scratch;
  std::string directory = scratch.path() + "/store";
  ModelSpec model = small_model();
  std::vector<PlainTraining> expected;  // by generation
  int placed = 0;
  int noticed = 0;
};

TEST_F(EngineFaults, TheTrainerIsToldAndNothingPromisedIsLost) {
  std::vector<std::uint64_t> calls;
  const Outcome clean = train(nullptr, [&](const FaultyEngine& drive) {
    for (std::size_t point = 0; point < static_cast<std::size_t>(FaultPoint::kCount); ++point)
      calls.push_back(drive.calls(static_cast<FaultPoint>(point)));
  });
  ASSERT_FALSE(clean.error) << clean.error->what();
  ASSERT_EQ(clean.promised, kSteps);
  for (const Kind& kind : kinds()) {
    const std::uint64_t count = calls[static_cast<std::size_t>(kind.fault.point)];
    for (const bool persistent : {false, true}) {
      const bool lies = kind.fault.effect == Fault::Effect::kMisdirect;
      if (persistent && lies) continue;  // nothing can be promised on such a drive
      const std::uint64_t most = std::min(count, persistent ? kPersistentMax : kOnceMax);
      for (std::uint64_t i = 0; i < most; ++i) {
        const Fault fault = kind.fault.at(i * count / most);
        strike(kind, persistent ? fault.from_then_on() : fault);
        if (HasFailure()) return;
      }
    }
  }
  fmt::print("  {} faults placed, {} ended the run with an error\n", placed, noticed);
  EXPECT_GE(placed, 100);
}

}  // namespace engine_fault_test
}  // namespace ziggurat::testing

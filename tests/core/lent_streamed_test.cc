// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_streamed_test.cc: parameters that the engine keeps and brings to a device unit by
// unit have the bits of plain arrays, wherever they and their records are; who waits for memory;
// and what is refused.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <tuple>

#include "base/error.h"
#include "base/memory_exhausted.h"
#include "core/engine/lent_engine.h"
#include "tests/core/lent_kinds.h"
#include "tests/core/lent_trainer.h"
#include "tests/core/streamed_model.h"
#include "tiers/device/host_device.h"

namespace ziggurat::testing {
namespace lent_streamed_test {

using ::testing::HasSubstr;
using enum StateFormat;

/// A trainer, and an engine that streams some of its parameters.
class Streamed {
 public:
  Streamed(ModelSpec model, EngineConfig config, std::uint64_t device_bytes,
           std::optional<Rounding> rounding = {})
      : model_(std::move(model)),
        config_(std::move(config)),
        device_bytes_(device_bytes),
        trainer(model_, config_.optimizer.state, rounding) {
    config_.counts_steps = true;
  }

  void open(std::size_t threads = 2) {
    close();
    runtime_ = runtime_of(threads);
    device_ = HostDevice::create(runtime_->reactor, device_bytes_);
    engine = LentEngine::open(model_, config_, *runtime_, trainer.lent(), device_.get());
    forget();
  }
  void close() {
    engine.reset();
    device_.reset();
    runtime_.reset();
  }
  /// A streamed parameter's values here are nobody's, until fetch().
  void forget() {
    for (std::size_t p = 0; p < kUnitOfParam.size(); ++p)
      if (kUnitOfParam[p] >= 0) std::ranges::fill(trainer.params[p].bytes, std::byte{0x33});
  }
  std::byte* place(ParamId param) const {
    return reinterpret_cast<std::byte*>(engine->place(param).bytes.address());
  }
  template <class Use>
  void with_unit(StreamedUnit unit, const Use& use) {
    Host host;
    engine->acquire(unit, host);
    for (ParamId p = 0; p < kUnitOfParam.size(); ++p)
      if (kUnitOfParam[p] == static_cast<int>(unit)) use(p);
    engine->release(unit, host);
  }
  /// Reads streamed parameters through the device.
  void fetch() {
    for (StreamedUnit u = 0; u < kStreamedUnits; ++u) {
      with_unit(u, [&](ParamId p) {
        std::memcpy(trainer.params[p].bytes.data(), place(p), trainer.params[p].bytes.size());
      });
    }
    engine->wait_all_updated();
  }
  /// Makes a step in which streamed parameters are written at home first.
  void step(const LentStep& its = {}) {
    if (!its.written.empty()) {
      fetch();
      for (StreamedUnit u = 0; u < kStreamedUnits; ++u) {
        with_unit(u, [&](ParamId p) {
          if (!its.written.contains(p)) return;
          for (std::size_t i = 0; i < trainer.params[p].count(); i += 3)
            trainer.params[p].set(i, 0.125F);
          std::memcpy(place(p), trainer.params[p].bytes.data(), trainer.params[p].bytes.size());
          Host host;
          engine->store_param(p, host);
        });
      }
    }
    trainer.step(*engine, its);
  }

 private:
  ModelSpec model_;
  EngineConfig config_;
  std::uint64_t device_bytes_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<HostDevice> device_;

 public:
  LentTrainer trainer;
  std::unique_ptr<LentEngine> engine;
};

class StreamedBits : public ::testing::TestWithParam<std::tuple<LentKind, Where, Tier>> {};

INSTANTIATE_TEST_SUITE_P(
    Formats, StreamedBits,
    ::testing::Combine(::testing::Values(LentKind{kFp32, DType::kFloat32},
                                         LentKind{kFp32, DType::kBFloat16},
                                         LentKind{kBf16Moments, DType::kFloat32},
                                         LentKind{k8Bit, DType::kBFloat16},
                                         LentKind{kSplit, DType::kBFloat16},
                                         LentKind{kBf16, DType::kBFloat16},
                                         LentKind{kFp32, DType::kBFloat16, Rounding::kStochastic}),
                       ::testing::Values(Where::kMemory, Where::kHost, Where::kNvme),
                       ::testing::Values(Tier::kDevice, Tier::kHost, Tier::kNvme)),
    [](const auto& one) {
      return fmt::format("{}_params_{}",
                         name_of(std::tuple(std::get<0>(one.param), std::get<1>(one.param))),
                         to_string(std::get<2>(one.param)));
    });

TEST_P(StreamedBits, AreThoseOfPlainArraysWhateverHappens) {
  const auto& [kind, where, tier] = GetParam();
  if (where == Where::kMemory && tier == Tier::kNvme) GTEST_SKIP() << "there is no drive";
  const std::vector<LentStep> steps{{},
                                    {.left_out = {0, 4, 7}},
                                    {.left_out = {}, .written = {1, 4}},
                                    {.left_out = {1}, .written = {0, 3}},
                                    {.left_out = {0, 1, 2, 3, 4, 5, 6, 7}},
                                    {.left_out = {2, 4}, .written = {2, 3, 4, 5}},
                                    {.left_out = {5}, .written = {5}},
                                    {}};
  const ScratchDirectory directory;
  EngineConfig config = config_of(kind, where, directory);
  config.placement.params = tier;
  Streamed its(streamed_model(kind.dtype), config, 4 * kMiB, kind.rounding);
  its.open();
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i % 2 == 0) its.engine->expect_gradients();
    if (i % 3 == 1) its.engine->expect_units(std::vector<StreamedUnit>{2, 0, 1});
    its.step(steps[i]);
    its.fetch();
    ASSERT_TRUE(its.trainer.same()) << "step " << i;
    if (i % 3 != 2 || where == Where::kMemory) continue;
    its.engine->make_durable();
    its.trainer.forget();
    its.open(3);
    ASSERT_EQ(its.engine->generation(), i + 1);
    its.fetch();
    ASSERT_TRUE(its.trainer.same()) << "resumed after step " << i;
  }
}

/// fp32 on NVMe, with the parameters there too.
EngineConfig on_nvme(const ScratchDirectory& directory) {
  EngineConfig config = config_of({kFp32, DType::kFloat32}, Where::kNvme, directory);
  config.placement.params = Tier::kNvme;
  return config;
}

// Before the parameters were streamed, small ones of several units shared a record with lent ones.
TEST(StreamedParams, GoOnFromAStoreOfATrainerThatLentThemAll) {
  const ScratchDirectory directory;
  EngineConfig config = on_nvme(directory);
  config.counts_steps = true;
  Streamed its(streamed_model(DType::kFloat32), config, 4 * kMiB);
  {
    const auto runtime = runtime_of(2);
    const auto engine = LentEngine::open(lent_model(kStreamedCounts, DType::kFloat32), config,
                                         *runtime, its.trainer.lent());
    its.trainer.step(*engine);
    engine->make_durable();
  }
  its.trainer.forget();
  its.open();
  its.fetch();
  ASSERT_TRUE(its.trainer.same()) << "resumed";
  its.step({.left_out = {1}});
  its.step({.left_out = {0}, .written = {0, 1, 7}});
  its.fetch();
  EXPECT_TRUE(its.trainer.same());
}

TEST(StreamedParams, HaveTheSameBitsWithinNarrowerLimits) {
  struct Limits {
    std::uint64_t live, distance, ahead, threshold;
  };
  for (const auto& [live, distance, ahead, threshold] :
       {Limits{.live = 0, .distance = 0, .ahead = 0, .threshold = 0},
        Limits{.live = 400'000, .distance = 50'000, .ahead = 20'000, .threshold = 1'000},
        Limits{.live = 1'000, .distance = 1, .ahead = 1, .threshold = 1'000'000}}) {
    const ScratchDirectory directory;
    EngineConfig config = on_nvme(directory);
    config.max_live_parameters = live;
    config.max_reuse_distance = distance;
    config.prefetch_elements_max = ahead;
    config.param_persistence_threshold = threshold;
    Streamed its(streamed_model(DType::kFloat32), config, 4 * kMiB);
    its.open();
    for (const LentStep& step : {LentStep{}, LentStep{.left_out = {}, .written = {1, 3}},
                                 LentStep{.left_out = {4}, .written = {4, 7}}, LentStep{}}) {
      its.step(step);
      its.fetch();
      ASSERT_TRUE(its.trainer.same()) << "max_reuse_distance " << distance;
    }
  }
}

TEST(StreamedParams, AreNotKeptOrBroughtAheadBeyondTheLimits) {
  const auto misses_with = [](std::uint64_t elements) {
    const ScratchDirectory directory;
    EngineConfig config = on_nvme(directory);
    config.max_reuse_distance = elements;
    config.prefetch_elements_max = elements;
    Streamed its(streamed_model(DType::kFloat32), config, 4 * kMiB);
    its.open();
    its.step();
    its.fetch();
    const std::uint64_t before = its.engine->metrics().value(Counter::kPrefetchMisses);
    for (int i = 0; i < 5; ++i) its.fetch();
    return its.engine->metrics().value(Counter::kPrefetchMisses) - before;
  };
  EXPECT_EQ(misses_with(kElementsMax), 0);
  EXPECT_GT(misses_with(0), 5);
}

class StreamedZeros : public ::testing::TestWithParam<std::tuple<Tier, bool>> {};

INSTANTIATE_TEST_SUITE_P(Homes, StreamedZeros,
                         ::testing::Combine(::testing::Values(Tier::kDevice, Tier::kHost,
                                                              Tier::kNvme),
                                            ::testing::Bool()),
                         [](const auto& one) {
                           return fmt::format("params_{}{}", to_string(std::get<0>(one.param)),
                                              std::get<1>(one.param) ? "_of_a_used_device" : "");
                         });

TEST_P(StreamedZeros, AreWhatNobodyGivesBeginsWith) {
  const auto& [tier, used] = GetParam();
  const ScratchDirectory directory;
  const auto runtime = runtime_of(2);
  const auto device = HostDevice::create(runtime->reactor, 4 * kMiB);
  if (used) {
    const DeviceBuffer all = device->allocate(2 * kMiB, Purpose::kParams);
    std::memset(all.data(), 7, all.size_bytes());
  }
  EXPECT_EQ(device->holds_zeros(), !used);
  ModelSpec model = lent_model({20'000}, DType::kFloat32);
  model.units[0].params[0].streamed = 0;
  const std::vector<TypedSpan<std::byte>> none(1);
  EngineConfig config = on_nvme(directory);
  config.placement.params = tier;
  const auto engine = LentEngine::open(model, config, *runtime, none, device.get());
  Host host;
  engine->acquire(0, host);
  const TypedDeviceSpan<std::byte> place = engine->place(0);
  const std::span values(reinterpret_cast<const float*>(place.bytes.address()), place.count());
  EXPECT_EQ(values.size(), 20'000U);
  EXPECT_THAT(values, ::testing::Each(0.0F));
  engine->release(0, host);
}

class StreamedRefusals : public ::testing::Test {
 protected:
  /// The words of the error that `call` throws.
  template <class Call>
  std::string refusal(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  }
  void open() { its_.open(); }

  ScratchDirectory directory_;
  Streamed its_{streamed_model(DType::kFloat32), on_nvme(directory_), 4 * kMiB};
  Host host_;
};

TEST_F(StreamedRefusals, ChangeNothing) {
  open();
  LentEngine& engine = *its_.engine;
  EXPECT_THAT(refusal([&] { engine.acquire(3, host_); }), HasSubstr("has only units 0 to 2"));
  EXPECT_THAT(refusal([&] { engine.release(1, host_); }), HasSubstr("unit is not acquired"));
  EXPECT_THAT(refusal([&] { engine.place(3); }), HasSubstr("is away: acquire its unit 1"));
  EXPECT_THAT(refusal([&] { engine.place(0); }), HasSubstr("is in the caller's memory"));
  EXPECT_THAT(refusal([&] { engine.store_param(3, host_); }), HasSubstr("is away"));
  EXPECT_THAT(refusal([&] { engine.lend_param(3, its_.trainer.params[3].span()); }),
              HasSubstr("the engine keeps this parameter"));
  EXPECT_THAT(refusal([&] {
                engine.expect_units(std::vector<StreamedUnit>{0, 7});
              }),
              HasSubstr("has only units 0 to 2"));
  engine.acquire(1, host_);
  engine.acquire(1, host_);
  engine.release(1, host_);
  EXPECT_THAT(refusal([&] { its_.trainer.step(engine); }), HasSubstr("unit 1 is acquired"));
  engine.release(1, host_);
  EXPECT_THAT(refusal([&] { engine.release(1, host_); }), HasSubstr("unit is not acquired"));
  its_.step();
  its_.fetch();
  EXPECT_TRUE(its_.trainer.same());
}

TEST_F(StreamedRefusals, UnitsWithoutStreamedParameters) {
  const auto runtime = runtime_of(1);
  const auto engine = LentEngine::open(lent_model(kStreamedCounts, DType::kFloat32),
                                       on_nvme(directory_), *runtime, its_.trainer.lent());
  EXPECT_THAT(refusal([&] { engine->acquire(0, host_); }), HasSubstr("there are no units"));
}

TEST_F(StreamedRefusals, UnitsThatAreNumberedWithGaps) {
  const auto runtime = runtime_of(1);
  const auto device = HostDevice::create(runtime->reactor, 4 * kMiB);
  ModelSpec model = streamed_model(DType::kFloat32);
  model.units[7].params[0].streamed = 9;
  EXPECT_THAT(refusal([&] {
                LentEngine::open(model, on_nvme(directory_), *runtime, its_.trainer.lent(),
                                 device.get());
              }),
              HasSubstr("number units from 0, without gaps"));
}

TEST_F(StreamedRefusals, ADeviceThatDoesNotHoldTheLargestUnit) {
  Streamed small(streamed_model(DType::kFloat32), on_nvme(directory_), kMiB);
  try {
    small.open();
    FAIL() << "opened";
  } catch (const MemoryExhausted& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("`device_memory` 1.0 MiB is too small"), HasSubstr("unit 1")));
    Streamed enough(streamed_model(DType::kFloat32), on_nvme(directory_),
                    error.shortage().smallest_bytes);
    enough.open();
    enough.step();
    enough.fetch();
    EXPECT_TRUE(enough.trainer.same());
  }
}

/// Two units of which a device holds one.
class OneAtATime : public ::testing::Test {
 protected:
  OneAtATime() {
    for (StreamedUnit u = 0; u < 2; ++u) model_.units[u].params[0].streamed = u;
    EngineConfig config = on_nvme(directory_);
    config.placement.params = Tier::kHost;
    engine_ = LentEngine::open(model_, config, *runtime_, trainer_.lent(), device_.get());
  }

  ScratchDirectory directory_;
  ModelSpec model_ = lent_model({20'000, 20'000}, DType::kFloat32);
  LentTrainer trainer_{model_, {}};
  std::unique_ptr<Runtime> runtime_ = runtime_of(2);
  std::unique_ptr<HostDevice> device_ = HostDevice::create(runtime_->reactor, 160 * kKiB);
  std::unique_ptr<LentEngine> engine_;
  Host host_;
};

TEST_F(OneAtATime, AThreadThatHoldsTheOtherUnitGetsAnError) {
  engine_->acquire(0, host_);
  try {
    engine_->acquire(1, host_);
    FAIL() << "there was room";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("acquire(unit 1)"), HasSubstr("what is acquired (unit 0)")));
  }
  engine_->release(0, host_);
  engine_->acquire(1, host_);
  engine_->release(1, host_);
  trainer_.step(*engine_);
}

/// A thread that acquires unit 1, and releases it again when it has it.
class Waiter {
 public:
  explicit Waiter(LentEngine& engine)
      : thread_([this, &engine] {
          Host host;
          begins_ = true;
          try {
            engine.acquire(1, host);
            engine.release(1, host);
          } catch (const Error& error) {
            refused_ = error.code();
          }
        }) {
    while (!begins_) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // by now it waits, most likely
  }
  std::optional<ErrorCode> ended() {
    thread_.join();
    return refused_;
  }

 private:
  std::atomic<bool> begins_ = false;
  std::optional<ErrorCode> refused_;
  std::thread thread_;
};

TEST_F(OneAtATime, AUnitThatSomebodyWaitsForIsNotAcquired) {
  engine_->acquire(0, host_);
  Waiter waiter(*engine_);
  EXPECT_THROW(engine_->release(1, host_), Error);
  EXPECT_THROW(engine_->place(1), Error);
  EXPECT_THROW(engine_->store_param(1, host_), Error);
  EXPECT_THROW(trainer_.step(*engine_), Error);
  engine_->release(0, host_);
  EXPECT_EQ(waiter.ended(), std::nullopt);
}

TEST_F(OneAtATime, AWaiterIsRefusedWhenNobodyIsLeftWhoCouldRelease) {
  engine_->acquire(0, host_);
  Waiter waiter(*engine_);
  EXPECT_THROW(engine_->acquire(1, host_), Error);  // both wait
  engine_->release(0, host_);
  const std::optional<ErrorCode> refused = waiter.ended();
  EXPECT_EQ(refused.value_or(ErrorCode::kResourceExhausted), ErrorCode::kResourceExhausted);
}

TEST_F(OneAtATime, AWaiterIsToldThatTheEngineEnds) {
  engine_->acquire(0, host_);
  Waiter waiter(*engine_);
  engine_->end_waits();
  EXPECT_EQ(waiter.ended(), ErrorCode::kCancelled);
  engine_->release(0, host_);
}

// Such as a write to a server that does not answer.
TEST_F(OneAtATime, AWaiterIsToldThatTheEngineEndsWhileOtherWorkHangs) {
  Reactor& reactor = runtime_->reactor;
  reactor.post([&] { reactor.external_begin(); });
  engine_->acquire(0, host_);
  Waiter waiter(*engine_);
  engine_->end_waits();
  EXPECT_EQ(waiter.ended(), ErrorCode::kCancelled);
  reactor.post([&] { reactor.external_end(); });
  engine_->release(0, host_);
}

// Both wait for the update, and one of them loads the unit.
TEST_F(OneAtATime, ThreadsAcquireTheSameUnitRightAfterAStep) {
  for (int i = 0; i < 20; ++i) {
    trainer_.step(*engine_);
    Waiter waiter(*engine_);
    engine_->acquire(1, host_);
    engine_->release(1, host_);
    ASSERT_EQ(waiter.ended(), std::nullopt);
  }
}

TEST_F(OneAtATime, AThreadWaitsUntilAnotherReleases) {
  constexpr int kTimes = 10'000;
  std::atomic<int> held = 0;
  const auto use = [&](StreamedUnit unit) {
    Host host;
    for (int i = 0; i < kTimes / 2; ++i) {
      engine_->acquire(unit, host);
      EXPECT_EQ(held.fetch_add(1), 0) << "both units are on the device";
      held.fetch_sub(1);
      engine_->release(unit, host);
    }
  };
  std::thread other(use, 1);
  use(0);
  other.join();
}

}  // namespace lent_streamed_test
}  // namespace ziggurat::testing

// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_cuda_test.cc: parameters that an engine streams to a GPU, over the double of the
// CUDA runtime: the bits of plain arrays, whatever order the double runs its streams in; what a
// stream wrote comes home; who waits for memory; and what a lost GPU does.
//
// ZIGGURAT_SEEDS: orders of streams that each run is tried with (2).
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <tuple>

#include "base/error.h"
#include "base/memory_exhausted.h"
#include "tests/core/streamed_gpu.h"
#include "tests/cuda_double/clockwork.h"

namespace ziggurat::testing {
namespace lent_cuda_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum StateFormat;

/// Enough for all parameters if they live on the GPU, else hardly more than the largest unit.
std::uint64_t device_bytes(Tier params, DType dtype) {
  if (params == Tier::kDevice) return 4 * kMiB;
  return (size_bytes(dtype) == 4 ? 1440 : 730) * kKiB;
}

/// Runs `body` with several orders of streams, each on a fresh machine.
void for_each_seed(const std::function<void()>& body) {
  const std::uint64_t seeds = number_of("ZIGGURAT_SEEDS", 2);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    cuda_double::reset(seed);
    body();
    EXPECT_THAT(cuda_double::report(), IsEmpty());
    if (::testing::Test::HasFailure()) return;
  }
}

/// Steps with and without gradients, of parameters that were written on the GPU and others.
const std::vector<LentStep>& steps() {
  static const std::vector<LentStep> all{{},
                                         {.left_out = {0, 4, 7}, .written = {1, 4}},
                                         {.left_out = {1}, .written = {0, 3}},
                                         {.left_out = {2, 4}, .written = {2, 3, 4, 5}},
                                         {}};
  return all;
}

/// Makes steps(), opens the engine anew in between if there is a store, and compares all values.
void train(StreamedGpu& its, bool reopens) {
  its.open();
  for (std::size_t i = 0; i < steps().size(); ++i) {
    if (i % 2 == 0) its.engine->expect_gradients();
    if (i % 3 == 1) its.engine->expect_units(std::vector<StreamedUnit>{2, 0, 1});
    its.step(steps()[i]);
    its.fetch();
    ASSERT_TRUE(its.trainer.same()) << "step " << i;
    if (i != 2 || !reopens) continue;
    its.engine->make_durable();
    its.trainer.forget();
    its.open(3);
    ASSERT_EQ(its.engine->generation(), i + 1);
    its.fetch();
    ASSERT_TRUE(its.trainer.same()) << "resumed after step " << i;
  }
}

class StreamedToGpu : public ::testing::TestWithParam<std::tuple<LentKind, Where, Tier>> {};

INSTANTIATE_TEST_SUITE_P(
    Formats, StreamedToGpu,
    ::testing::Combine(::testing::Values(LentKind{kFp32, DType::kFloat32},
                                         LentKind{kBf16Moments, DType::kFloat32},
                                         LentKind{kSplit, DType::kBFloat16}),
                       ::testing::Values(Where::kMemory, Where::kNvme),
                       ::testing::Values(Tier::kDevice, Tier::kHost, Tier::kNvme)),
    [](const auto& one) {
      return fmt::format("{}_params_{}",
                         name_of(std::tuple(std::get<0>(one.param), std::get<1>(one.param))),
                         to_string(std::get<2>(one.param)));
    });

TEST_P(StreamedToGpu, HaveTheBitsOfPlainArrays) {
  const auto& [kind, where, tier] = GetParam();
  if (where == Where::kMemory && tier == Tier::kNvme) GTEST_SKIP() << "there is no drive";
  for_each_seed([&] {
    const ScratchDirectory directory;
    EngineConfig config = config_of(kind, where, directory);
    config.placement.params = tier;
    StreamedGpu its(streamed_model(kind.dtype), config, device_bytes(tier, kind.dtype));
    train(its, where != Where::kMemory);
  });
}

class StreamedOn : public ::testing::TestWithParam<Tier> {
 protected:
  EngineConfig config(const ScratchDirectory& directory) const {
    EngineConfig config = config_of({kFp32, DType::kFloat32}, Where::kNvme, directory);
    config.placement.params = GetParam();
    return config;
  }
};

INSTANTIATE_TEST_SUITE_P(Tiers, StreamedOn,
                         ::testing::Values(Tier::kDevice, Tier::kHost, Tier::kNvme),
                         [](const auto& one) { return std::string(to_string(one.param)); });

TEST_P(StreamedOn, AUnitMayHaveTwoTypes) {
  for_each_seed([&] {
    const ScratchDirectory directory;
    StreamedGpu its(mixed_streamed_model(), config(directory),
                    device_bytes(GetParam(), DType::kFloat32));
    train(its, true);
  });
}

// The last units are frozen: each run of the engine gets their values anew.
TEST_P(StreamedOn, FrozenParametersAreWhatTheTrainerWroteLast) {
  ModelSpec model = lent_model({20'000, 300, 40'000, 70}, DType::kFloat32);
  const std::vector<StreamedUnit> units{0, 1, 1, 2};
  for (std::size_t p = 0; p < units.size(); ++p) {
    model.units[p].params[0].streamed = units[p];
    model.units[p].params[0].frozen = p >= 2;
  }
  const LentStep trained{.left_out = {2, 3}};
  for_each_seed([&] {
    const ScratchDirectory directory;
    const std::uint64_t one_unit_bytes = GetParam() == Tier::kDevice ? 4 * kMiB : 300 * kKiB;
    StreamedGpu its(model, config(directory), one_unit_bytes);
    its.open();
    its.step(trained);
    its.fetch();
    ASSERT_TRUE(its.trainer.same()) << "as given at open";
    its.step({.left_out = {2, 3}, .written = {2, 3}});
    its.fetch();
    ASSERT_TRUE(its.trainer.same()) << "written on the GPU";
    its.step(trained);
    its.engine->make_durable();
    its.fetch();
    its.open();
    its.fetch();
    EXPECT_TRUE(its.trainer.same()) << "given to the next engine";
  });
}

// Work that uses a unit goes on after the engine has ended.
TEST_P(StreamedOn, AnEngineMayEndUnderItsReaders) {
  for_each_seed([&] {
    const ScratchDirectory directory;
    StreamedGpu its(streamed_model(DType::kFloat32), config(directory), 4 * kMiB);
    its.open();
    its.engine->expect_units(std::vector<StreamedUnit>{2, 0});
    GpuStreams::One& stream = its.streams->next();
    its.engine->acquire(1, *stream.ref);
    for (int i = 0; i < 3; ++i)
      GpuStreams::copy(stream, its.streams->pinned(0), its.place(4), 4 * 300'000,
                       cudaMemcpyDeviceToHost);
    its.engine->release(1, *stream.ref);
    const std::uint64_t durable = its.engine->durable_generation();
    its.engine.reset();
    EXPECT_EQ(durable, 0U);
  });
}

TEST_P(StreamedOn, AStoredParameterMayBeReadBeforeTheFirstStep) {
  cuda_double::reset(5);
  const ScratchDirectory directory;
  StreamedGpu its(streamed_model(DType::kFloat32), config(directory),
                  device_bytes(GetParam(), DType::kFloat32));
  its.open();
  its.fetch();
  for (const ParamId p : {1U, 4U, 7U}) {
    std::vector<float> master(its.trainer.params[p].count());
    its.engine->read_state(p, "master", master);
    for (std::size_t i = 0; i < master.size(); ++i)
      ASSERT_EQ(master[i], its.trainer.params[p].at(i)) << p << ", " << i;
  }
  its.close();
  EXPECT_THAT(cuda_double::report(), IsEmpty());
}

/// Two units of which the GPU holds one.
class OneUnitOnGpu : public ::testing::Test {
 protected:
  OneUnitOnGpu() {
    for (StreamedUnit u = 0; u < 2; ++u) model_.units[u].params[0].streamed = u;
  }
  void open(std::uint64_t seed, cuda_double::Pace pace = cuda_double::Pace::kWhenWaitedFor) {
    cuda_double::reset(seed, {.pace = pace});
    if (pace == cuda_double::Pace::kByHand) clock_.emplace();
    EngineConfig config = config_of({kFp32, DType::kFloat32}, Where::kMemory, directory_);
    config.placement.params = Tier::kHost;
    its_.emplace(model_, config, 160 * kKiB);
    its_->open();
  }

  ScratchDirectory directory_;
  ModelSpec model_ = lent_model({20'000, 20'000}, DType::kFloat32);
  std::optional<cuda_double::Clockwork> clock_;
  std::optional<StreamedGpu> its_;
};

TEST_F(OneUnitOnGpu, TheOtherIsRefusedWhileItIsAcquired) {
  open(3);
  GpuStreams::One& stream = its_->streams->next();
  its_->engine->acquire(0, *stream.ref);
  try {
    its_->engine->acquire(1, *stream.ref);
    FAIL() << "there was room";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(), HasSubstr("what is acquired (unit 0)"));
  }
  its_->engine->release(0, *stream.ref);
  its_->engine->acquire(1, *stream.ref);
  its_->engine->release(1, *stream.ref);
  its_->step();
  its_->fetch();
  EXPECT_TRUE(its_->trainer.same());
  its_->close();
  EXPECT_THAT(cuda_double::report(), IsEmpty());
}

// The memory of a unit is another's while its last reader is still under way.
TEST_F(OneUnitOnGpu, ThreadsReadTheirUnitsInTurn) {
  constexpr std::size_t kBytes = 80'000;
  constexpr int kTimes = 60;
  open(4);
  std::atomic<int> wrong = 0;
  const auto use = [&](StreamedUnit unit, GpuStreams::One& stream) {
    std::byte* const pinned = its_->streams->pinned(unit * kBytes);
    for (int i = 0; i < kTimes; ++i) {
      its_->engine->acquire(unit, *stream.ref);
      GpuStreams::copy(stream, pinned, its_->place(unit), kBytes, cudaMemcpyDeviceToHost);
      its_->engine->release(unit, *stream.ref);
      if (i % 4 != 0) continue;
      require(0, "cudaStreamSynchronize", cudaStreamSynchronize(stream.handle));
      float first = 0;
      std::memcpy(&first, pinned, sizeof(first));
      if (first != initial_value(unit, 0)) ++wrong;
    }
  };
  GpuStreams::One& own = its_->streams->next();
  GpuStreams::One& others = its_->streams->next();
  std::thread other([&] { use(1, others); });
  use(0, own);
  other.join();
  EXPECT_EQ(wrong, 0);
  its_->close();
  EXPECT_THAT(cuda_double::report(), IsEmpty());
}

/// A stream that leaves out what orders its work.
class Careless final : public StreamRef {
 public:
  Careless(StreamRef& stream, bool waits, bool records)
      : stream_(stream), waits_(waits), records_(records) {}
  Event record() override { return records_ ? stream_.record() : Event(); }
  void wait(const Event& event) override {
    if (waits_ || event.state() == nullptr) stream_.wait(event);
  }

 private:
  StreamRef& stream_;
  bool waits_, records_;
};

// The GPU stands meanwhile, so nothing but the streams orders its work.
TEST_F(OneUnitOnGpu, TheWaitOfAnAcquireAndTheEventOfAReleaseAreMissed) {
  for (const auto& [waits, records] : {std::pair(true, true), {false, true}, {true, false}}) {
    open(8, cuda_double::Pace::kByHand);
    GpuStreams::One& stream = its_->streams->next();
    Careless careless(*stream.ref, waits, records);
    clock_->hold();
    for (const StreamedUnit unit : {0U, 1U, 0U}) {
      its_->engine->acquire(unit, careless);
      GpuStreams::copy(stream, its_->streams->pinned(unit * 80'000), its_->place(unit), 80'000,
                       cudaMemcpyDeviceToHost);
      its_->engine->release(unit, careless);
    }
    clock_->go();
    its_->streams->wait();
    its_->close();
    clock_.reset();
    const std::vector<std::string> findings = cuda_double::report();
    if (waits && records) {
      EXPECT_THAT(findings, IsEmpty());
    } else {
      EXPECT_THAT(findings, ::testing::Contains(HasSubstr("nothing orders it after")))
          << "waits: " << waits << ", records: " << records;
    }
  }
}

TEST_F(OneUnitOnGpu, ALostGpuEndsTheEngine) {
  open(6);
  GpuStreams::One& stream = its_->streams->next();
  its_->engine->acquire(0, *stream.ref);
  cuda_double::lose_device(cudaErrorECCUncorrectable);
  const std::vector<std::function<void()>> calls{[&] { its_->engine->release(0, *stream.ref); },
                                                 [&] { its_->engine->store_param(0, *stream.ref); },
                                                 [&] { its_->engine->acquire(1, *stream.ref); },
                                                 [&] { its_->trainer.step(*its_->engine); }};
  for (const std::function<void()>& call : calls) {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_THAT(error.what(), HasSubstr("cudaErrorECCUncorrectable"));
    }
  }
  EXPECT_TRUE(its_->engine->has_ended());
  its_->close();
  static_cast<void>(cuda_double::report());  // a lost device frees nothing
}

TEST_F(OneUnitOnGpu, AStreamThatCapturesIsRefusedAndNothingChanges) {
  open(7);
  GpuStreams::One& stream = its_->streams->next();
  const auto expect_refused = [&](const std::function<void()>& call) {
    cuda_double::set_capturing(stream.handle, true);
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("before or after the capture"));
    }
    cuda_double::set_capturing(stream.handle, false);
    call();
  };
  expect_refused([&] { its_->engine->acquire(0, *stream.ref); });
  expect_refused([&] { its_->engine->store_param(0, *stream.ref); });
  expect_refused([&] { its_->engine->release(0, *stream.ref); });
  its_->step();
  its_->fetch();
  EXPECT_TRUE(its_->trainer.same());
  its_->close();
  EXPECT_THAT(cuda_double::report(), IsEmpty());
}

}  // namespace lent_cuda_test
}  // namespace ziggurat::testing

// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_copy_test.cc: a copy of the state of lent parameters has the bits of the step at
// which it was begun, whatever the trainer does meanwhile; and how a copy ends early.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <mutex>

#include "core/engine/state_copy.h"
#include "optimizer/state_arrays.h"
#include "tests/core/lent_kinds.h"

namespace ziggurat::testing {
namespace lent_copy_test {

using ::testing::HasSubstr;
using enum StateFormat;

/// Large and small parameters: some share a record, one has several chunks, one ends in a part of a
/// tile.
const std::vector<std::int64_t> kSizes{70'000, 5, 16'383, 40'000, 300, 65'536, 12'345};

/// What a copy gives, by parameter and array.
using Arrays = std::map<std::pair<ParamId, std::size_t>, std::vector<std::byte>>;

/// Where values are wanted: anywhere.
std::uint64_t lead_of(ParamId param, std::size_t array, std::uint64_t first) {
  return (param * 1001 + array * 37 + first * 4) % AlignedBytes::kAlignment;
}

/// Takes a copy on the reactor, as slowly as the test wants.
class Taker {
 public:
  Taker(Runtime& runtime, LentEngine& engine, const std::vector<std::int64_t>& sizes,
        const CopyOptions& options, bool held)
      : runtime_(runtime), copy_(engine.begin_copy(options)), gate_(runtime.reactor) {
    arrays_of_ = state_arrays(engine.copied_state(options.widen_codes));
    for (ParamId p = 0; p < sizes.size(); ++p) {
      for (std::size_t a = 0; a < arrays_of_.size(); ++a)
        taken_[{p, a}].resize(bytes_of(static_cast<std::uint64_t>(sizes[p]), a));
    }
    if (!held) gate_.set();
    runtime_.reactor.block_on([](Taker& self) -> Task<> {
      self.runtime_.reactor.spawn(self.take(), [](std::exception_ptr) {});
      co_return;
    }(*this));
  }
  ~Taker() {
    release();
    ended_.wait();
  }

  void release() {
    runtime_.reactor.block_on([](Signal& gate) -> Task<> {
      gate.set();
      co_return;
    }(gate_));
  }
  void give_up(const Error& why) {
    runtime_.reactor.block_on([](StateCopy& copy, std::exception_ptr its) -> Task<> {
      copy.give_up(its);
      co_return;
    }(*copy_, std::make_exception_ptr(why)));
  }
  /// The copy, or its error.
  Arrays arrays() { return ended_.get(); }
  bool ended() const {
    return ended_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

 private:
  std::uint64_t bytes_of(std::uint64_t count, std::size_t array) const {
    const StateArray& its = arrays_of_[array];
    return (count + its.block - 1) / its.block * its.element_bytes();
  }
  Task<> take() {
    const StateCopy::Take one = [this](ParamId param, std::size_t array, std::uint64_t first,
                                       std::shared_ptr<const AlignedBytes> values) -> Task<> {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(values->span().data()) % AlignedBytes::kAlignment,
                lead_of(param, array, first));
      co_await gate_.wait();
      std::memcpy(&taken_.at({param, array}).at(first * arrays_of_[array].element_bytes()),
                  values->span().data(), values->span().size());
    };
    std::exception_ptr failure;
    try {
      co_await copy_->run(one, lead_of);
    } catch (...) {
      failure = std::current_exception();
    }
    copy_->end();
    if (failure) {
      promise_.set_exception(failure);
    } else {
      promise_.set_value(taken_);
    }
  }

  Runtime& runtime_;
  std::shared_ptr<StateCopy> copy_;
  Signal gate_;
  std::vector<StateArray> arrays_of_;
  Arrays taken_;
  std::promise<Arrays> promise_;
  std::shared_future<Arrays> ended_ = promise_.get_future().share();
};

/// A trainer with its engine.
struct Training {
  enum class Memory { kLeast, kAll };  ///< for records on NVMe: none or all stay in memory
  explicit Training(const LentKind& kind, Where where, int slots = 2,
                    Memory memory = Memory::kLeast)
      : model(lent_model(kSizes, kind.dtype)),
        trainer(model, StateKind{.optimizer = OptimizerKind::kAdamW, .format = kind.format},
                kind.rounding),
        config(config_of(kind, where, directory)) {
    config.slots = slots;
    if (where == Where::kNvme && memory == Memory::kLeast)
      config.host_budget_bytes = smallest_budget(model, config);
    engine = LentEngine::open(model, config, *runtime, trainer.lent());
  }
  /// Steps in which some parameters have no gradient, and state is written before some of them.
  void steps(int count) {
    for (int i = 0; i < count; ++i) {
      ++made;
      LentStep step;
      if (made % 2 == 0) step.left_out = {1, 3};
      if (made % 3 == 0) step.written = {0, 4};
      trainer.step(*engine, step);
    }
  }
  /// Writes state that no twin of the trainer knows.
  void write(float value) {
    for (const ParamId p : {ParamId{0}, ParamId{2}, ParamId{3}, ParamId{6}}) {
      const std::vector<float> values(static_cast<std::size_t>(kSizes[p]), value);
      engine->write_state(p, p % 2 == 0 ? "exp_avg_sq" : "master", values);
    }
  }
  Arrays copied_now(bool widen = false) {
    return Taker(*runtime, *engine, kSizes, {.widen_codes = widen}, false).arrays();
  }

  ScratchDirectory directory;
  std::unique_ptr<Runtime> runtime = runtime_of(3);
  ModelSpec model;
  LentTrainer trainer;
  EngineConfig config;
  std::unique_ptr<LentEngine> engine;
  int made = 0;
};

class LentCopy : public ::testing::TestWithParam<std::tuple<LentKind, Where>> {
 protected:
  using Memory = Training::Memory;
  Training opened(int slots = 2, Memory memory = Memory::kLeast) const {
    const auto& [kind, where] = GetParam();
    return Training(kind, where, slots, memory);
  }
};

TEST_P(LentCopy, HasTheStateThatIsReadByName) {
  for (const auto& [steps, memory] :
       {std::pair(3, Memory::kLeast), std::pair(0, Memory::kLeast), std::pair(0, Memory::kAll)}) {
    Training run = opened(2, memory);
    run.steps(steps);
    run.write(0.25F);
    const std::vector<std::string> names = run.engine->state_names();
    std::map<std::pair<ParamId, std::size_t>, std::vector<float>> read;
    const auto read_all = [&] {
      for (ParamId p = 0; p < kSizes.size(); ++p) {
        for (std::size_t a = 0; a < names.size(); ++a) {
          std::vector<float>& values = read[{p, a}];
          values.resize(static_cast<std::size_t>(kSizes[p]));
          run.engine->read_state(p, names[a], values);
        }
      }
    };
    read_all();
    const auto before = read;
    const Arrays copied = run.copied_now(true);
    read_all();
    EXPECT_TRUE(read == before) << "a copy changed what is read after " << steps << " steps";
    const StateKind kind = run.engine->copied_state(true);
    const std::vector<StateArray> arrays = state_arrays(kind);
    for (const auto& [its, values] : read) {
      if (arrays[its.second].element != StateElement::kF32) continue;  // read wider than it is kept
      ASSERT_EQ(std::memcmp(values.data(), copied.at(its).data(), values.size() * 4), 0)
          << "parameter " << its.first << ", " << names[its.second] << ", " << steps << " steps";
    }
  }
}

TEST_P(LentCopy, IsOfItsStepWhileStepsGoOnBesideIt) {
  for (const auto& [slots, steps, memory] :
       {std::tuple(2, 2, Memory::kLeast), std::tuple(1, 2, Memory::kLeast),
        std::tuple(2, 0, Memory::kLeast), std::tuple(1, 0, Memory::kAll)}) {
    Training run = opened(slots, memory);
    run.steps(steps);
    run.write(0.5F);
    const Arrays expected = run.copied_now();
    // Room for all records: no step waits.
    Taker taker(*run.runtime, *run.engine, kSizes, {.spare_bytes = 64 * kMiB}, true);
    run.write(0.75F);
    run.steps(1);
    run.write(0.125F);
    run.steps(3);
    EXPECT_FALSE(taker.ended());
    taker.release();
    EXPECT_TRUE(taker.arrays() == expected) << slots << " slots, after " << steps << " steps";
    EXPECT_TRUE(run.copied_now() != expected);
  }
}

TEST_P(LentCopy, IsOfItsStepWhereStepsWaitForIt) {
  Training run = opened();
  run.steps(2);
  run.write(0.5F);
  const Arrays expected = run.copied_now();
  Taker taker(*run.runtime, *run.engine, kSizes, {}, false);
  run.steps(4);
  EXPECT_TRUE(taker.arrays() == expected);
}

TEST_P(LentCopy, ThatIsGivenUpChangesNoBitOfTheSteps) {
  Training run = opened();
  run.steps(2);
  Taker taker(*run.runtime, *run.engine, kSizes, {.stall_max_s = 0.02}, true);
  run.steps(4);
  run.engine->wait_all_updated();
  EXPECT_TRUE(run.trainer.same());
  taker.release();
  try {
    taker.arrays();
    FAIL() << "copied, though steps went on";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadlineExceeded);
    EXPECT_THAT(error.what(), HasSubstr("checkpoint_stall_max"));
  }
  run.steps(1);
  const Arrays next = run.copied_now();
  EXPECT_FALSE(next.empty()) << "a later copy is made as before";
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, LentCopy,
    ::testing::Combine(::testing::Values(LentKind{kFp32, DType::kFloat32},
                                         LentKind{kFp32, DType::kBFloat16},
                                         LentKind{kBf16Moments, DType::kFloat32},
                                         LentKind{k8Bit, DType::kBFloat16},
                                         LentKind{kSplit, DType::kBFloat16},
                                         LentKind{kBf16, DType::kBFloat16}),
                       ::testing::Values(Where::kMemory, Where::kHost, Where::kNvme)),
    [](const auto& its) { return name_of(its.param); });

const LentKind kPlain{kFp32, DType::kFloat32};

TEST(LentCopies, AreMadeOneAtATime) {
  Training run(kPlain, Where::kMemory);
  run.steps(1);
  Taker taker(*run.runtime, *run.engine, kSizes, {}, true);
  try {
    run.engine->begin_copy({});
    FAIL() << "begun beside another";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("under way"));
  }
  taker.release();
  taker.arrays();
  EXPECT_FALSE(run.copied_now().empty());
}

TEST(LentCopies, EndWithTheEngine) {
  for (const Where where : {Where::kMemory, Where::kNvme}) {
    Training run(kPlain, where);
    run.steps(1);
    // Slow enough that the engine is closed first; each record that is being taken is taken whole.
    Taker taker(*run.runtime, *run.engine, kSizes,
                {.bandwidth_bytes_per_s = 100'000, .spare_bytes = kMiB}, false);
    run.engine.reset();
    try {
      taker.arrays();
      FAIL() << "copied from an engine that is closed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCancelled) << error.what();
    }
  }
}

TEST(LentCopies, ThatNobodyTakesEndWithTheEngineToo) {
  Training run(kPlain, Where::kMemory);
  run.steps(1);
  const std::shared_ptr<StateCopy> copy = run.engine->begin_copy({});
  run.engine.reset();
  const auto taken = [](ParamId, std::size_t, std::uint64_t,
                        std::shared_ptr<const AlignedBytes>) -> Task<> { co_return; };
  EXPECT_THROW(run.runtime->reactor.block_on(copy->run(taken, lead_of)), Error);
}

TEST(LentCopies, FailWithWhatTheTakerThrows) {
  Training run(kPlain, Where::kNvme);
  run.steps(1);
  const std::shared_ptr<StateCopy> copy = run.engine->begin_copy({});
  const auto full = [](ParamId, std::size_t, std::uint64_t,
                       std::shared_ptr<const AlignedBytes>) -> Task<> {
    throw Error(ErrorCode::kResourceExhausted, "the disk is full");
    co_return;
  };
  try {
    run.runtime->reactor.block_on(copy->run(full, lead_of));
    FAIL() << "taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  }
  run.steps(2);
  run.engine->wait_all_updated();
  EXPECT_TRUE(run.trainer.same()) << "training goes on";
}

TEST(LentCopies, ThatAreGivenUpSayWhy) {
  Training run(kPlain, Where::kMemory);
  run.steps(1);
  Taker taker(*run.runtime, *run.engine, kSizes, {.bandwidth_bytes_per_s = 1000}, false);
  taker.give_up(Error(ErrorCode::kUnavailable, "another engine has failed"));
  try {
    taker.arrays();
    FAIL() << "copied";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("another engine"));
  }
}

}  // namespace lent_copy_test
}  // namespace ziggurat::testing

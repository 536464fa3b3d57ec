// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_failure_test.cc: an engine that has failed gives lent memory back: whichever call
// says so returns when nothing reads the gradient or writes the parameter any more.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <functional>
#include <future>
#include <tuple>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "tests/core/lent_trainer.h"
#include "tests/support/held_memory.h"

namespace ziggurat::testing {
namespace lent_failure_test {

constexpr UnitId kHeld = 0;
constexpr UnitId kFailing = 1;
/// The held parameter has a record of its own, or shares one with the third.
constexpr std::array<std::int64_t, 2> kCounts{20'000, 16'000};

struct Call {
  const char* name;
  std::function<void(LentEngine& engine, LentTrainer& trainer)> make;
};

const std::vector<Call>& calls() {
  static const std::vector<Call> all{
      {"WaitUpdated", [](LentEngine& engine, LentTrainer&) { engine.wait_updated(kHeld); }},
      {"WaitUpdatedOfAnother",
       [](LentEngine& engine, LentTrainer&) {
         engine.wait_updated(kFailing);
         engine.wait_updated(kHeld);
       }},
      {"WaitAllUpdated", [](LentEngine& engine, LentTrainer&) { engine.wait_all_updated(); }},
      {"Step",
       [](LentEngine& engine, LentTrainer& trainer) {
         const std::vector<GroupStep> groups = trainer.groups_of({});
         StepOptions options{.blob = {}};
         options.groups = groups;
         engine.step(trainer.lent_gradients(), options);
       }},
      {"LendParams",
       [](LentEngine& engine, LentTrainer& trainer) {
         TypedArray elsewhere(DType::kFloat32, trainer.params[kHeld].count());
         engine.lend_param(kHeld, elsewhere.span());
       }},
      {"ReadState",
       [](LentEngine& engine, LentTrainer& trainer) {
         std::vector<float> values(trainer.params[kHeld].count());
         engine.read_state(kHeld, "master", values);
       }},
      {"MakeDurable", [](LentEngine& engine, LentTrainer&) { engine.make_durable(); }},
  };
  return all;
}

/// A step in which the update of one unit stands in its gradient on a worker when the write of the
/// other's record fails.
class LentFailure : public ::testing::TestWithParam<std::tuple<std::size_t, std::int64_t>> {
 protected:
  void SetUp() override {
    runtime_->io_engine = [this](Reactor& reactor, const std::string& path) {
      auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
      drive_ = faulty.get();
      return faulty;
    };
    EngineConfig config = small_config(directory_.path());
    config.host_budget_bytes = 32 * kMiB;
    config.clip_norm = 0;
    config.placement.optimizer = Tier::kNvme;
    engine_ = LentEngine::open(trainer_.own_model(), config, *runtime_, trainer_.lent());
    trainer_.step(*engine_);
    engine_->make_durable();
  }
  void step_of_which_a_write_fails() {
    runtime_->reactor.block_on([](LentFailure& self) -> Task<> {
      self.drive_->set_gate([&self](FaultPoint point) {
        if (point != FaultPoint::kWrite) return 0;
        self.gradient_.await_touched();
        return EIO;
      });
      co_return;
    }(*this));
    trainer_.make_gradients(1, {});
    std::vector<TypedSpan<const std::byte>> gradients = trainer_.lent_gradients();
    std::ranges::copy(gradients[kHeld].bytes, gradient_.bytes().begin());
    gradients[kHeld].bytes = gradient_.bytes();
    const std::vector<GroupStep> groups = trainer_.groups_of({});
    StepOptions options{.blob = {}};
    options.groups = groups;
    gradient_.hold();
    engine_->step(gradients, options);
  }

  ScratchDirectory directory_;
  std::int64_t count_ = std::get<1>(GetParam());
  HeldMemory gradient_{static_cast<std::size_t>(count_) * sizeof(float)};
  LentTrainer trainer_{lent_model({count_, 20'000, 3}, DType::kFloat32), {}};
  std::unique_ptr<Runtime> runtime_ = Runtime::create({.threads = 2, .trace_path = ""});
  FaultyEngine* drive_ = nullptr;
  std::unique_ptr<LentEngine> engine_;
};

TEST_P(LentFailure, IsSaidWhenNoJobIsInLentMemoryAnyMore) {
  step_of_which_a_write_fails();
  std::future<std::string> call = std::async(std::launch::async, [&]() -> std::string {
    try {
      calls()[std::get<0>(GetParam())].make(*engine_, trainer_);
    } catch (const Error& error) {
      return error.what();
    }
    return "done";
  });
  gradient_.await_touched();
  EXPECT_EQ(call.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout)
      << "a job reads the gradient";
  gradient_.release();
  EXPECT_THAT(call.get(), ::testing::HasSubstr("EIO"));
  if (HasFailure()) return;
  gradient_.hold();
  engine_.reset();
  EXPECT_FALSE(gradient_.touched()) << "after the call";
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<std::size_t, std::int64_t>>& its) {
  const auto [call, count] = its.param;
  return fmt::format("{}{}", calls()[call].name, count == kCounts[0] ? "" : "OfASharedRecord");
}

INSTANTIATE_TEST_SUITE_P(Calls, LentFailure,
                         ::testing::Combine(::testing::Range<std::size_t>(0, calls().size()),
                                            ::testing::ValuesIn(kCounts)),
                         name_of);

}  // namespace lent_failure_test
}  // namespace ziggurat::testing

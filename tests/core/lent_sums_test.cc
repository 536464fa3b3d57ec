// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_sums_test.cc: gradients that are summed on NVMe have the bits of those that are
// lent, in the least memory too, beside others in one record and after a kill; and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <utility>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "base/error.h"
#include "tests/core/lent_kinds.h"

namespace ziggurat::testing {
namespace lent_sums_test {

using ::testing::HasSubstr;
using enum StateFormat;

const std::vector<std::int64_t> kCounts{1, 105, 16'384, 16'385, 600'000};

class LentSums : public ::testing::TestWithParam<std::tuple<LentKind, Where>> {};

INSTANTIATE_TEST_SUITE_P(Formats, LentSums,
                         ::testing::Combine(::testing::Values(LentKind{kFp32, DType::kFloat32},
                                                              LentKind{kSplit, DType::kBFloat16},
                                                              LentKind{k8Bit, DType::kBFloat16},
                                                              LentKind{kFp32, DType::kBFloat16,
                                                                       Rounding::kStochastic}),
                                            ::testing::Values(Where::kHost, Where::kNvme)),
                         [](const auto& one) { return name_of(one.param); });

TEST_P(LentSums, HaveTheBitsOfPlainArraysInAnyMemory) {
  const auto& [kind, where] = GetParam();
  const std::vector<LentStep> steps{{.summed = {0, 1, 2, 3, 4}},
                                    {.left_out = {1, 4}, .summed = {0, 3}},
                                    {.summed = {1}},
                                    {},
                                    {.left_out = {0}, .written = {1, 4}, .summed = {1, 2, 4}},
                                    {.left_out = {0, 1, 2, 3, 4}},
                                    {.summed = {4}}};
  const ScratchDirectory directory;
  EngineConfig config = config_of(kind, where, directory);
  config.placement.grads = Tier::kNvme;
  const ModelSpec model = lent_model(kCounts, kind.dtype);
  const std::uint64_t smallest = smallest_budget(model, config);
  LentTrainer trainer(model, config.optimizer.state, kind.rounding);
  config.counts_steps = true;
  for (const std::uint64_t budget : {smallest, 64 * kMiB}) {
    config.host_budget_bytes = budget;
    for (std::size_t i = 0; i < steps.size(); i += 2) {
      const auto runtime = runtime_of(2);
      const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
      for (std::size_t s = i; s < std::min(i + 2, steps.size()); ++s)
        trainer.step(*engine, steps[s]);
      engine->make_durable();
      ASSERT_TRUE(trainer.same()) << "steps " << i << " and the next in " << budget;
      trainer.forget();
    }
  }
}

/// Sums on a drive whose calls fail when the test says so.
class LentSumsOnAFailingDrive : public ::testing::Test {
 protected:
  LentSumsOnAFailingDrive() {
    EngineConfig config = config_of(kind_, Where::kNvme, directory_);
    config.placement.grads = Tier::kNvme;
    config.counts_steps = true;
    runtime_->io_engine = [this](Reactor& reactor, const std::string& path) {
      auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
      drive_ = faulty.get();
      return faulty;
    };
    engine_ = LentEngine::open(model_, config, *runtime_, trainer_.lent());
  }

  /// Lets every `point` but the first so many fail.
  void fail(FaultPoint point, int after) {
    set_gate([point, left = after](FaultPoint at) mutable {
      return at == point && left-- <= 0 ? EIO : 0;
    });
  }
  void fail_no_more() {
    set_gate([](FaultPoint) { return 0; });
  }
  template <class Call>
  void expect_eio(const Call& call, const char* why = "") {
    try {
      call();
      ADD_FAILURE() << "there was no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("EIO"), HasSubstr(why)));
    }
  }

  /// Sums the gradients of the first two parameters, which share a record, whose write then fails.
  /// Returns those of all.
  std::vector<TypedSpan<const std::byte>> sum_in_a_record_that_is_lost() {
    trainer_.make_gradients(1, {});
    std::vector<TypedSpan<const std::byte>> gradients = trainer_.lent_gradients();
    engine_->add_gradient(1, gradients[1], 1);
    fail(FaultPoint::kWrite, 0);
    engine_->add_gradient(0, gradients[0], 1);
    return gradients;
  }

  ScratchDirectory directory_;
  LentKind kind_{kSplit, DType::kBFloat16};
  ModelSpec model_ = lent_model(kCounts, kind_.dtype);
  LentTrainer trainer_{model_, {.format = kSplit}, kind_.rounding};
  std::unique_ptr<Runtime> runtime_ = runtime_of(2);
  std::unique_ptr<LentEngine> engine_;

 private:
  void set_gate(std::function<int(FaultPoint)> gate) {
    runtime_->reactor.block_on(
        [](FaultyEngine* drive, std::function<int(FaultPoint)> its) -> Task<> {
          drive->set_gate(std::move(its));
          co_return;
        }(drive_, std::move(gate)));
  }
  FaultyEngine* drive_ = nullptr;
};

/// Backward has gone on when the write fails.
TEST_F(LentSumsOnAFailingDrive, RefuseTheStepUntilTheyAreDiscarded) {
  trainer_.step(*engine_, {.summed = {2, 4}});
  engine_->make_durable();
  fail(FaultPoint::kWrite, 0);
  for (int i = 0; i < 2; ++i) {
    expect_eio(
        [&] {
          trainer_.step(*engine_, {.summed = {2, 4}});
        },
        i == 0 ? "discard its gradient" : "");  // the second adds to a sum, which fails first
    EXPECT_EQ(engine_->generation(), 1U);
    if (i == 0) fail_no_more();
  }
  engine_->discard_sum(2);
  engine_->discard_sum(4);
  trainer_.step(*engine_, {.summed = {2, 4}});
  engine_->make_durable();
  EXPECT_TRUE(trainer_.same());
}

// Some of the parameter's chunks have the second summand then, and others have not.
TEST_F(LentSumsOnAFailingDrive, RefuseTheStepWhereASummandWasAddedInPart) {
  trainer_.make_gradients(1, {});
  const TypedSpan<const std::byte> gradient = trainer_.lent_gradients()[4];
  for (const int reads : {0, 1}) {
    engine_->add_gradient(4, gradient, 1);
    fail(FaultPoint::kRead, reads);
    expect_eio([&] { engine_->add_gradient(4, gradient, 1); });
    fail_no_more();
    std::vector<float> values(gradient.count());
    const char* const why = "the sum of gradients of parameter 4 lacks a part of what was added";
    expect_eio([&] { engine_->add_gradient(4, gradient, 1); }, why);
    expect_eio([&] { engine_->read_sum(4, 0, values); }, why);
    expect_eio([&] { trainer_.step(*engine_, {.left_out = {4}}); }, why);
    EXPECT_EQ(engine_->generation(), 0U);
    engine_->discard_sum(4);
  }
  trainer_.step(*engine_, {.summed = {2, 4}});
  engine_->make_durable();
  EXPECT_TRUE(trainer_.same());
}

// The two share a record, whose write fails while backward goes on.
TEST_F(LentSumsOnAFailingDrive, AreAllLostThatShareARecord) {
  sum_in_a_record_that_is_lost();
  for (const ParamId param : {ParamId{0}, ParamId{1}}) {
    expect_eio(
        [&] {
          trainer_.step(*engine_, {.left_out = {0, 1}});
        },
        param == 0 ? "parameter 0 lacks" : "parameter 1 lacks");
    fail_no_more();
    engine_->discard_sum(param);
  }
  trainer_.step(*engine_, {.summed = {0, 1}});
  engine_->make_durable();
  EXPECT_TRUE(trainer_.same());
}

// So that a discarded sum can be made again while nobody looks at the other.
TEST_F(LentSumsOnAFailingDrive, AreMadeAgainBesideOthersThatAreLost) {
  const std::vector<TypedSpan<const std::byte>> gradients = sum_in_a_record_that_is_lost();
  expect_eio([&] { trainer_.step(*engine_, {.left_out = {0, 1}}); });
  fail_no_more();
  engine_->discard_sum(0);
  engine_->add_gradient(0, gradients[0], 1);
  expect_eio([&] { trainer_.step(*engine_, {.left_out = {0, 1}}); }, "parameter 1 lacks");
}

// The two share a record, so that the first summand of one is put beside the other's sum.
TEST_F(LentSumsOnAFailingDrive, RefuseTheStepWhereAFirstSummandWasNotAdded) {
  trainer_.make_gradients(1, {});
  const std::vector<TypedSpan<const std::byte>> gradients = trainer_.lent_gradients();
  engine_->add_gradient(1, gradients[1], 1);
  fail(FaultPoint::kRead, 0);
  expect_eio([&] { engine_->add_gradient(0, gradients[0], 1); });
  fail_no_more();
  std::vector<float> value(1);
  const char* const why = "the sum of gradients of parameter 0 lacks a part of what was added";
  expect_eio([&] { engine_->read_sum(0, 0, value); }, why);
  expect_eio([&] { engine_->add_gradient(0, gradients[0], 1); }, why);
  expect_eio([&] { trainer_.step(*engine_, {.left_out = {0, 1}}); }, why);
  EXPECT_EQ(engine_->generation(), 0U);
  engine_->discard_sum(0);
  engine_->discard_sum(1);
  trainer_.step(*engine_, {.summed = {0, 1}});
  engine_->make_durable();
  EXPECT_TRUE(trainer_.same());
}

TEST(LentSumsCalls, SayWhatIsWrong) {
  const ScratchDirectory directory;
  const LentKind kind{kFp32, DType::kFloat32};
  EngineConfig config = config_of(kind, Where::kNvme, directory);
  const ModelSpec model = lent_model(kCounts, kind.dtype);
  LentTrainer trainer(model, config.optimizer.state);
  trainer.make_gradients(1, {});
  const TypedSpan<const std::byte> gradient = trainer.lent_gradients()[1];
  std::vector<float> values(105);
  const auto refused = [&](LentEngine& engine, const auto& call) -> std::string {
    try {
      call(engine);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  const auto add = [&](LentEngine& engine) { engine.add_gradient(1, gradient, 1); };
  const auto read = [&](LentEngine& engine) { engine.read_sum(1, 0, values); };
  const auto runtime = runtime_of(2);
  {
    const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
    EXPECT_THAT(refused(*engine, add), HasSubstr("choose `placement=grads=nvme`"));
  }
  config.placement.grads = Tier::kNvme;
  const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
  EXPECT_THAT(refused(*engine, read), HasSubstr("there is no sum"));
  EXPECT_THAT(refused(*engine, [&](LentEngine& its) { its.add_gradient(0, gradient, 1); }),
              HasSubstr("105 elements were given, but the parameter has 1"));
  add(*engine);
  read(*engine);
  EXPECT_EQ(std::memcmp(values.data(), gradient.bytes.data(), 105 * sizeof(float)), 0);
  std::vector<float> more(106);
  for (const std::uint64_t first : {std::uint64_t{0}, UINT64_MAX - 50}) {
    EXPECT_THAT(refused(*engine, [&](LentEngine& its) { its.read_sum(1, first, more); }),
                HasSubstr("there is no sum of these elements"));
  }
  EXPECT_THAT(refused(*engine, [&](LentEngine& its) { its.step(trainer.lent_gradients(), {}); }),
              HasSubstr("the parameter has a gradient and a sum of gradients"));
  engine->discard_sum(1);
  EXPECT_THAT(refused(*engine, read), HasSubstr("there is no sum"));
  config = config_of(kind, Where::kMemory, directory);
  config.placement.grads = Tier::kNvme;
  const auto open = [&](LentEngine&) { LentEngine::open(model, config, *runtime, trainer.lent()); };
  EXPECT_THAT(refused(*engine, open), HasSubstr("`store` is missing"));
}

}  // namespace lent_sums_test
}  // namespace ziggurat::testing

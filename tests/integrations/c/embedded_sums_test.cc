// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/embedded_sums_test.cc: sums of gradients on a drive that fails: what was
// lent before is the caller's again, and the step is refused until the gradient is discarded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "integrations/c/embedded_engine.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat::testing {
namespace embedded_sums_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kCount = 100;

/// Two parameters that share a record, so that a summand of one is put beside the other's sum.
class EmbeddedSums : public ::testing::Test {
 protected:
  EmbeddedSums() {
    runtime_ = Runtime::create({.threads = 1, .trace_path = ""});
    runtime_->io_engine = [this](Reactor& reactor, const std::string& path) {
      auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
      drive_ = faulty.get();
      return faulty;
    };
    std::vector<EmbeddedParam> params;
    for (std::vector<float>& its : values_) {
      its.assign(kCount, 0.5F);
      params.push_back({.name = params.empty() ? "first" : "second",
                        .shape = {kCount},
                        .values = {DType::kFloat32, std::as_writable_bytes(std::span(its))}});
    }
    EngineConfig config;
    config.store = {{scratch_.path() + "/store"}};
    config.placement = parse_placement("grads=nvme,optimizer=nvme");
    config.clip_norm = 0;
    engine_ = std::make_unique<EmbeddedEngine>(*runtime_, params, config);
  }

  void fail_reads(int error) {
    runtime_->reactor.block_on([](FaultyEngine* drive, int with) -> Task<> {
      drive->set_gate([with](FaultPoint at) { return at == FaultPoint::kRead ? with : 0; });
      co_return;
    }(drive_, error));
  }
  void add(std::size_t param, const std::vector<float>& values) {
    engine_->add_gradient(param, as_typed(std::span(values)), 1);
  }
  void step() {
    const GroupStep group{.learning_rate = 0.01F};
    engine_->step({.groups = {group}, .blob = {}});
    engine_->lent().wait_all_updated();
  }
  static std::string error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  const ScratchDirectory scratch_;
  std::unique_ptr<Runtime> runtime_;
  std::array<std::vector<float>, 2> values_;
  FaultyEngine* drive_ = nullptr;
  std::unique_ptr<EmbeddedEngine> engine_;
};

TEST_F(EmbeddedSums, UseNothingThatWasLentBeforeASummandThatFailed) {
  const std::vector<float> gradient(kCount, 0.25F);
  std::vector<float> lent(kCount, 0.25F);
  add(0, gradient);
  engine_->lend_gradient(1, as_typed(std::span<const float>(lent)), 1);
  fail_reads(EIO);
  EXPECT_THAT(error_of([&] { add(1, gradient); }), HasSubstr("EIO"));
  fail_reads(0);
  std::ranges::fill(lent, std::numeric_limits<float>::quiet_NaN());  // the caller's again
  const auto refused = AllOf(HasSubstr("parameter 1"), HasSubstr("discard its gradient"));
  EXPECT_THAT(error_of([&] { engine_->gradient_norm(); }), refused);
  EXPECT_THAT(error_of([&] { add(1, gradient); }), refused);
  EXPECT_THAT(error_of([&] { step(); }), refused);
  EXPECT_EQ(engine_->steps_of(1), 0U);
  engine_->discard_gradient(1);
  for (int i = 0; i < 2; ++i) add(1, gradient);
  EXPECT_EQ(engine_->gradient_norm(), std::sqrt(kCount * (0.25 * 0.25 + 0.5 * 0.5)));
  step();
  EXPECT_EQ(engine_->steps_of(0), 1U);
  EXPECT_EQ(engine_->steps_of(1), 1U);
  EXPECT_LT(values_[1][0], 0.5F);
}

TEST_F(EmbeddedSums, RefuseTheStepWhereAFirstSummandFailed) {
  const std::vector<float> gradient(kCount, 0.25F);
  add(0, gradient);
  fail_reads(EIO);
  EXPECT_THAT(error_of([&] { add(1, gradient); }), HasSubstr("EIO"));
  fail_reads(0);
  EXPECT_THAT(error_of([&] { step(); }),
              AllOf(HasSubstr("parameter 1"), HasSubstr("discard its gradient")));
  engine_->discard_gradients();
  step();
  EXPECT_EQ(engine_->steps_of(1), 0U);
}

}  // namespace embedded_sums_test
}  // namespace ziggurat::testing

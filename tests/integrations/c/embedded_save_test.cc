// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/embedded_save_test.cc: a save of an embedder whose target hangs is given up,
// by one that waits and by one that makes steps: engines can be closed, memory can be freed, and no
// checkpoint appears when the target answers after all. Time is virtual.
#include "integrations/c/embedded_save.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "aio/thread_engine.h"
#include "tests/support/hanging_engine.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat::testing {
namespace embedded_save_test {

using test::HangingEngine;
using test::HangingTarget;
using ::testing::HasSubstr;
using Beside = EmbeddedSaving::Beside;
using Call = HangingTarget::Call;

constexpr std::int64_t kCount = 60'000;
constexpr std::int64_t kUntrained = 5'000;
constexpr std::uint64_t kWrites = 15;  ///< of a save

/// One rank in virtual time, with an engine in memory and a target that may die.
class EmbeddedSaves : public ::testing::Test {
 protected:
  EmbeddedSaves() {
    runtime_ = Runtime::create(
        {.threads = 1,
         .trace_path = "",
         .io_engine = [this](Reactor& reactor, const std::string&) { return files_in(reactor); },
         .clock = Clock::Kind::kVirtual});
    open();
  }
  ~EmbeddedSaves() override {
    target_.come_back();  // or the end of the save would wait for it
    saving_.reset();
  }

  void open() {
    values_.assign(kCount, 0.5F);
    const EmbeddedParam param{
        .name = "w",
        .shape = {kCount},
        .values = {DType::kFloat32, std::as_writable_bytes(std::span(values_))}};
    EngineConfig config;
    config.placement = parse_placement("optimizer=host");
    config.clip_norm = 0;
    engine_ = std::make_unique<EmbeddedEngine>(*runtime_, std::vector{param}, config);
  }
  void step() {
    const std::vector<float> gradient(kCount, 0.25F);
    engine_->lend_gradient(0, {DType::kFloat32, std::as_bytes(std::span(gradient))}, 1);
    const GroupStep group{.learning_rate = 0.01F};
    engine_->step({.groups = {group}, .blob = {}});
    engine_->lent().wait_all_updated();
  }
  void begin(Beside beside) {
    EmbeddedSave save;
    save.folder = folder_;
    save.content.model = "m";
    save.content.dtype = DType::kFloat32;
    save.content.step = 1;
    save.params = {{.name = "w", .shape = {kCount}},
                   {.name = "u", .shape = {kUntrained}, .trained = false}};
    save.engines = {{.engine = engine_.get(), .parts = {whole(0, "w", kCount)}}};
    untrained_ = std::make_unique<std::vector<float>>(kUntrained, 2.0F);
    save.values = {{.part = whole(1, "u", kUntrained),
                    .memory = {DType::kFloat32, std::as_bytes(std::span(*untrained_))}}};
    save.spare_bytes = std::uint64_t{1} << 24;
    saving_ = std::make_unique<EmbeddedSaving>(*runtime_, std::move(save), beside);
  }
  static EmbeddedSave::Part whole(std::size_t param, const char* name, std::int64_t count) {
    return {.param = param,
            .part = {.name = name, .shape = {count}, .boxes = {whole_box(std::vector{count})}}};
  }
  std::string failure() {
    try {
      saving_->end();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDeadlineExceeded) << error.what();
      return error.what();
    }
    return "saved";
  }
  /// The target answers, and the save ends for good.
  void end_at_last() {
    target_.come_back();
    saving_.reset();
  }
  bool is_there() const { return std::filesystem::exists(folder_ + "/latest"); }

  ScratchDirectory scratch_;
  const std::string folder_ = scratch_.path() + "/saved";
  HangingTarget target_;
  std::unique_ptr<Runtime> runtime_;
  std::vector<float> values_;
  std::unique_ptr<std::vector<float>> untrained_;
  std::unique_ptr<EmbeddedEngine> engine_;
  std::unique_ptr<EmbeddedSaving> saving_;

 private:
  std::unique_ptr<IoEngine> files_in(Reactor& reactor) {
    return std::make_unique<HangingEngine>(reactor, std::make_unique<ThreadEngine>(reactor),
                                           target_);
  }
};

TEST_F(EmbeddedSaves, AreMadeOnATargetThatAnswers) {
  for (const Beside beside : {Beside::kNothing, Beside::kSteps}) {
    begin(beside);
    EXPECT_THAT(saving_->end(), HasSubstr(folder_ + "/step-000000001"));
    saving_.reset();
    std::filesystem::remove_all(folder_);
  }
  EXPECT_EQ(target_.calls(Call::kWrite), 2 * kWrites) << "the next test lets each of them hang";
}

TEST_F(EmbeddedSaves, AreGivenUpAtAnyWriteAndLeaveTheEngineFree) {
  for (const Beside beside : {Beside::kNothing, Beside::kSteps}) {
    std::size_t committing = 0;
    for (std::uint64_t position = 0; position < kWrites; ++position) {
      SCOPED_TRACE(position);
      target_.die_at(Call::kWrite, position);
      begin(beside);
      if (beside == Beside::kSteps) step();
      const std::string why = failure();
      EXPECT_THAT(why, HasSubstr("seems to hang"));
      EXPECT_TRUE(saving_->hangs());
      EXPECT_EQ(failure(), why) << "asked again";
      step();
      untrained_.reset();  // the caller's memory is the caller's again
      engine_.reset();     // does not wait for the target
      end_at_last();
      const bool may_be = why.find("may still be there") != std::string::npos;
      committing += may_be ? 1 : 0;
      EXPECT_EQ(is_there(), may_be) << "what was reported as failed is not there";
      std::filesystem::remove_all(folder_);
      open();
    }
    EXPECT_EQ(committing, 2U) << "the manifest, and the name of the newest";
  }
}

TEST_F(EmbeddedSaves, DoNotKeepAnEngineOpenWhoseTargetHangs) {
  target_.die_at(Call::kWrite, 2);
  begin(Beside::kSteps);
  step();
  engine_.reset();
  try {
    saving_->end();
    FAIL() << "saved";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AnyOf(HasSubstr("engine was closed"), HasSubstr("seems to hang")));
  }
  end_at_last();
  EXPECT_FALSE(is_there());
}

TEST_F(EmbeddedSaves, MayBeSavedAgainAfterOneThatHangs) {
  target_.die_at(Call::kWrite, 0);
  begin(Beside::kSteps);
  EXPECT_THAT(failure(), HasSubstr("`checkpoint_stall_max`"));
  end_at_last();
  begin(Beside::kSteps);
  EXPECT_THAT(saving_->end(), HasSubstr("step-000000001"));
}

TEST_F(EmbeddedSaves, WaitLongerForATargetWhereNobodyTrains) {
  target_.die_at(Call::kWrite, 0);
  begin(Beside::kNothing);
  EXPECT_THAT(failure(), AllOf(HasSubstr("480 s"), HasSubstr("save to another drive")));
}

}  // namespace embedded_save_test
}  // namespace ziggurat::testing

// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_state_test.cc: a lent parameter's state by name, of every optimizer in every
// format: what is read is that of plain arrays, and training goes on from what is written, wherever
// records are.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "optimizer/optimizers.h"
#include "optimizer/state_values.h"
#include "tests/core/lent_kinds.h"

namespace ziggurat::testing {
namespace lent_state_test {

/// Less than a tile, and a tile and a part of another.
const std::vector<std::int64_t> kCounts{105, kTileElements + 3000};

/// Numbers that every type has.
std::vector<float> numbers(UnitId unit, unsigned seed) {
  std::vector<float> values(static_cast<std::size_t>(kCounts[unit]));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((i * 37 + std::size_t{seed} * 101) % 251) / 64.0F - 2.0F;
  return values;
}

struct Place {
  const char* name;
  Where where;
  bool least_memory = false;  ///< of records on NVMe none stays in memory
};
constexpr Place kPlaces[] = {{"on the host", Where::kHost},
                             {"on NVMe, and kept in memory", Where::kNvme},
                             {"on NVMe", Where::kNvme, true}};

/// A trainer with its engine.
struct Training {
  Training(StateKind state, const Place& place)
      : model(lent_model(kCounts, holds_param(state.format) ? DType::kBFloat16 : DType::kFloat32)),
        trainer(model, state) {
    EngineConfig config =
        config_of({.format = state.format, .dtype = model.dtype}, place.where, directory);
    config.optimizer.state = state;
    config.counts_steps = true;
    if (place.least_memory) config.host_budget_bytes = smallest_budget(model, config);
    engine = LentEngine::open(model, config, *runtime, trainer.lent());
  }
  void write(UnitId unit, const std::string& name, const std::vector<float>& values) {
    trainer.write_state(*engine, unit, name, values);
  }
  void expect_state() {
    for (const std::string& name : engine->state_names()) {
      for (UnitId u = 0; u < kCounts.size(); ++u) {
        std::vector<float> values(static_cast<std::size_t>(kCounts[u]));
        engine->read_state(static_cast<ParamId>(u), name, values);
        EXPECT_TRUE(values == trainer.state(u, name)) << name << " of unit " << u;
      }
    }
  }
  void expect_params() {
    engine->wait_all_updated();
    EXPECT_TRUE(trainer.same());
  }

  ScratchDirectory directory;
  ModelSpec model;
  LentTrainer trainer;
  std::unique_ptr<Runtime> runtime = runtime_of(2);
  std::unique_ptr<LentEngine> engine;
};

class LentState : public ::testing::TestWithParam<StateFormat> {};

INSTANTIATE_TEST_SUITE_P(Formats, LentState,
                         ::testing::Values(StateFormat::kFp32, StateFormat::kBf16Moments,
                                           StateFormat::k8Bit, StateFormat::kSplit,
                                           StateFormat::kBf16),
                         [](const auto& one) {
                           std::string name(to_string(one.param));
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST_P(LentState, IsThatOfPlainArraysAndGoesOnFromWhatIsWritten) {
  for (const std::string_view optimizer : optimizer_names()) {
    for (const Place& place : kPlaces) {
      SCOPED_TRACE(::testing::Message() << optimizer << ' ' << place.name);
      Training its({*parse_optimizer(optimizer), GetParam()}, place);
      for (int step = 1; step <= 5; ++step) {
        its.trainer.step(*its.engine);
        its.expect_state();
        if (step != 4) continue;
        for (const std::string& name : its.engine->state_names()) {
          for (UnitId u = 0; u < kCounts.size(); ++u) {
            std::vector<float> values = numbers(u, 77);
            for (float& value : values) value *= value;  // sums of squares have no sign
            its.write(u, name, values);
          }
        }
        its.expect_state();
      }
      its.expect_params();
    }
  }
}

TEST_P(LentState, OfAWrittenMasterIsTheParametersWithAndWithoutAGradient) {
  for (const Place& place : kPlaces) {
    SCOPED_TRACE(place.name);
    Training its({OptimizerKind::kSgd, GetParam()}, place);
    its.trainer.step(*its.engine);
    for (UnitId u = 0; u < kCounts.size(); ++u)
      its.write(u, "master", numbers(u, 40 + static_cast<unsigned>(u)));
    its.engine->expect_gradients();
    its.write(1, "momentum_buffer", numbers(1, 50));  // the record may be on its way by now
    its.trainer.step(*its.engine, {.left_out = {0}});
    its.expect_params();
  }
}

}  // namespace lent_state_test
}  // namespace ziggurat::testing

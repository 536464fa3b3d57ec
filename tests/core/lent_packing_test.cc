// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_packing_test.cc: small parameters that share records have the bits that each has
// in an engine of its own, whatever is left out, written, moved or read; and which parameters share
// a record.
#include "core/sharding/packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "core/engine/state_copy.h"
#include "optimizer/eight_bit.h"
#include "optimizer/state_arrays.h"
#include "tests/core/lent_kinds.h"

namespace ziggurat::testing {
namespace lent_packing_test {

using ::testing::ElementsAre;
using enum StateFormat;

constexpr StateKind kEightBits{OptimizerKind::kAdamW, k8Bit};

std::vector<std::string> names_in(const UnitSpec& unit) {
  std::vector<std::string> names;
  for (const ParamSpec& param : unit.params) names.push_back(param.name);
  return names;
}

TEST(Packing, PutsSmallParametersOfOneTypeTogetherWhereTheFirstStands) {
  ModelSpec lent = lent_model({5, 20'000, 7, 16'383, 16'384, 1}, DType::kBFloat16);
  lent.units[2].dtype = DType::kFloat32;
  lent.units[5].dtype = DType::kFloat32;
  const ModelSpec packed = packed_model(lent, kFp32);
  ASSERT_EQ(packed.units.size(), 4U);
  EXPECT_THAT(names_in(packed.units[0]), ElementsAre("unit0", "unit3"));
  EXPECT_EQ(packed.units[0].name, "unit0 and 1 more");
  EXPECT_THAT(names_in(packed.units[1]), ElementsAre("unit1"));
  EXPECT_THAT(names_in(packed.units[2]), ElementsAre("unit2", "unit5"));
  EXPECT_EQ(packed.units[2].dtype, DType::kFloat32);
  EXPECT_THAT(names_in(packed.units[3]), ElementsAre("unit4"));
  EXPECT_EQ(packed.units[3].name, "unit4") << "nothing shares its unit";
}

TEST(Packing, KeepsUnitsShortEnoughToWaitFor) {
  const std::vector<std::int64_t> counts(100, 16'000);
  for (const UnitSpec& unit : packed_model(lent_model(counts, DType::kFloat32), kFp32).units) {
    EXPECT_LE(unit.count(), kPackElementsMax);
    EXPECT_EQ(unit.params.size(), 4U);
  }
}

TEST(Packing, BeginsBlocksOfCodesWithEachParameter) {
  const ModelSpec lent = lent_model({10, 300, 16, 250, 1, 512, 16'000}, DType::kFloat32);
  const ModelSpec packed = packed_model(lent, k8Bit);
  ASSERT_EQ(packed.units.size(), 1U);
  EXPECT_TRUE(packed.units[0].own_blocks);
  EXPECT_THAT(param_begins(packed.units[0]),
              ElementsAre(0, 256, 560, 768, 1024, 1280, 1792, 17'792));
  EXPECT_FALSE(packed_model(lent_model({10}, DType::kFloat32), k8Bit).units[0].own_blocks);
  const ModelSpec plain = packed_model(lent, kFp32);
  EXPECT_FALSE(plain.units[0].own_blocks);
  EXPECT_THAT(param_begins(plain.units[0]), ElementsAre(0, 10, 310, 326, 576, 577, 1089, 17'089));
}

/// Parameters of `counts` elements, as an engine numbers them.
ModelSpec numbered(const std::vector<std::int64_t>& counts) {
  ModelSpec lent = lent_model(counts, DType::kFloat32);
  for (ParamId p = 0; p < lent.units.size(); ++p) lent.units[p].params[0].lent = p;
  return lent;
}

TEST(Packing, CutsNoBlockOfCodesAndUpdatesNoGap) {
  std::mt19937 random(5);
  std::vector<std::int64_t> counts(400);
  for (std::int64_t& count : counts)
    count = std::int64_t{1} + random() % (random() % 4 == 0 ? 16'383 : 600);
  const ModelSpec packed = packed_model(numbered(counts), k8Bit);
  const ChunkTable table(packed, 1, kEightBits);
  std::vector<std::uint64_t> found(counts.size());
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    const std::vector<ParamRun> params = table.param_runs(id);
    auto param = params.begin();
    std::size_t end = 0;
    for (const DecayRun& run : table.decay_runs(id)) {
      ASSERT_EQ(run.begin, end);
      end = run.end;
      if (param == params.end() || param->begin != run.begin) continue;
      EXPECT_EQ(run.end - run.begin, param->count);
      EXPECT_EQ(run.begin % kSharedRecordStep, 0U);
      EXPECT_EQ(param->first % kEightBitBlock, 0U);
      const std::uint64_t first_block = std::min(param->count, kEightBitBlock);
      EXPECT_LE(run.begin % kEightBitBlock + first_block, kEightBitBlock);
      found[param->lent] += param->count;
      ++param;
    }
    EXPECT_EQ(param, params.end());
    EXPECT_EQ(end, table.chunk(id).count);
  }
  for (std::size_t p = 0; p < counts.size(); ++p)
    EXPECT_EQ(found[p], static_cast<std::uint64_t>(counts[p]));
  for (const UnitSpec& unit : packed.units)
    EXPECT_LE(param_begins(unit).back(), kPackElementsMax) << unit.name;
}

TEST(Packing, InEightBitsTakesFewBytesForThousandsOfSmallParameters) {
  constexpr std::size_t kParams = 10'000;
  const auto bytes_of = [](std::int64_t count) {
    const ModelSpec lent = lent_model(std::vector(kParams, count), DType::kBFloat16);
    const ChunkTable table(packed_model(lent, k8Bit), 4, kEightBits);
    return static_cast<double>(table.total_record_bytes()) / kParams;
  };
  EXPECT_LE(bytes_of(16), 118);
  for (const std::int64_t count : {1, 17, 100, 129, 144, 257, 384, 1000, 5000, 16'383})
    EXPECT_LE(bytes_of(count), 16 * static_cast<double>(count) + 1024) << count;
}

// No layout has it: it is the trainer's.
TEST(Packing, LeavesUnitsOptionalWhetherTheirStoreIsNewOrResumed) {
  ModelSpec lent = numbered({5, 20'000, 7, 30'000});
  for (const std::size_t p : {0U, 2U, 3U}) lent.units[p].optional = true;
  const ModelSpec as_new = packed_model(lent, kFp32);
  const std::string alone = ChunkTable(lent, 4).layout();
  const std::string packed = ChunkTable(as_new, 4).layout();
  for (const ModelSpec& model : {as_new, packed_as(lent, packed), packed_as(lent, alone)}) {
    for (const UnitSpec& unit : model.units)
      EXPECT_EQ(unit.optional, unit.params[0].name != lent.units[1].params[0].name) << unit.name;
  }
}

void exchange(ModelSpec& lent, std::size_t a, std::size_t b) {
  std::swap(lent.units[a], lent.units[b]);
  std::swap(lent.units[a].params[0].lent, lent.units[b].params[0].lent);
}

TEST(Packing, IsThatOfTheLayoutWhateverARunWouldChoose) {
  const ModelSpec lent = numbered({5, 20'000, 7, 30'000});
  for (const StateKind& state : {StateKind{}, kEightBits}) {
    const std::string alone = ChunkTable(lent, 4, state).layout();
    EXPECT_EQ(packed_as(lent, alone).units.size(), 4U) << "a store of before";
    const ModelSpec as_new = packed_model(lent, state.format);
    const std::string packed = ChunkTable(as_new, 4, state).layout();
    const ModelSpec again = packed_as(lent, packed);
    ASSERT_EQ(again.units.size(), 3U);
    EXPECT_THAT(names_in(again.units[0]), ElementsAre("unit0", "unit2"));
    EXPECT_EQ(param_begins(again.units[0]), param_begins(as_new.units[0]));
    EXPECT_EQ(ChunkTable::from_layout(again, packed, state).unit_count(), 3U);
    for (const std::string& layout : {alone, packed}) {
      for (const auto& [a, b] : {std::pair(0, 2), std::pair(1, 3), std::pair(1, 2)}) {
        ModelSpec other = lent;
        exchange(other, static_cast<std::size_t>(a), static_cast<std::size_t>(b));
        EXPECT_THROW(ChunkTable::from_layout(packed_as(other, layout), layout, state), Error)
            << a << " and " << b << " are counted in another order";
      }
      ModelSpec less = lent;
      less.units.pop_back();
      EXPECT_THROW(ChunkTable::from_layout(packed_as(less, layout), layout, state), Error);
    }
  }
}

TEST(Packing, IsUndoneInTheTrainersOrder) {
  const ModelSpec lent = numbered({5, 20'000, 7, 30'000, 9});
  const std::string layout = ChunkTable(packed_model(lent, kFp32), 4).layout();
  const ModelSpec again = unpacked_model(ChunkTable::of_layout(layout, 0).model());
  ASSERT_EQ(again.units.size(), lent.units.size());
  for (std::size_t u = 0; u < lent.units.size(); ++u)
    EXPECT_THAT(names_in(again.units[u]), ElementsAre(lent.units[u].name));
}

TEST(Packing, RefusesNumbersThatNoTrainerGives) {
  const ModelSpec lent = numbered({5, 20'000, 7, 30'000, 9});
  const std::string layout = ChunkTable(packed_model(lent, kFp32), 4).layout();
  const auto with = [&](const std::string& is, const std::string& becomes) {
    std::string other = layout;
    other.replace(other.find(is), is.size(), becomes);
    return other;
  };
  for (const char* number : {"\"number\":0", "\"number\":5", "\"number\":4294967295"}) {
    const std::string hostile = with("\"number\":2", number);
    EXPECT_THROW(packed_as(lent, hostile), Error) << hostile;
    EXPECT_THROW(unpacked_model(ChunkTable::of_layout(hostile, 0).model()), Error) << hostile;
  }
  // A number that is taken from the layout leaves another order, which the trainer does not have.
  const std::string less = with(",\"number\":2", "");
  EXPECT_THROW(ChunkTable::from_layout(packed_as(lent, less), less), Error);
  EXPECT_THROW(packed_as(lent, with("\"state_format\":\"fp32\"", "\"state_format\":\"8bit\"")),
               Error)
      << "blocks of codes would be shared";
}

TEST(Packing, RefusesRecordsThatItDoesNotKnow) {
  const ModelSpec lent = numbered({5, 20'000, 7});
  const std::string layout = ChunkTable(packed_model(lent, k8Bit), 4, kEightBits).layout();
  const auto refused = [](const nlohmann::json& json) {
    EXPECT_THROW(ChunkTable::of_layout(json.dump(), 0), Error) << json;
  };
  nlohmann::json json = nlohmann::json::parse(layout);
  ASSERT_TRUE(json["units"][0].contains("record"));
  json["units"][0]["record"] = json["record"];
  refused(json);
  json = nlohmann::json::parse(layout);
  json["state_format"] = "fp32";
  refused(json);
  json = nlohmann::json::parse(layout);
  json["units"][0]["params"].erase(1);
  refused(json);
  json = nlohmann::json::parse(layout);
  json["units"][0].erase("record");
  EXPECT_THROW(packed_as(lent, json.dump()), Error) << "blocks of codes would be shared";
}

/// Sizes of many packs and of chunks of one tile, which cut parameters; large ones stand between.
const std::vector<std::int64_t> kSizes{1,      16'383, 40'000, 3,     16'000, 9'000,
                                       15'999, 257,    16'384, 16,    16'000, 5'000,
                                       12'345, 2,      8'192,  16'383};

/// Engines that are given the same: one of all parameters, and one of each parameter alone.
class Twins {
 public:
  Twins(const LentKind& kind, Where where, std::uint64_t seed)
      : kind_(kind),
        model_(lent_model(kSizes, kind.dtype)),
        random_(seed),
        config_(config_of(kind, where, directory_)),
        runtime_(runtime_of(3)),
        steps_(kSizes.size()) {
    for (std::size_t p = 0; p < kSizes.size(); ++p) {
      TypedArray values(kind.dtype, static_cast<std::size_t>(kSizes[p]));
      for (std::size_t i = 0; i < values.count(); ++i) values.set(i, initial_value(p, i));
      alone_values_.push_back(values);
      values_.push_back(std::move(values));
    }
    config_.counts_steps = true;
    if (where != Where::kMemory) config_.host_budget_bytes = smallest_budget(model_, config_);
    engine_ = opened();
    for (std::size_t p = 0; p < kSizes.size(); ++p) {
      EngineConfig config = config_of(kind, Where::kMemory, directory_);
      config.host_budget_bytes = 0;
      config.counts_steps = true;
      ModelSpec own{.name = "own", .units = {model_.units[p]}, .dtype = kind.dtype};
      own.units[0].params[0].group = 0;
      const TypedSpan<std::byte> lent = alone_values_[p].span();
      alone_.push_back(LentEngine::open(own, config, *runtime_, std::span(&lent, 1)));
    }
  }

  void step() {
    engine_->wait_all_updated();
    std::vector<GroupStep> groups;
    std::vector<TypedArray> gradients(kSizes.size());
    std::vector<TypedSpan<const std::byte>> lent;
    for (std::size_t p = 0; p < kSizes.size(); ++p) {
      const bool written = coin(4);
      if (written) write_param(p);
      if (!coin(3)) {
        const DType dtype = coin(2) ? DType::kFloat32 : DType::kBFloat16;
        gradients[p] = TypedArray(dtype, values_[p].count());
        for (std::size_t i = 0; i < gradients[p].count(); ++i) gradients[p].set(i, any());
        ++steps_[p];
      } else if (coin(3)) {
        steps_[p] += 2;  // a trainer may set them
        engine_->set_steps(static_cast<ParamId>(p), steps_[p]);
        alone_[p]->set_steps(0, steps_[p]);
      }
      groups.push_back({.learning_rate = 0.01F * static_cast<float>(p + 1),
                        .beta2 = 0.95F,
                        .eps = coin(5) ? 0.0F : 1e-8F,
                        .weight_decay = p % 2 == 0 ? 0.1F : 0.0F,
                        .params_written = written});
      lent.emplace_back(gradients[p].span());
    }
    StepOptions options{.blob = {}};
    options.groups = groups;
    engine_->step(lent, options);
    for (std::size_t p = 0; p < kSizes.size(); ++p) {
      options.groups = std::span(groups).subspan(p, 1);
      alone_[p]->step(std::span(lent).subspan(p, 1), options);
      alone_[p]->wait_all_updated();
    }
    for (std::size_t p = 0; p < kSizes.size(); ++p) engine_->wait_updated(static_cast<ParamId>(p));
  }

  /// Writes some arrays of some parameters in both, as fp32.
  void write_state() {
    for (std::size_t p = 0; p < kSizes.size(); ++p) {
      for (const std::string& name : engine_->state_names()) {
        if (!coin(5)) continue;
        std::vector<float> values(values_[p].count());
        for (float& value : values) value = name == "exp_avg_sq" ? any() * any() : any();
        engine_->write_state(static_cast<ParamId>(p), name, values);
        alone_[p]->write_state(0, name, values);
      }
    }
  }
  void move() {
    for (std::size_t p = 0; p < kSizes.size(); ++p) {
      if (!coin(3)) continue;
      TypedArray moved = values_[p];
      engine_->lend_param(static_cast<ParamId>(p), moved.span());
      std::swap(values_[p], moved);
    }
  }
  void reopen() {
    engine_->make_durable();
    engine_.reset();
    for (TypedArray& values : values_) std::ranges::fill(values.bytes, std::byte{0x55});
    engine_ = opened();
    for (std::size_t p = 0; p < kSizes.size(); ++p) expect_values(p, "opened again");
  }
  /// Copies of all arrays as the format holds them, codes and scales too.
  void expect_same_copies() {
    const Arrays its = copied(*engine_);
    for (std::size_t p = 0; p < kSizes.size(); ++p) {
      for (const auto& [place, bytes] : copied(*alone_[p])) {
        const auto found = its.find({static_cast<ParamId>(p), place.second});
        ASSERT_TRUE(found != its.end() && found->second == bytes)
            << "parameter " << p << ", array " << place.second;
      }
    }
  }
  void expect_same() {
    for (std::size_t p = 0; p < kSizes.size(); ++p) {
      expect_values(p, "");
      for (const std::string& name : engine_->state_names()) {
        std::vector<float> its(values_[p].count());
        std::vector<float> alone(its.size());
        engine_->read_state(static_cast<ParamId>(p), name, its);
        alone_[p]->read_state(0, name, alone);
        const bool same = std::memcmp(its.data(), alone.data(), its.size() * sizeof(float)) == 0;
        ASSERT_TRUE(same) << "parameter " << p << ", " << name;
      }
    }
  }

 private:
  using Arrays = std::map<std::pair<ParamId, std::size_t>, std::vector<std::byte>>;
  Arrays copied(LentEngine& engine) {
    Arrays arrays;
    const std::vector<StateArray> of = state_arrays(engine.copied_state(false));
    const StateCopy::Take take = [&](ParamId param, std::size_t array, std::uint64_t first,
                                     std::shared_ptr<const AlignedBytes> values) -> Task<> {
      std::vector<std::byte>& all = arrays[{param, array}];
      const std::size_t at = first * of[array].element_bytes();
      all.resize(std::max(all.size(), at + values->span().size()));
      std::ranges::copy(values->span(), all.begin() + static_cast<std::ptrdiff_t>(at));
      co_return;
    };
    const std::shared_ptr<StateCopy> copy = engine.begin_copy({});
    const StateCopy::Lead none = [](ParamId, std::size_t, std::uint64_t) { return 0U; };
    runtime_->reactor.block_on(copy->run(take, none));
    runtime_->reactor.block_on([](StateCopy& its) -> Task<> {
      its.end();
      co_return;
    }(*copy));
    return arrays;
  }
  std::unique_ptr<LentEngine> opened() {
    std::vector<TypedSpan<std::byte>> lent;
    for (TypedArray& values : values_) lent.push_back(values.span());
    return LentEngine::open(model_, config_, *runtime_, lent);
  }
  void write_param(std::size_t p) {
    for (std::size_t i = 0; i < values_[p].count(); i += 3) {
      const float value = any();
      values_[p].set(i, value);
      alone_values_[p].set(i, value);
    }
  }
  void expect_values(std::size_t p, const char* when) {
    ASSERT_EQ(values_[p].bytes, alone_values_[p].bytes) << "parameter " << p << " " << when;
  }
  bool coin(std::uint32_t sides) { return random_() % sides == 0; }
  float any() { return std::uniform_real_distribution<float>(-1, 1)(random_); }

  LentKind kind_;
  ModelSpec model_;
  std::mt19937 random_;
  ScratchDirectory directory_;
  EngineConfig config_;
  std::unique_ptr<Runtime> runtime_;
  std::vector<std::uint64_t> steps_;
  std::vector<TypedArray> values_;
  std::vector<TypedArray> alone_values_;
  std::unique_ptr<LentEngine> engine_;
  std::vector<std::unique_ptr<LentEngine>> alone_;
};

// Records that stay in memory are of the class that also needs work items for packed units.
TEST(Packing, LeavesAWorkItemInTheLeastMemoryThatWorks) {
  const std::vector<std::int64_t> counts{16'384, 16'000, 9'000, 16'384, 20'000, 16'000, 7, 16'384};
  const ModelSpec model = lent_model(counts, DType::kBFloat16);
  const ScratchDirectory directory;
  for (const Where where : {Where::kMemory, Where::kHost, Where::kNvme}) {
    EngineConfig config = config_of({kFp32, DType::kBFloat16}, where, directory);
    for (const std::uint64_t budget : {std::uint64_t{0}, smallest_budget(model, config)}) {
      config.host_budget_bytes = budget;
      config.resume = EngineConfig::Resume::kNever;
      LentTrainer trainer(model, config.optimizer.state);
      const auto runtime = runtime_of(2);
      const auto engine = LentEngine::open(model, config, *runtime, trainer.lent());
      for (int step = 0; step < 3; ++step) trainer.step(*engine);
      engine->wait_all_updated();
      EXPECT_TRUE(trainer.same());
      for (ParamId p = 0; p < counts.size(); ++p) {
        std::vector<float> values(static_cast<std::size_t>(counts[p]));
        engine->read_state(p, "exp_avg", values);
      }
    }
  }
}

class PackedBits : public ::testing::TestWithParam<std::tuple<LentKind, Where>> {};

INSTANTIATE_TEST_SUITE_P(
    Formats, PackedBits,
    ::testing::Combine(::testing::Values(LentKind{kFp32, DType::kFloat32},
                                         LentKind{kFp32, DType::kFloat16},
                                         LentKind{kBf16Moments, DType::kFloat32},
                                         LentKind{k8Bit, DType::kBFloat16},
                                         LentKind{k8Bit, DType::kBFloat16, Rounding::kStochastic},
                                         LentKind{kSplit, DType::kBFloat16},
                                         LentKind{kBf16, DType::kBFloat16},
                                         LentKind{kFp32, DType::kBFloat16, Rounding::kStochastic},
                                         LentKind{kBf16, DType::kBFloat16, Rounding::kStochastic}),
                       ::testing::Values(Where::kMemory, Where::kHost, Where::kNvme)),
    [](const auto& one) { return name_of(one.param); });

TEST_P(PackedBits, AreThoseOfEachParameterAlone) {
  const auto [kind, where] = GetParam();
  for (const std::uint64_t seed : {1U, 2U}) {
    SCOPED_TRACE(seed);
    Twins twins(kind, where, seed);
    twins.expect_same();
    for (int i = 0; i < 8; ++i) {
      twins.step();
      if (i % 3 == 1) {
        twins.write_state();
        twins.expect_same();  // with what was written since the step
        if (::testing::Test::HasFatalFailure()) return;
        twins.step();
      }
      twins.expect_same();
      if (::testing::Test::HasFatalFailure()) return;
      if (i % 2 == 0) twins.move();
      if (i % 4 == 2 && where != Where::kMemory) twins.reopen();
      if (::testing::Test::HasFatalFailure()) return;
    }
    twins.expect_same_copies();
  }
}

}  // namespace lent_packing_test
}  // namespace ziggurat::testing

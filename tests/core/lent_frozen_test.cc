// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_frozen_test.cc: frozen parameters are brought with the trained ones of their
// unit, are written once, and leave no trace in the store; an engine may have nothing else; and
// what is refused.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/memory_exhausted.h"
#include "tests/core/lent_kinds.h"
#include "tiers/device/host_device.h"

namespace ziggurat::testing {
namespace lent_frozen_test {

using ::testing::HasSubstr;
using enum StateFormat;

constexpr StreamedUnit kUnits = 3;
constexpr ParamId kTrained = 6;
/// The trained ones, then the frozen ones: small ones that share a unit, one of several chunks.
const std::vector<std::int64_t> kCounts{1, 105, 16'384, 16'385,  300'000, 7,  //
                                        3, 105, 20'000, 400'000, 9};

/// Every unit has parameters of two types, trained and frozen.
ModelSpec mixed_model() {
  ModelSpec model = lent_model(kCounts, DType::kBFloat16);
  for (ParamId p = 0; p < kCounts.size(); ++p) {
    ParamSpec& param = model.units[p].params[0];
    param.streamed = p % kUnits;
    param.frozen = p >= kTrained;
    if (p % 2 == 0) model.units[p].dtype = DType::kFloat32;
  }
  return model;
}
ModelSpec without_frozen(ModelSpec model) {
  model.units.resize(kTrained);
  return model;
}
ModelSpec frozen_alone(ModelSpec model) {
  model.units.erase(model.units.begin(), model.units.begin() + kTrained);
  for (std::uint32_t p = 0; p < model.units.size(); ++p) model.units[p].params[0].group = p;
  return model;
}

TypedArray values_of(const ModelSpec& model, ParamId param) {
  const UnitSpec& unit = model.units[param];
  TypedArray values(unit.dtype.value_or(model.dtype), unit.count());
  for (std::size_t i = 0; i < values.count(); ++i) values.set(i, initial_value(param, i));
  return values;
}

/// An engine for `model`, whose parameters begin with `given`.
class Opened {
 public:
  Opened(const ModelSpec& model, EngineConfig config, const std::vector<TypedArray>& given)
      : model_(model) {
    std::vector<TypedSpan<std::byte>> lent(model.units.size());
    given_ = given;
    for (std::size_t p = 0; p < given_.size(); ++p) lent[p] = given_[p].span();
    config.counts_steps = true;
    engine = LentEngine::open(model, std::move(config), *runtime_, lent, device_.get());
  }
  std::size_t trained() const {
    return static_cast<std::size_t>(std::ranges::count_if(
        model_.units, [](const UnitSpec& unit) { return !unit.params[0].frozen; }));
  }
  void write(ParamId param, const TypedArray& values) {
    Host host;
    const StreamedUnit unit = *model_.units[param].params[0].streamed;
    engine->acquire(unit, host);
    std::ranges::copy(values.bytes, place(param));
    engine->store_param(param, host);
    engine->release(unit, host);
  }
  TypedArray read(ParamId param) {
    Host host;
    TypedArray values(model_.units[param].dtype.value_or(model_.dtype),
                      model_.units[param].count());
    const StreamedUnit unit = *model_.units[param].params[0].streamed;
    engine->acquire(unit, host);
    std::memcpy(values.bytes.data(), place(param), values.bytes.size());
    engine->release(unit, host);
    return values;
  }
  /// Makes a step in which every `left_out`-th trained parameter has no gradient.
  void step(std::size_t left_out) {
    engine->wait_all_updated();
    std::vector<TypedArray> gradients(model_.units.size());
    std::vector<TypedSpan<const std::byte>> lent(model_.units.size());
    std::vector<GroupStep> groups(model_.units.size());
    for (std::size_t p = 0; p < trained(); ++p) {
      groups[p].learning_rate = 0.01F;
      if (p % left_out == left_out - 1) continue;
      gradients[p] = TypedArray(DType::kFloat32, model_.units[p].count());
      for (std::size_t i = 0; i < gradients[p].count(); ++i)
        gradients[p].set(i, initial_value(static_cast<UnitId>(p), i) * 0.5F);
      lent[p] = gradients[p].span();
    }
    StepOptions options{.blob = {}};
    options.groups = groups;
    engine->step(lent, options);
    engine->wait_all_updated();
  }

 private:
  std::byte* place(ParamId param) const {
    return reinterpret_cast<std::byte*>(engine->place(param).bytes.address());
  }
  ModelSpec model_;
  std::vector<TypedArray> given_;
  std::unique_ptr<Runtime> runtime_ = runtime_of(2);
  std::unique_ptr<HostDevice> device_ = HostDevice::create(runtime_->reactor, 6 * kMiB);

 public:
  std::unique_ptr<LentEngine> engine;
};

std::vector<TypedArray> all_values(const ModelSpec& model) {
  std::vector<TypedArray> all;
  for (ParamId p = 0; p < model.units.size(); ++p) all.push_back(values_of(model, p));
  return all;
}

/// The least memory in which the engine works: no record stays in it.
std::uint64_t least_budget(const ModelSpec& model, EngineConfig config) {
  const ScratchDirectory directory;
  config.store = {{directory.path()}};
  config.host_budget_bytes = 4096;
  try {
    Opened(model, config, all_values(model));
  } catch (const MemoryExhausted& error) {
    return error.shortage().smallest_bytes;
  }
  ADD_FAILURE() << "opened in a page";
  return 0;
}

class FrozenPlaces : public ::testing::TestWithParam<std::tuple<Where, Tier>> {
 protected:
  EngineConfig config() const {
    EngineConfig config =
        config_of({kFp32, DType::kBFloat16}, std::get<Where>(GetParam()), directory_);
    config.placement.params = std::get<Tier>(GetParam());
    if (config.placement.optimizer == Tier::kNvme)
      config.host_budget_bytes = least_budget(mixed_model(), config);
    return config;
  }
  ScratchDirectory directory_;
};

std::string name_of_places(const ::testing::TestParamInfo<FrozenPlaces::ParamType>& one) {
  const char* const state = std::get<Where>(one.param) == Where::kNvme ? "nvme" : "host";
  return fmt::format("state_{}_params_{}", state, to_string(std::get<Tier>(one.param)));
}
INSTANTIATE_TEST_SUITE_P(Places, FrozenPlaces,
                         ::testing::Combine(::testing::Values(Where::kHost, Where::kNvme),
                                            ::testing::Values(Tier::kDevice, Tier::kHost,
                                                              Tier::kNvme)),
                         name_of_places);

TEST_P(FrozenPlaces, StayWhatTheyAreBesideTrainedOnesOfTheirUnit) {
  const ModelSpec model = mixed_model();
  const std::vector<TypedArray> values = all_values(model);
  const ScratchDirectory apart;
  std::vector<TypedArray> expected;
  {
    EngineConfig alone = config();
    alone.host_budget_bytes = 64 * kMiB;
    alone.store = {{apart.path()}};
    Opened trained(without_frozen(model), alone, {values.begin(), values.begin() + kTrained});
    for (std::size_t s = 0; s < 3; ++s) trained.step(2 + s);
    for (ParamId p = 0; p < kTrained; ++p) expected.push_back(trained.read(p));
  }
  expected.insert(expected.end(), values.begin() + kTrained, values.end());
  {
    Opened its(model, config(), values);
    for (std::size_t s = 0; s < 3; ++s) {
      its.step(2 + s);
      for (ParamId p = kTrained; p < model.units.size(); ++p)
        ASSERT_EQ(its.read(p).bytes, values[p].bytes) << "parameter " << p << ", step " << s;
    }
    for (ParamId p = 0; p < model.units.size(); ++p)
      EXPECT_EQ(its.read(p).bytes, expected[p].bytes) << "parameter " << p;
    its.engine->make_durable();
  }
  // The store knows only what was trained, so a run goes on with the frozen ones, or without.
  {
    Opened without(without_frozen(model), config(), {});
    ASSERT_TRUE(without.engine->resumed());
    for (ParamId p = 0; p < kTrained; ++p) ASSERT_EQ(without.read(p).bytes, expected[p].bytes);
  }
  Opened again(model, config(), {});
  ASSERT_TRUE(again.engine->resumed());
  EXPECT_EQ(again.engine->generation(), 3U);
  for (ParamId p = 0; p < kTrained; ++p) EXPECT_EQ(again.read(p).bytes, expected[p].bytes);
  for (ParamId p = kTrained; p < model.units.size(); ++p) {
    EXPECT_EQ(again.read(p).bytes, TypedArray(values[p].dtype, values[p].count()).bytes)
        << "parameter " << p << " was not given again, and is not zero";
    again.write(p, values[p]);
  }
  for (ParamId p = 0; p < model.units.size(); ++p)
    EXPECT_EQ(again.read(p).bytes, expected[p].bytes) << "parameter " << p;
}

// The masters of a new store are what the parameters are when they are first asked for.
TEST_P(FrozenPlaces, WhatIsWrittenBeforeTheFirstStepIsTheMastersAllOver) {
  const ModelSpec model = mixed_model();
  const std::vector<TypedArray> values = all_values(model);
  for (const std::uint64_t budget : {config().host_budget_bytes, 64 * kMiB}) {
    const ScratchDirectory directory;
    EngineConfig config = this->config();
    config.store = {{directory.path()}};
    config.host_budget_bytes = budget;
    Opened its(model, config, {});
    for (ParamId p = 0; p < model.units.size(); ++p) its.write(p, values[p]);
    if (config.placement.optimizer != Tier::kNvme) continue;  // made at open, and taken at a step
    for (ParamId p = 0; p < kTrained; ++p) {
      std::vector<float> master(values[p].count());
      its.engine->read_state(p, "master", master);
      for (std::size_t i = 0; i < master.size(); ++i)
        ASSERT_EQ(master[i], values[p].at(i)) << "parameter " << p << ", element " << i;
    }
    its.engine->make_durable();  // nothing yet
    EXPECT_FALSE(std::filesystem::exists(directory.path() + "/rank00000.ziggurat"));
  }
}

// A device that is used again has what was there before.
TEST(FrozenParams, BeginWithZerosOnADeviceThatWasUsed) {
  const auto runtime = runtime_of(2);
  const auto device = HostDevice::create(runtime->reactor, 6 * kMiB);
  {
    const DeviceBuffer all = device->allocate(4 * kMiB, Purpose::kParams);
    std::memset(all.data(), 0x77, 4 * kMiB);
  }
  const ScratchDirectory directory;
  const ModelSpec model = mixed_model();
  EngineConfig config = config_of({kFp32, DType::kBFloat16}, Where::kNvme, directory);
  config.placement.params = Tier::kDevice;
  config.counts_steps = true;
  const std::vector<TypedSpan<std::byte>> none(model.units.size());
  const auto engine = LentEngine::open(model, config, *runtime, none, device.get());
  Host host;
  for (StreamedUnit unit = 0; unit < kUnits; ++unit) engine->acquire(unit, host);
  for (ParamId p = 0; p < model.units.size(); ++p) {
    const DeviceSpan<std::byte> place = engine->place(p).bytes;
    const std::span bytes(reinterpret_cast<const std::byte*>(place.address()), place.size());
    EXPECT_THAT(bytes, ::testing::Each(std::byte{0})) << "parameter " << p;
  }
  for (StreamedUnit unit = 0; unit < kUnits; ++unit) engine->release(unit, host);
}

// What a drive was given: the frozen parameters once, in whole blocks.
TEST(FrozenParams, AreWrittenOnce) {
  const ModelSpec model = mixed_model();
  const auto written = [&](const ModelSpec& its, std::size_t steps) {
    const ScratchDirectory directory;
    EngineConfig config = config_of({kFp32, DType::kBFloat16}, Where::kNvme, directory);
    config.placement.params = Tier::kNvme;
    const std::vector<TypedArray> values = all_values(its);
    Opened opened(its, config, values);
    for (std::size_t s = 0; s < steps; ++s) {
      for (ParamId p = 0; p < its.units.size(); ++p) opened.read(p);
      opened.step(2);
    }
    opened.engine->make_durable();
    return opened.engine->metrics().value(Counter::kNvmeWriteBytes);
  };
  const std::uint64_t frozen_once = written(model, 0) - written(without_frozen(model), 0);
  EXPECT_EQ(written(model, 4) - written(without_frozen(model), 4), frozen_once);
  std::uint64_t bytes = 0;
  for (ParamId p = kTrained; p < model.units.size(); ++p) bytes += values_of(model, p).bytes.size();
  EXPECT_GE(frozen_once, bytes);
  EXPECT_LE(frozen_once, bytes + kUnits * 2 * kTileElements * sizeof(float) + 512 * kKiB);
}

TEST(FrozenParams, AloneNeedNoStoreAndMakeNoStep) {
  const ModelSpec model = frozen_alone(mixed_model());
  const std::vector<TypedArray> values = all_values(model);
  const ScratchDirectory directory;
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    EngineConfig config = config_of({kFp32, DType::kBFloat16}, Where::kNvme, directory);
    config.placement.params = tier;
    if (tier != Tier::kNvme) config.store.clear();
    Opened its(model, config, {});
    EXPECT_FALSE(its.engine->resumed());
    for (ParamId p = 0; p < model.units.size(); ++p) its.write(p, values[p]);
    for (ParamId p = 0; p < model.units.size(); ++p)
      EXPECT_EQ(its.read(p).bytes, values[p].bytes) << to_string(tier) << ", parameter " << p;
    try {
      its.step(2);
      ADD_FAILURE() << "a step was made";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("every parameter is frozen"));
    }
    for (ParamId p = 0; p < model.units.size(); ++p)
      EXPECT_EQ(its.read(p).bytes, values[p].bytes) << to_string(tier) << ", parameter " << p;
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(FrozenParams, HaveNeitherGradientsNorState) {
  const ScratchDirectory directory;
  const ModelSpec model = mixed_model();
  EngineConfig config = config_of({kFp32, DType::kBFloat16}, Where::kNvme, directory);
  config.placement.grads = Tier::kNvme;
  Opened its(model, config, all_values(model));
  const auto refused = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  std::vector<float> values(3);
  TypedArray gradient(DType::kFloat32, 3);
  EXPECT_THAT(refused([&] { its.engine->read_state(kTrained, "master", values); }),
              HasSubstr("the parameter is frozen"));
  EXPECT_THAT(refused([&] { its.engine->write_state(kTrained, "master", values); }),
              HasSubstr("the parameter is frozen"));
  EXPECT_THAT(refused([&] { its.engine->add_gradient(kTrained, gradient.span(), 1); }),
              HasSubstr("the parameter is frozen"));
  std::vector<TypedSpan<const std::byte>> gradients(model.units.size());
  gradients[kTrained] = gradient.span();
  std::vector<GroupStep> groups(model.units.size());
  StepOptions options{.blob = {}};
  options.groups = groups;
  EXPECT_THAT(refused([&] { its.engine->step(gradients, options); }),
              HasSubstr("step(parameter 6 'unit6'): the parameter is frozen"));
  its.step(2);
  EXPECT_EQ(its.engine->pieces_of(0).size(), kTrained);

  const auto opening = [&](const ModelSpec& wrong) {
    const ScratchDirectory other;
    config.store = {{other.path()}};
    return refused([&] { Opened(wrong, config, all_values(wrong)); });
  };
  ModelSpec wrong = model;
  wrong.units[1].params[0].frozen = true;
  EXPECT_THAT(opening(wrong), HasSubstr("give the frozen parameters after all others"));
  wrong = model;
  wrong.units.back().params[0].streamed = std::nullopt;
  EXPECT_THAT(opening(wrong), HasSubstr("is frozen, but in the caller's memory"));
}

}  // namespace lent_frozen_test
}  // namespace ziggurat::testing

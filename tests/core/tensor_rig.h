// SPDX-License-Identifier: Apache-2.0
// tests/core/tensor_rig.h: a rank of those that divide every layer, with its trainer: the model of
// which each has a part, and a step that the same training in plain arrays makes as a whole.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/sharding/tensor_part.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {

inline constexpr float kPartLearningRate = 0.01F;

/// Divided and shared parameters side by side within a tile, and in tiles of their own.
inline ModelSpec whole_model() {
  return {
      "divided",
      {{"table",
        {{.name = "table.weight", .shape = {256, 96}, .tp_dim = 0},
         {.name = "positions.weight", .shape = {200, 128}}}},
       {"layer",
        {{.name = "columns.weight", .shape = {40, 192}, .tp_dim = 1, .tp_sections = 3},
         {.name = "rows.weight", .shape = {320, 90}, .tp_dim = 0},
         {.name = "norm.weight", .shape = {300}, .decay = false},
         {.name = "columns.bias", .shape = {192}, .decay = false, .tp_dim = 0, .tp_sections = 3},
         {.name = "rows.bias", .shape = {90}, .decay = false}}}}};
}

/// For each element of the part's unit, its number in the whole.
inline std::vector<std::uint64_t> whole_elements(const UnitSpec& unit, TensorPart part) {
  std::vector<std::uint64_t> elements(unit.count());
  for_each_run(unit, part, 0, unit.count(), [&](const PartRun& run) {
    for (std::uint64_t i = 0; i < run.count; ++i) elements[run.begin + i] = run.whole_begin + i;
  });
  return elements;
}

/// How a trainer on the CPU comes by a device's bytes.
class DeviceBytes {
 public:
  virtual ~DeviceBytes() = default;
  virtual std::vector<std::byte> read(DeviceSpan<const std::byte> bytes) = 0;
  virtual void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) = 0;
};

class HostBytes final : public DeviceBytes {
 public:
  std::vector<std::byte> read(DeviceSpan<const std::byte> bytes) override {
    const std::span<const std::byte> view = HostDevice::view(bytes);
    return {view.begin(), view.end()};
  }
  void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) override {
    std::ranges::copy(bytes, HostDevice::view(to).begin());
  }
};

/// One rank: its part of the model, and what a trainer that computes it would do.
class PartRig {
 public:
  PartRig(Runtime& runtime, const EngineConfig& config, std::unique_ptr<Device> device,
          std::unique_ptr<DeviceBytes> bytes)
      : part_{runtime.ranks->rank() % config.tensor_parallel, config.tensor_parallel},
        data_rank_(runtime.ranks->rank() / config.tensor_parallel),
        model_(part_of(whole_model(), part_.ranks)),
        device_(std::move(device)),
        bytes_(std::move(bytes)) {
    for (const UnitSpec& unit : model_.units) elements_.push_back(whole_elements(unit, part_));
    engine = Engine::open(model_, config, runtime, *device_,
                          [this](UnitId unit, std::uint64_t first, std::span<float> values) {
                            for (std::size_t i = 0; i < values.size(); ++i)
                              values[i] = initial_value(unit, elements_[unit][first + i]);
                          });
  }

  /// `fault` is added to a shared gradient's element.
  StepResult step(std::uint64_t step, float fault = 0) {
    engine->prepare_step({.learning_rate = kPartLearningRate, .blob = {}});
    for (auto u = static_cast<UnitId>(model_.units.size()); u-- > 0;) {
      const std::vector<std::byte> read = bytes_->read(engine->acquire(u).bytes);
      const TypedSpan<const std::byte> params{model_.dtype, read};
      const DeviceSpan<std::byte> accumulator = engine->gradient(u).as<std::byte>();
      std::vector<std::byte> sums = bytes_->read(accumulator);
      const std::span<float> gradient(reinterpret_cast<float*>(sums.data()), params.count());
      for (std::size_t i = 0; i < params.count(); ++i)
        gradient[i] += gradient_of(value_at(params, i), u, elements_[u][i], step, data_rank_);
      if (u == 1) gradient[shared_runs(model_.units[u])[0].begin] += fault;
      bytes_->write(accumulator, sums);
      engine->release(u);
      engine->finish_gradient(u);
    }
    return engine->step({.learning_rate = kPartLearningRate, .blob = {}});
  }

  /// The parameters have `plain`'s bits.
  bool has_params_of(const PlainTraining& plain) {
    bool same = true;
    for (UnitId u = 0; u < model_.units.size(); ++u) {
      const std::vector<std::byte> read = bytes_->read(engine->acquire(u).bytes);
      const TypedSpan<const std::byte> params{model_.dtype, read};
      for (std::size_t i = 0; i < params.count(); ++i)
        same = same && value_at(params, i) == value_at(plain.params(u), elements_[u][i]);
      engine->release(u);
    }
    return same;
  }

 private:
  TensorPart part_;
  int data_rank_;
  ModelSpec model_;
  std::vector<std::vector<std::uint64_t>> elements_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<DeviceBytes> bytes_;

 public:
  std::unique_ptr<Engine> engine;
};

}  // namespace ziggurat::testing

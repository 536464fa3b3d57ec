// SPDX-License-Identifier: Apache-2.0
// tests/support/ram_engine.cc: plain scalar AdamW over vectors.
#include "tests/support/ram_engine.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "optimizer/gradient.h"
#include "tests/support/typed_values.h"

namespace ziggurat::testing {

RamEngine::RamEngine(const ModelSpec& model, const OptimizerConfig& adamw, float clip_norm,
                     const Initializer& initialize)
    : dtype_(model.dtype), adamw_(adamw), clip_norm_(clip_norm) {
  for (const UnitSpec& spec : model.units) {
    Unit unit;
    std::uint64_t end = 0;
    for (const ParamSpec& param : spec.params) {
      end += param.count();
      unit.ends.push_back(end);
      unit.decay.push_back(param.decay);
    }
    unit.master.resize(end);
    unit.exp_avg.resize(end);
    unit.exp_avg_sq.resize(end);
    unit.accumulator.resize(end);
    unit.rounded.resize(end * size_bytes(dtype_));
    unit.params.resize(end * size_bytes(dtype_));
    initialize(static_cast<UnitId>(units_.size()), 0, unit.master);
    round_params(unit.master, {dtype_, unit.params});
    units_.push_back(std::move(unit));
  }
}

TypedDeviceSpan<const std::byte> RamEngine::acquire(UnitId id, StreamRef&) {
  Unit& unit = units_.at(id);
  ++unit.acquired;
  acquisitions_.push_back(id);
  return {dtype_, {reinterpret_cast<std::uintptr_t>(unit.params.data()), unit.params.size()}};
}

void RamEngine::release(UnitId id, StreamRef&) {
  ZIGGURAT_CHECK(units_.at(id).acquired > 0, "released more often than acquired");
  --units_[id].acquired;
}

DeviceSpan<float> RamEngine::gradient(UnitId id, StreamRef&) {
  Unit& unit = units_.at(id);
  ZIGGURAT_CHECK(!unit.finished, "a finished gradient asked for again");
  if (!unit.open) std::fill(unit.accumulator.begin(), unit.accumulator.end(), 0.0F);
  unit.open = true;
  return {reinterpret_cast<std::uintptr_t>(unit.accumulator.data()), unit.accumulator.size()};
}

void RamEngine::finish_gradient(UnitId id, StreamRef&) {
  Unit& unit = units_.at(id);
  ZIGGURAT_CHECK(unit.open && !unit.finished, "finish_gradient without gradient");
  round_params(unit.accumulator, {dtype_, unit.rounded});
  unit.finished = true;
}

StepResult RamEngine::step(const StepOptions& options) {
  double sum = 0;
  for (const Unit& unit : units_) {
    ZIGGURAT_CHECK(unit.finished, "step() before every gradient was finished");
    for (std::size_t i = 0; i < unit.master.size(); ++i) {
      const auto g = static_cast<double>(value_at({dtype_, unit.rounded}, i));
      sum += g * g;
    }
  }
  const float loss_scale = options.loss_scale.value_or(1.0F);
  const double norm = std::sqrt(sum) / static_cast<double>(loss_scale);
  if (options.loss_scale && !std::isfinite(norm)) {
    drop_gradients();
    return {.generation = generation_, .grad_norm = norm, .skipped = true};
  }
  const bool clipped = clip_norm_ > 0 && norm > static_cast<double>(clip_norm_);
  const auto scale =
      (clipped ? static_cast<float>(static_cast<double>(clip_norm_) / norm) : 1.0F) / loss_scale;
  ++generation_;
  for (Unit& unit : units_) update(unit, options.learning_rate, scale);
  drop_gradients();
  return {.generation = generation_, .grad_norm = norm, .clipped = clipped};
}

void RamEngine::update(Unit& unit, float learning_rate, float scale) {
  const double bias_1 =
      1.0 - std::pow(static_cast<double>(adamw_.beta1), static_cast<double>(generation_));
  const double bias_2 =
      1.0 - std::pow(static_cast<double>(adamw_.beta2), static_cast<double>(generation_));
  const auto step_size = static_cast<float>(static_cast<double>(learning_rate) / bias_1);
  const auto inverse_bias_2 = static_cast<float>(1.0 / std::sqrt(bias_2));
  std::size_t param = 0;
  for (std::size_t i = 0; i < unit.master.size(); ++i) {
    while (i >= unit.ends[param]) ++param;
    const float g = value_at({dtype_, unit.rounded}, i) * scale;
    unit.exp_avg[i] = adamw_.beta1 * unit.exp_avg[i] + (1 - adamw_.beta1) * g;
    unit.exp_avg_sq[i] = adamw_.beta2 * unit.exp_avg_sq[i] + (1 - adamw_.beta2) * g * g;
    const float decay = unit.decay[param] ? 1.0F - learning_rate * adamw_.weight_decay : 1.0F;
    const float root = std::sqrt(unit.exp_avg_sq[i]) * inverse_bias_2 + adamw_.eps;
    unit.master[i] = unit.master[i] * decay - step_size * unit.exp_avg[i] / root;
  }
  round_params(unit.master, {dtype_, unit.params});
}

MasterChunk RamEngine::read_master(UnitId unit, std::size_t) {
  return {.first = 0, .values = units_.at(unit).master};
}

int RamEngine::acquired() const {
  int total = 0;
  for (const Unit& unit : units_) total += unit.acquired;
  return total;
}

void RamEngine::drop_gradients() {
  for (Unit& unit : units_) unit.open = unit.finished = false;
}

}  // namespace ziggurat::testing

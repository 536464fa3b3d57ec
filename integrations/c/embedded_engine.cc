// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_engine.cc: parameters as units, and the budgets of a run that keeps them
// all at hand.
#include "integrations/c/embedded_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/numerics/float16.h"
#include "core/plan/run_plan.h"
#include "tiers/host_device.h"

namespace ziggurat {
namespace {

Error wrong(const std::string& message) { return {ErrorCode::kInvalidArgument, message}; }

/// Calls `use` with each element of `values`, widened.
template <class Use>
void for_each_widened(TypedSpan<const std::byte> values, const Use& use) {
  const auto all = [&](const auto& elements, const auto& widen) {
    for (std::size_t i = 0; i < elements.size(); ++i) use(i, widen(elements[i]));
  };
  switch (values.dtype) {
    case DType::kBFloat16: return all(values.as<bf16>(), bf16_to_float);
    case DType::kFloat16: return all(values.as<fp16>(), fp16_to_float);
    case DType::kFloat32: return all(values.as<float>(), [](float value) { return value; });
  }
}

ModelSpec model_of(const std::vector<EmbeddedParam>& params) {
  if (params.empty()) throw wrong("a model without parameters");
  ModelSpec model{.name = "embedded", .units = {}, .dtype = params[0].values.dtype};
  std::set<std::string> names;
  for (const EmbeddedParam& param : params) {
    if (param.name.empty()) throw wrong("a parameter without a name");
    if (!names.insert(param.name).second)
      throw wrong(fmt::format("two parameters have the name '{}'", param.name));
    for (const std::int64_t size : param.shape) {
      if (size <= 0)
        throw wrong(fmt::format("parameter '{}': a dimension of {}", param.name, size));
    }
    if (param.values.dtype != model.dtype) {
      throw Error(ErrorCode::kUnimplemented,
                  fmt::format("parameter '{}' is {} and '{}' is {}: models of several types are "
                              "not built yet",
                              param.name, to_string(param.values.dtype), params[0].name,
                              to_string(model.dtype)));
    }
    const ParamSpec spec{.name = param.name, .shape = param.shape, .group = param.group};
    if (param.values.count() != spec.count()) {
      throw wrong(fmt::format("parameter '{}' has {} elements by its shape, and {} in memory",
                              param.name, spec.count(), param.values.count()));
    }
    model.units.push_back({.name = param.name, .params = {spec}});
  }
  return model;
}

/// All accumulators are open at once: gradients come in any order, and are added to until step().
std::vector<UnitId> all_units(const ModelSpec& model) {
  std::vector<UnitId> units(model.units.size());
  std::iota(units.begin(), units.end(), UnitId{0});
  return units;
}

}  // namespace

EmbeddedEngine::EmbeddedEngine(Runtime& runtime, const std::vector<EmbeddedParam>& params,
                               EngineConfig config)
    : model_(model_of(params)), has_gradient_(params.size()) {
  config.placement.params = Tier::kDevice;
  config.placement.grads = Tier::kHost;
  config.trainer_held_units = all_units(model_);
  const RunPlan plan =
      plan_run({.model = model_,
                .state = config.optimizer.state,
                .placement = config.placement,
                .device = {.trainer = {.device_bytes = 0, .held = config.trainer_held_units}},
                .slots = config.slots,
                .budgets = {.device_bytes = 0, .host_bytes = config.host_budget_bytes}});
  config.host_budget_bytes = plan.budgets.host_bytes;
  device_ = HostDevice::create(runtime.reactor, plan.budgets.device_bytes, runtime.trace.get(),
                               &runtime.metrics);
  const Initializer initialize = [&](UnitId unit, std::uint64_t first, std::span<float> values) {
    for_each_widened(params[unit].values.subspan(first, values.size()),
                     [&](std::size_t i, float value) { values[i] = value; });
  };
  engine_ = Engine::open(model_, config, runtime, *device_, initialize);
}

void EmbeddedEngine::require_count(const char* call, std::size_t param, std::size_t count) const {
  if (param >= model_.units.size()) {
    throw wrong(fmt::format("{}(parameter {}): the model has {}: give 0 to {}", call, param,
                            model_.units.size(), model_.units.size() - 1));
  }
  const UnitSpec& unit = model_.units[param];
  if (count == unit.count()) return;
  throw wrong(fmt::format("{}(parameter {} '{}'): {} elements, and it has {}", call, param,
                          unit.name, count, unit.count()));
}

void EmbeddedEngine::put_gradient(std::size_t param, TypedSpan<const std::byte> values) {
  const std::lock_guard lock(mutex_);
  require_count("put_gradient", param, values.count());
  const std::span<float> sum = engine_->gradient(static_cast<UnitId>(param));
  for_each_widened(values, [&](std::size_t i, float value) { sum[i] += value; });
  has_gradient_[param] = true;
}

void EmbeddedEngine::require_gradients() const {
  const auto missing = std::ranges::find(has_gradient_, false);
  if (missing == has_gradient_.end()) return;
  const auto param = static_cast<std::size_t>(missing - has_gradient_.begin());
  throw wrong(
      fmt::format("step() before parameter {} '{}' had a gradient: put one for each "
                  "({} of {} have none)",
                  param, model_.units[param].name, std::ranges::count(has_gradient_, false),
                  has_gradient_.size()));
}

StepResult EmbeddedEngine::step(const StepOptions& options) {
  const std::lock_guard lock(mutex_);
  require_gradients();
  has_gradient_.assign(has_gradient_.size(), false);
  engine_->prepare_step(options);
  for (auto unit = static_cast<UnitId>(param_count()); unit-- > 0;) engine_->finish_gradient(unit);
  return engine_->step(options);
}

void EmbeddedEngine::read_param(std::size_t param, TypedSpan<std::byte> values) {
  const std::lock_guard lock(mutex_);
  require_count("read_param", param, values.count());
  if (values.dtype != model_.dtype) {
    throw wrong(fmt::format("read_param(parameter {} '{}'): it is {}, and the memory {}", param,
                            model_.units[param].name, to_string(model_.dtype),
                            to_string(values.dtype)));
  }
  const auto unit = static_cast<UnitId>(param);
  const TypedSpan<const std::byte> held = engine_->acquire(unit);
  std::memcpy(values.bytes.data(), held.bytes.data(), values.bytes.size());
  engine_->release(unit);
}

void EmbeddedEngine::make_durable() {
  const std::lock_guard lock(mutex_);
  engine_->make_durable();
}

EmbeddedEngine::State EmbeddedEngine::state() const {
  const std::lock_guard lock(mutex_);
  return {.resumed = engine_->resumed(),
          .generation = engine_->generation(),
          .durable_generation = engine_->durable_generation(),
          .blob_bytes = engine_->resumed_blob().size()};
}

std::vector<std::byte> EmbeddedEngine::resumed_blob() const {
  const std::lock_guard lock(mutex_);
  const std::span<const std::byte> blob = engine_->resumed_blob();
  return {blob.begin(), blob.end()};
}

std::vector<std::string> EmbeddedEngine::description() const {
  const std::lock_guard lock(mutex_);
  return engine_->description();
}

}  // namespace ziggurat

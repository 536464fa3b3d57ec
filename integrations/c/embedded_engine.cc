// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_engine.cc: makes units of parameters, and steps with each parameter's own
// settings.
#include "integrations/c/embedded_engine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "integrations/c/measured_drives.h"
#include "integrations/c/wrong.h"

namespace ziggurat {
namespace {

/// Beyond any memory, and far below where products of dimensions would overflow.
constexpr std::uint64_t kMostElements = std::uint64_t{1} << 40;

void require_shape(const EmbeddedParam& param) {
  std::uint64_t count = 1;
  for (const std::int64_t size : param.shape) {
    if (size <= 0)
      throw wrong(
          fmt::format("parameter '{}' has a dimension of {}: give 1 or more", param.name, size));
    if (static_cast<std::uint64_t>(size) > kMostElements / count)
      throw wrong(
          fmt::format("parameter '{}' of shape [{}] has more than {} elements: check its shape",
                      param.name, fmt::join(param.shape, ", "), kMostElements));
    count *= static_cast<std::uint64_t>(size);
  }
}

ModelSpec model_of(const std::vector<EmbeddedParam>& params,
                   const std::vector<WholePlace>& pieces) {
  const auto trained =
      static_cast<std::size_t>(std::ranges::count(params, false, &EmbeddedParam::frozen));
  if (!pieces.empty() && pieces.size() != trained) {
    throw wrong(fmt::format(
        "`pieces` has {} places, but {} parameters are not frozen: give one for each of these",
        pieces.size(), trained));
  }
  if (params.empty()) throw wrong("the model has no parameters: give one or more");
  ModelSpec model{.name = "embedded", .units = {}, .dtype = params[0].values.dtype};
  std::set<std::string> names;
  std::map<std::uint32_t, bool> optional;  // whether the unit is
  for (const EmbeddedParam& param : params) {
    if (param.name.empty()) throw wrong("a parameter has no name: give each parameter a name");
    if (!names.insert(param.name).second)
      throw wrong(fmt::format("two parameters have the name '{}': give each parameter its own name",
                              param.name));
    require_shape(param);
    // Each is a group of its own: settings of parameters differ, if only by the count of steps.
    ParamSpec spec{.name = param.name,
                   .shape = param.shape,
                   .group = static_cast<std::uint32_t>(model.units.size())};
    if (param.streamed) spec.streamed = param.unit;
    if (param.streamed &&
        optional.emplace(param.unit, param.optional).first->second != param.optional)
      throw wrong(
          fmt::format("parameter '{}' of unit {} is ZIGGURAT_OPTIONAL, or another of the unit "
                      "is, but not both: give the flag to all parameters of the unit, or to "
                      "none",
                      param.name, param.unit));
    spec.frozen = param.frozen;
    if (model.units.size() < pieces.size()) spec.whole = pieces[model.units.size()];
    const bool left_out = param.streamed && param.values.bytes.empty();
    if (!left_out && param.values.count() != spec.count()) {
      throw wrong(fmt::format("parameter '{}' has {} elements by its shape, but {} in memory",
                              param.name, spec.count(), param.values.count()));
    }
    model.units.push_back({.name = param.name,
                           .params = {spec},
                           .dtype = param.values.dtype,
                           .optional = param.optional});
  }
  return model;
}

void require_blob(std::span<const std::byte> blob) {
  if (blob.size() <= kTrainerBlobBytes) return;
  throw wrong(fmt::format("the blob has {} bytes, but the store holds at most {}", blob.size(),
                          kTrainerBlobBytes));
}

}  // namespace

ModelSpec embedded_model(const std::vector<EmbeddedParam>& params, const EmbeddedConfig& config) {
  return model_of(params, config.pieces);
}

std::size_t trained_count(const std::vector<EmbeddedParam>& params) {
  return static_cast<std::size_t>(std::ranges::count(params, false, &EmbeddedParam::frozen));
}

EmbeddedEngine::EmbeddedEngine(Runtime& runtime, const std::vector<EmbeddedParam>& params,
                               EmbeddedConfig config)
    : EmbeddedEngine(runtime, params, std::move(config), nullptr) {}

EmbeddedEngine::EmbeddedEngine(Runtime& runtime, const std::vector<EmbeddedParam>& params,
                               EmbeddedConfig config, const EmbeddedLoad& load)
    : EmbeddedEngine(runtime, params, std::move(config), &load) {}

EmbeddedEngine::EmbeddedEngine(Runtime& runtime, const std::vector<EmbeddedParam>& params,
                               EmbeddedConfig config, const EmbeddedLoad* load)
    : runtime_(runtime),
      model_(model_of(params, config.pieces)),
      wholes_(config.wholes),
      trained_(ziggurat::trained_count(params)),
      written_(params.size()),
      gradients_(params.size()) {
  std::vector<TypedSpan<std::byte>> lent;
  for (const EmbeddedParam& param : params) {
    lent.push_back(param.values);
    groups_.push_back(param.group);
    group_count_ = std::max<std::size_t>(group_count_, param.group + std::size_t{1});
  }
  take_measured(config.store);
  config.blob_bytes_max = kTrainerBlobBytes;
  config.counts_steps = true;
  make_device(params, config);
  sums_on_nvme_ = config.placement.grads == Tier::kNvme;
  engine_ = load == nullptr ? LentEngine::open(model_, config, runtime, lent, device())
                            : opened_from(config, *load, lent);
}

void EmbeddedEngine::require_count(const char* call, std::size_t param, std::size_t count) const {
  if (param >= model_.units.size()) {
    throw wrong(fmt::format("{}(parameter {}): the model has {} parameters: give 0 to {}", call,
                            param, model_.units.size(), model_.units.size() - 1));
  }
  const UnitSpec& unit = model_.units[param];
  if (count == unit.count()) return;
  throw wrong(fmt::format("{}(parameter {} '{}'): {} elements were given, but the parameter has {}",
                          call, param, unit.name, count, unit.count()));
}

void EmbeddedEngine::require_trained(const char* call, std::size_t param) const {
  require_count(call, param, count_or_none(param));
  if (param < trained_) return;
  throw wrong(
      fmt::format("{}(parameter {} '{}'): the parameter is frozen, so it has no gradient "
                  "and no state",
                  call, param, name_of(param)));
}

void EmbeddedEngine::param_written(std::size_t param) {
  in_turn([&](LentEngine& engine) {
    if (const WholeParam* const its = whole(param)) {
      Host host;
      engine.store_param(static_cast<ParamId>(param), host);
      if (its->own) written_[*its->own] = *its->own < trained_;
      return;
    }
    require_count("param_written", param, count_or_none(param));
    if (model_.units[param].params[0].streamed) {
      Host host;
      engine.store_param(static_cast<ParamId>(param), host);
    }
    written_[param] = param < trained_;
  });
}

/// Returns every parameter's own settings, made from those of its group.
std::vector<GroupStep> EmbeddedEngine::param_steps(const EmbeddedStep& step) const {
  if (step.groups.size() != group_count_) {
    throw wrong(fmt::format(
        "step(): {} groups were given, but the parameters use {}: give the settings of each group",
        step.groups.size(), group_count_));
  }
  std::vector<GroupStep> all;
  for (std::size_t p = 0; p < param_count(); ++p) {
    GroupStep own = step.groups[groups_[p]];
    own.grad_scale = own.grad_scale * step.grad_scale * gradients_[p].scale;
    own.params_written = written_[p];
    all.push_back(own);
  }
  return all;
}

StepResult EmbeddedEngine::step(const EmbeddedStep& step) {
  return in_turn([&](LentEngine&) { return make_step(step); });
}

StepResult EmbeddedEngine::make_step(const EmbeddedStep& step) {
  std::vector<GroupStep> groups;
  try {
    groups = param_steps(step);
    require_blob(step.blob);
  } catch (const Error& error) {
    engine_->refuse_step(error);
  }
  std::vector<TypedSpan<const std::byte>> gradients;
  for (const Gradient& gradient : gradients_) gradients.push_back(gradient.values);
  StepOptions options{.blob = step.blob};
  options.groups = groups;
  options.blob_follows = step.blob_follows;
  options.update_at_once = step.update_at_once;
  const StepResult result = engine_->step(gradients, options);
  forget_gradients();
  written_.assign(written_.size(), false);
  return result;
}

void EmbeddedEngine::give_blob(std::span<const std::byte> blob) {
  in_turn([&](LentEngine& engine) {
    require_blob(blob);
    engine.give_blob(blob);
  });
}

void EmbeddedEngine::write_state(std::size_t param, std::string_view name,
                                 std::span<const float> values) {
  in_turn([&](LentEngine& engine) {
    require_trained("write_state", param);
    require_count("write_state", param, values.size());
    engine.write_state(static_cast<ParamId>(param), name, values);
    if (name == "master") written_[param] = false;
  });
}

void EmbeddedEngine::set_steps(std::size_t param, std::uint64_t steps) {
  in_turn([&](LentEngine& engine) {
    require_trained("set_steps", param);
    engine.set_steps(static_cast<ParamId>(param), steps);
  });
}

std::uint64_t EmbeddedEngine::steps_of(std::size_t param) const {
  const std::lock_guard lock(mutex_);
  require_count("steps_of", param, count_or_none(param));
  return param < trained_ ? engine_->steps_of(static_cast<ParamId>(param)) : 0;
}

}  // namespace ziggurat

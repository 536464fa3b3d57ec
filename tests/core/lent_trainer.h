// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_trainer.h: a trainer that lends an engine its parameters and gradients, and makes
// the same steps in plain arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "core/engine/lent_engine.h"
#include "tests/core/engine_harness.h"
#include "tests/support/group_settings.h"
#include "tests/support/plain_param.h"
#include "tests/support/typed_array.h"

namespace ziggurat::testing {

/// Where records are.
enum class Where { kMemory, kHost, kNvme };

/// Units of `counts` elements, each in a group of its own.
inline ModelSpec lent_model(const std::vector<std::int64_t>& counts, DType dtype) {
  ModelSpec model{.name = "lent", .units = {}, .dtype = dtype};
  for (std::size_t u = 0; u < counts.size(); ++u) {
    const std::string name = "unit" + std::to_string(u);
    model.units.push_back(
        {.name = name,
         .params = {{.name = name, .shape = {counts[u]}, .group = static_cast<std::uint32_t>(u)}}});
  }
  return model;
}

/// A step in which some units have no gradient, and some were written before it.
struct LentStep {
  std::set<UnitId> left_out{};
  std::set<UnitId> written{};
  bool update_at_once = false;
  std::set<UnitId> summed{};  ///< their gradients are added on NVMe, a half at a time
};

class LentTrainer {
 public:
  /// Among several ranks `own` are the units that this one has; empty: it has all.
  /// `rounding`: of all that is rounded; not given: as the engine does by itself.
  LentTrainer(const ModelSpec& model, StateKind state, std::optional<Rounding> rounding = {},
              std::vector<UnitId> own = {})
      : model_(model), own_(std::move(own)), steps_(model.units.size()) {
    const OptimizerConfig config{
        .state = state, .state_rounding = rounding, .param_rounding = rounding};
    named_ = rounding_of_new_store(config).has_value();
    rounding_ = rounding_of_store(config, rounding_of_new_store(config));
    if (own_.empty()) {
      for (UnitId u = 0; u < model.units.size(); ++u) own_.push_back(u);
    }
    std::uint64_t first_element = 0;
    for (UnitId u = 0; u < model.units.size(); ++u) {
      const DType dtype = model.units[u].dtype.value_or(model.dtype);
      TypedArray& values = params.emplace_back(dtype, model.units[u].count());
      for (std::size_t i = 0; i < values.count(); ++i) values.set(i, initial_value(u, i));
      std::optional<ParamPlace> place;
      if (named_) place = place_of(model.units[u].params[0], {}, 0);
      first_element += plain_.emplace_back(values, state, first_element, place).padded_count();
    }
  }

  /// The model of its own units: what its engine is opened with.
  ModelSpec own_model() const {
    ModelSpec own = model_;
    own.units.clear();
    for (const UnitId u : own_) {
      own.units.push_back(model_.units[u]);
      own.units.back().params[0].group = static_cast<std::uint32_t>(own.units.size() - 1);
    }
    return own;
  }
  std::vector<TypedSpan<std::byte>> lent() {
    std::vector<TypedSpan<std::byte>> all;
    for (const UnitId u : own_) all.push_back(params[u].span());
    return all;
  }

  /// Gradients are in another type in every other step.
  StepResult step(LentEngine& engine, const LentStep& its = {}) {
    const std::uint64_t generation = engine.generation() + 1;
    engine.wait_all_updated();  // gradients of the step before are given back
    write(its.written);
    make_gradients(generation, its.left_out);
    const std::vector<GroupStep> groups = groups_of(its);
    std::vector<TypedSpan<const std::byte>> gradients = lent_gradients();
    for (std::size_t i = 0; i < own_.size(); ++i) {
      if (!its.summed.contains(own_[i]) || its.left_out.contains(own_[i])) continue;
      const auto param = static_cast<ParamId>(i);
      sum(engine, param, gradients[i], generation);
      gradients[i] = {};
    }
    StepOptions options{.blob = {}};
    options.groups = groups;
    options.update_at_once = its.update_at_once;
    const std::vector<std::uint64_t> before = steps_;
    count_step(its);
    StepResult result;
    try {
      result = engine.step(gradients, options);
    } catch (...) {
      steps_ = before;
      throw;
    }
    make_plain_step(groups, its, generation);
    return result;
  }
  /// Adds up a gradient: as it is, as two halves, or as it is and zeros.
  static void sum(LentEngine& engine, ParamId param, const TypedSpan<const std::byte>& gradient,
                  std::uint64_t generation) {
    if (generation % 3 == 0) {
      for (int half = 0; half < 2; ++half) engine.add_gradient(param, gradient, 0.5F);
      return;
    }
    engine.add_gradient(param, gradient, 1, /*instead_of_zeros=*/true);
    const std::vector<float> zeros(gradient.count());
    if (generation % 3 == 1) engine.add_gradient(param, as_typed(std::span(zeros)), 1);
  }
  /// The step in plain arrays alone, as `generation`.
  void plain_step(std::uint64_t generation, const LentStep& its = {}) {
    write(its.written);
    make_gradients(generation, its.left_out);
    const std::vector<GroupStep> groups = groups_of(its);
    count_step(its);
    make_plain_step(groups, its, generation);
    for (const UnitId u : own_) params[u] = plain_[u].values();
  }

  /// What the engine was given in the newest step.
  std::vector<TypedSpan<const std::byte>> lent_gradients() const {
    std::vector<TypedSpan<const std::byte>> all;
    for (const UnitId u : own_) all.emplace_back(gradients_[u].span());
    return all;
  }
  void make_gradients(std::uint64_t generation, const std::set<UnitId>& left_out) {
    gradients_.assign(params.size(), {});
    for (const UnitId u : own_) {
      if (left_out.contains(u)) continue;
      gradients_[u] =
          TypedArray(generation % 2 == 0 ? model_.dtype : DType::kFloat32, params[u].count());
      for (std::size_t i = 0; i < gradients_[u].count(); ++i)
        gradients_[u].set(i, gradient_of(initial_value(u, i), u, i, generation));
    }
  }
  std::vector<GroupStep> groups_of(const LentStep& its) const {
    std::vector<GroupStep> groups;
    for (const UnitId u : own_) {
      groups.push_back({.learning_rate = 0.01F * static_cast<float>(u + 1),
                        .beta2 = 0.95F,
                        .eps = eps,
                        .weight_decay = u % 2 == 0 ? 0.1F : 0.0F,
                        .grad_scale = u == 1 ? 0.5F : 1.0F,
                        .steps = steps_[u] + 1,
                        .params_written = its.written.contains(u)});
    }
    return groups;
  }

  /// A unit's state by name, as plain arrays have it; and written into both, of a trainer that has
  /// all units.
  std::vector<float> state(UnitId unit, std::string_view name) const {
    return plain_[unit].state(name);
  }
  void write_state(LentEngine& engine, UnitId unit, std::string_view name,
                   std::span<const float> values) {
    engine.write_state(static_cast<ParamId>(unit), name, values);
    plain_[unit].write_state(name, values);
  }

  ::testing::AssertionResult same() const {
    for (const UnitId u : own_) {
      const TypedArray expected = plain_[u].values();
      for (std::size_t i = 0; i < expected.count(); ++i) {
        const std::size_t width = size_bytes(expected.dtype);
        if (std::equal(&expected.bytes[i * width], &expected.bytes[i * width] + width,
                       &params[u].bytes[i * width]))
          continue;
        return ::testing::AssertionFailure() << "unit " << u << ", element " << i << ": "
                                             << params[u].at(i) << " instead of " << expected.at(i);
      }
    }
    return ::testing::AssertionSuccess();
  }
  /// As in a new process, which has yet to open the engine.
  void forget() {
    for (TypedArray& values : params) std::ranges::fill(values.bytes, std::byte{0x55});
  }

  std::vector<TypedArray> params;
  float eps = 1e-8F;

 private:
  void write(const std::set<UnitId>& units) {
    for (const UnitId u : own_) {
      if (!units.contains(u)) continue;
      for (std::size_t i = 0; i < params[u].count(); i += 3) params[u].set(i, 0.125F);
      plain_[u].write(params[u]);
    }
  }
  void make_plain_step(const std::vector<GroupStep>& groups, const LentStep& its,
                       std::uint64_t generation) {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      const UnitId u = own_[i];
      if (its.left_out.contains(u)) continue;
      plain_[u].step(settings(groups[i], generation), gradients_[u]);
    }
  }
  void count_step(const LentStep& its) {
    for (const UnitId u : own_) {
      if (!its.left_out.contains(u)) ++steps_[u];
    }
  }
  OptimizerStep::Settings settings(const GroupStep& group, std::uint64_t generation) const {
    OptimizerStep::Settings its = with_group({}, group);
    its.rounding = rounding_;
    its.grad_scale = group.grad_scale;
    its.t = group.steps;
    its.seed = kRoundingSeed;
    its.rounding_step = named_ ? 0 : generation;
    return its;
  }

  ModelSpec model_;
  Roundings rounding_;
  bool named_ = false;  // noise is a parameter's own
  std::vector<UnitId> own_;
  std::vector<std::uint64_t> steps_;
  std::vector<PlainParam> plain_;
  std::vector<TypedArray> gradients_;
};

}  // namespace ziggurat::testing

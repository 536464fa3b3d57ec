// SPDX-License-Identifier: Apache-2.0
// core/sharding/param_groups.h: sets of parameters with optimizer settings of their own, named by
// pattern (PyTorch's param_groups, without lists of tensors).
//
// Groups are settings, not state: a store does not know them, and a resumed run may have others.
// But for parameters that are frozen when a store is made: it has no optimizer state for them, so
// they stay frozen (chunk_table.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/sharding/model_spec.h"

namespace ziggurat {

/// What is not given is as for parameters of no group.
struct ParamGroup {
  std::string params;  ///< which names: * stands for any characters, ? for one
  float lr_scale = 1;  ///< times the step's learning rate, whatever schedule that follows
  /// Also for parameters that do not decay by themselves (ParamSpec::decay)
  std::optional<float> weight_decay = std::nullopt;
  std::optional<float> beta1 = std::nullopt;
  std::optional<float> beta2 = std::nullopt;
  std::optional<float> eps = std::nullopt;
  /// Its parameters stay what they are, whatever the trainer adds to their gradient: they count as
  /// zero, in the norm too.
  bool frozen = false;
};

/// "h.*.mlp.*:lr-scale=0.5,beta2=0.99;wte.*:frozen". Errors: kInvalidArgument naming the word.
std::vector<ParamGroup> parse_param_groups(std::string_view text);
/// What parse_param_groups() reads as the same groups.
std::string to_text(std::span<const ParamGroup> groups);

/// `name` is one that `pattern` stands for.
bool matches(std::string_view pattern, std::string_view name) noexcept;

/// Sets every ParamSpec::group: to 1 + the index of the first group that has its name, or 0.
/// Errors: kInvalidArgument for a group that no parameter falls to, and for settings that make no
/// step.
void assign_groups(ModelSpec& model, std::span<const ParamGroup> groups);

/// One more than the largest ParamSpec::group.
std::size_t group_count(const ModelSpec& model);

}  // namespace ziggurat

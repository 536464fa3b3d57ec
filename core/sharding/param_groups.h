// SPDX-License-Identifier: Apache-2.0
// core/sharding/param_groups.h: sets of parameters with optimizer settings of their own, named by
// pattern (PyTorch's param_groups, without lists of tensors).
//
// Groups are settings, not state: a store does not record them, and a resumed run may have other
// groups. Only parameters that are frozen when a store is made must stay frozen, because the store
// has no optimizer state for them (chunk_table.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/sharding/model_spec.h"

namespace ziggurat {

/// Settings of one group. A setting that is not given is as for parameters of no group.
struct ParamGroup {
  std::string params;  ///< pattern of names: * stands for any characters, ? for one
  float lr_scale = 1;  ///< multiplies the step's learning rate, whatever its schedule
  /// Weight decay also of parameters that do not decay by themselves (ParamSpec::decay).
  std::optional<float> weight_decay = std::nullopt;
  std::optional<float> beta1 = std::nullopt;
  std::optional<float> beta2 = std::nullopt;
  std::optional<float> eps = std::nullopt;
  /// Keeps the parameters as they are, whatever the trainer adds to their gradient: the gradient
  /// counts as zero, in the norm too.
  bool frozen = false;
};

/// Reads groups like "h.*.mlp.*:lr-scale=0.5,beta2=0.99;wte.*:frozen". Errors: kInvalidArgument
/// naming the wrong word.
std::vector<ParamGroup> parse_param_groups(std::string_view text);
/// Returns a text that parse_param_groups() reads as the same groups.
std::string to_text(std::span<const ParamGroup> groups);

/// Returns true if `pattern` stands for `name`.
bool matches(std::string_view pattern, std::string_view name) noexcept;

/// Sets every ParamSpec::group to 1 + the index of the first group whose pattern stands for the
/// parameter's name, or to 0 if there is none. Errors: kInvalidArgument for a group that gets no
/// parameter, and for settings with which no step can be made.
void assign_groups(ModelSpec& model, std::span<const ParamGroup> groups);

/// Returns one more than the largest ParamSpec::group.
std::size_t group_count(const ModelSpec& model);

}  // namespace ziggurat

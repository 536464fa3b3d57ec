// SPDX-License-Identifier: Apache-2.0
// integrations/cli/group_options.h: --param-groups: parameters with optimizer settings of their
// own.
//
// As a flag "h.*.mlp.*:lr-scale=0.5,beta2=0.99;*bias:weight-decay=0.1"; in a settings file the same
// text, or [{"params": "h.*.mlp.*", "lr-scale": 0.5, "beta2": 0.99}, ...].
#pragma once

#include <vector>

#include "core/sharding/param_groups.h"
#include "integrations/cli/settings.h"

namespace ziggurat::cli {

/// Errors: UsageError, also for a group that no parameter of `model` falls to.
std::vector<ParamGroup> read_param_groups(const Settings& settings, ModelSpec model);

}  // namespace ziggurat::cli

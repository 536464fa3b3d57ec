// SPDX-License-Identifier: Apache-2.0
// tests/support/group_settings.h: what every optimizer's kernels are told of a group's settings.
#pragma once

#include "optimizer/optimizer_step.h"

namespace ziggurat::testing {

/// `group`: GroupStep, or the C interface's.
template <class Group>
OptimizerStep::Settings with_group(OptimizerStep::Settings settings, const Group& group) {
  settings.learning_rate = group.learning_rate;
  settings.beta1 = group.beta1;
  settings.beta2 = group.beta2;
  settings.eps = group.eps;
  settings.weight_decay = group.weight_decay;
  return settings;
}

}  // namespace ziggurat::testing

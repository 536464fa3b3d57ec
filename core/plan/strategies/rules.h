// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/rules.h: which combinations the systems themselves refuse, with the rule.
#pragma once

#include <string>

#include "core/plan/models/model_shape.h"
#include "core/plan/strategies/layout.h"

namespace ziggurat {

enum class System : std::uint8_t { kPyTorch, kDeepSpeed, kMegatron, kZiggurat };
std::string_view to_string(System system) noexcept;

/// Returns why `system` refuses to train `model` so; empty if it does not.
std::string refusal_of(System system, const ModelShape& model, const ParallelLayout& layout);

}  // namespace ziggurat

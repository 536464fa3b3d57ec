// SPDX-License-Identifier: Apache-2.0
// core/engine/state/store_rounding.cc: decides on roundings from the requested ones and those that
// a store records.
#include "core/engine/state/store_rounding.h"

#include <fmt/format.h>

#include "base/error.h"

namespace ziggurat {
namespace {

void require_same(const char* setting, const std::optional<Rounding>& asked, Rounding stored) {
  if (!asked || *asked == stored) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("the store was made with `{0}={1}`, but this run asks for {2}: leave `{0}` out, "
                  "give another `store`, or give `resume=never` to replace this one",
                  setting, to_string(stored), to_string(*asked)));
}

/// Whether parameters are made from masters. In bf16 each parameter is its own master.
bool rounds_params(StateFormat format) { return !rounds_masters(format); }

/// Returns the roundings to be recorded; none if nothing is rounded with noise, whatever the config
/// says.
std::optional<Roundings> named(StateFormat format, const Roundings& rounding) {
  if (rounds_state(format) || rounding.params == Rounding::kStochastic) return rounding;
  return std::nullopt;
}

}  // namespace

std::optional<Roundings> rounding_of_new_store(const OptimizerConfig& config) {
  const Rounding usual =
      rounds_state(config.state.format) ? Rounding::kStochastic : Rounding::kNearest;
  return named(config.state.format,
               {.state = config.state_rounding.value_or(usual), .params = param_rounding(config)});
}

std::optional<Roundings> rounding_of_copy(const OptimizerConfig& config, const StateContent& of,
                                          bool in_place) {
  const bool as_before =
      of.state && (rounds_state(of.state->format) || !rounds_state(config.state.format));
  if (as_before && in_place && !of.rounding) return std::nullopt;
  OptimizerConfig its = config;
  if (of.rounding && !its.param_rounding) its.param_rounding = of.rounding->params;
  if (of.rounding && as_before && !its.state_rounding) its.state_rounding = of.rounding->state;
  // A split master cannot round parameters as the source did.
  if (has_residual(its.state.format)) its.param_rounding = config.param_rounding;
  return rounding_of_new_store(its);
}

Roundings rounding_of_store(const OptimizerConfig& config, const std::optional<Roundings>& named) {
  if (!named) {
    return {.state = config.state_rounding.value_or(Rounding::kNearest),
            .params = param_rounding(config)};
  }
  // A setting for values that the format does not round has no effect, so any is accepted.
  const StateFormat format = config.state.format;
  if (rounds_state(format)) require_same("state_rounding", config.state_rounding, named->state);
  if (rounds_params(format)) require_same("param_rounding", config.param_rounding, named->params);
  return *named;
}

}  // namespace ziggurat

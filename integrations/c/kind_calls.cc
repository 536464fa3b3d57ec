// SPDX-License-Identifier: Apache-2.0
// integrations/c/kind_calls.cc: the C function that describes the optimizers and the formats of
// their state, from their tables.
#include <nlohmann/json.hpp>

#include "integrations/c/c_call.h"
#include "optimizer/state_kind.h"

namespace {

using nlohmann::json;
using ziggurat::OptimizerInfo;

json settings_of(const OptimizerInfo& its) {
  const auto read = [](double value) { return value == OptimizerInfo::kUnread ? 0.0 : value; };
  const bool averages = its.beta1 != OptimizerInfo::kUnread || its.beta2 != OptimizerInfo::kUnread;
  json settings = {{"lr", its.lr}, {"weight_decay", its.weight_decay}};
  if (its.has_momentum) {
    settings["momentum"] = read(its.beta1);
  } else if (averages) {
    settings["betas"] = {read(its.beta1), read(its.beta2)};
  }
  if (its.eps != OptimizerInfo::kUnread) settings["eps"] = its.eps;
  return settings;
}

json optimizers() {
  json all = json::array();
  for (std::size_t i = 0; i < ziggurat::kOptimizerCount; ++i) {
    const auto kind = static_cast<ziggurat::OptimizerKind>(i);
    const OptimizerInfo its = ziggurat::info_of(kind);
    json moments = json::array();
    for (std::size_t k = 0; k < ziggurat::moment_count(kind); ++k)
      moments.push_back(its.moments[k].name);
    all.push_back({{"name", its.name},
                   {"title", its.title},
                   {"moments", moments},
                   {"settings", settings_of(its)},
                   {"initial_accumulator", its.has_initial_accumulator}});
  }
  return all;
}

json formats() {
  json all = json::array();
  for (std::size_t i = 0; i < ziggurat::kStateFormatCount; ++i) {
    const auto format = static_cast<ziggurat::StateFormat>(i);
    all.push_back({{"name", ziggurat::info_of(format).name},
                   {"holds_param", ziggurat::holds_param(format)},
                   {"rounds_state", ziggurat::rounds_state(format)},
                   {"codes", ziggurat::has_codes(format)}});
  }
  return all;
}

}  // namespace

ziggurat_status ziggurat_state_kinds(char* text, uint64_t capacity_bytes, uint64_t* needed_bytes) {
  return ziggurat::guarded([&] {
    const json kinds = {{"optimizers", optimizers()}, {"formats", formats()}};
    ziggurat::give_text(kinds.dump(), text, capacity_bytes, needed_bytes);
  });
}

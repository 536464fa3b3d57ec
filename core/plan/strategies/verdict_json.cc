// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/verdict_json.cc: what a verdict says, in bytes and seconds.
#include "core/plan/strategies/verdict_json.h"

#include <utility>

#include "core/plan/strategies/training_json.h"

namespace ziggurat {
namespace {

std::string_view to_string(Recompute recompute) {
  return recompute == Recompute::kFull        ? "full"
         : recompute == Recompute::kSelective ? "selective"
                                              : "nothing";
}

nlohmann::json json_of_verdict(const Verdict& one) {
  nlohmann::json said{{"strategy", one.name}, {"system", to_string(one.system)}};
  if (!one.refusal.empty()) {
    said["fits"] = false;
    said["refusal"] = one.refusal;
    return said;
  }
  nlohmann::json lines = nlohmann::json::array();
  for (const MemoryLine& line : one.memory.worst().lines)
    lines.push_back({{"what", line.what}, {"bytes", line.bytes}});
  nlohmann::json needs = nlohmann::json::array();
  for (const TierNeed& need : one.needs) {
    needs.push_back({{"tier", to_string(need.tier)},
                     {"bytes", need.bytes},
                     {"room_bytes", need.room},
                     {"most", need.most}});
  }
  said.update({{"fits", one.fits()},
               {"breaks", one.breaks_first()},
               {"needs", std::move(needs)},
               {"device_bytes", one.device_bytes},
               {"host_bytes", one.host_bytes},
               {"drive_bytes", one.drive_bytes},
               {"recompute", to_string(one.training.recompute)},
               {"offloads_activations", one.training.offloads_activations},
               {"loss_tokens", one.training.software.loss_tokens},
               {"worst_instant", one.memory.worst().name},
               {"worst_lines", std::move(lines)},
               {"margin_bytes", one.margin_bytes()},
               {"beside_bytes", one.beside_bytes()}});
  if (one.fits()) {
    said.update({{"step_s", one.time.seconds},
                 {"bound_s", one.time.bound},
                 {"binds", one.time.binds},
                 {"busy", json_of_lines(one.time.busy)}});
  }
  return said;
}

}  // namespace

nlohmann::json json_of_lines(const std::vector<TimeLine>& lines) {
  nlohmann::json all = nlohmann::json::array();
  for (const TimeLine& line : lines)
    all.push_back({{"what", line.what}, {"seconds", line.seconds}});
  return all;
}

nlohmann::json json_of_comparison(const Job& job, const Comparison& comparison) {
  nlohmann::json strategies = nlohmann::json::array();
  for (const Verdict& one : comparison.verdicts) strategies.push_back(json_of_verdict(one));
  nlohmann::json flows = nlohmann::json::array();
  for (const Hidden& flow : hidden_at(job)) {
    flows.push_back({{"flow", flow.flow}, {"tokens", flow.tokens}, {"of_pass", flow.of_pass}});
  }
  nlohmann::json said{{"model", job.model.name},
                      {"parameters", count_parameters(job.model).total},
                      {"machine", job.machine.name},
                      {"machine_device_bytes", job.machine.device_bytes},
                      {"gpus", job.gpus},
                      {"strategies", std::move(strategies)},
                      {"recommended", nullptr},
                      {"second", nullptr},
                      {"answer", answer(job, comparison)},
                      {"decision", decision(job, comparison)},
                      {"hidden_at", std::move(flows)},
                      {"fewest_gpus_by_states", comparison.fewest_by_states},
                      {"fewest_gpus", comparison.fewest}};
  if (comparison.best) said["recommended"] = comparison.verdicts[*comparison.best].name;
  if (comparison.second) said["second"] = comparison.verdicts[*comparison.second].name;
  return said;
}

std::string comparison_json(const Job& job, const Comparison& comparison) {
  return json_of_comparison(job, comparison).dump(2) + "\n";
}

}  // namespace ziggurat

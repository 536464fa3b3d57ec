// SPDX-License-Identifier: Apache-2.0
// integrations/c/plan_calls.cc: the C functions that plan: any model on any machine, and the host
// memory and the steps of an engine that is not open yet.
#include <nlohmann/json.hpp>

#include "core/checkpoint/blob_header.h"
#include "core/checkpoint/steps_blob.h"
#include "core/plan/lent_host_plan.h"
#include "core/plan/strategies/training_json.h"
#include "integrations/c/c_call.h"
#include "integrations/c/embedded_engine.h"
#include "integrations/c/engine_calls.h"
#include "integrations/c/settings_json.h"
#include "integrations/c/simulated_steps.h"

namespace {

/// Returns whether units are brought to memory of `kind` by copies in host memory.
bool is_gpu(std::int32_t kind) {
  if (kind == ZIGGURAT_CUDA_MEMORY) return true;
  if (kind == ZIGGURAT_HOST_MEMORY) return false;
  throw ziggurat::wrong(
      fmt::format("kind is {}: give ZIGGURAT_HOST_MEMORY or ZIGGURAT_CUDA_MEMORY", kind));
}

std::string host_memory_json(const std::vector<ziggurat::EmbeddedParam>& params,
                             const ziggurat::EmbeddedConfig& config, std::uint64_t host_bytes,
                             bool on_gpu) {
  const ziggurat::LentHostPlan plan = ziggurat::plan_lent_host(
      {.model = ziggurat::embedded_model(params, config),
       .state = config.optimizer.state,
       .placement = config.placement,
       .reduction = {.staged = on_gpu,
                     .whole_unit_bytes = on_gpu ? ziggurat::largest_unit_bytes(config.wholes) : 0},
       .host_budget_bytes = host_bytes,
       .slots = config.slots,
       .blob_room_bytes = ziggurat::kBlobHeadBytes + ziggurat::kTrainerBlobBytes +
                          ziggurat::StepsBlob::head_bytes(ziggurat::trained_count(params))});
  return nlohmann::json{{"smallest_bytes", plan.smallest_bytes},
                        {"budget_bytes", plan.budget_bytes},
                        {"all_bytes", plan.all_bytes},
                        {"records", plan.records},
                        {"item_bytes", plan.item_bytes},
                        {"items", plan.items},
                        {"read_bytes", plan.read_bytes},
                        {"store_bytes", plan.store_bytes},
                        {"params_file_bytes", plan.params_file_bytes},
                        {"sums_file_bytes", plan.sums_file_bytes}}
      .dump();
}

}  // namespace

ziggurat_status ziggurat_plan(const char* request, char* text, uint64_t capacity_bytes,
                              uint64_t* needed_bytes) {
  return ziggurat::guarded([&] {
    ziggurat::give_text(ziggurat::answer_json(ziggurat::required(request, "request")), text,
                        capacity_bytes, needed_bytes);
  });
}

ziggurat_status ziggurat_simulate(const ziggurat_param* params, uint64_t count,
                                  const char* settings, const char* recording, char* text,
                                  uint64_t capacity_bytes, uint64_t* needed_bytes) {
  return ziggurat::guarded([&] {
    const std::string its = ziggurat::simulated_steps_json(
        ziggurat::params_of(params, count),
        ziggurat::engine_config_of(ziggurat::required(settings, "settings")),
        ziggurat::required(recording, "recording"));
    ziggurat::give_text(its, text, capacity_bytes, needed_bytes);
  });
}

ziggurat_status ziggurat_plan_host_memory(const ziggurat_param* params, uint64_t count,
                                          const char* settings, uint64_t host_bytes, int32_t kind,
                                          char* text, uint64_t capacity_bytes,
                                          uint64_t* needed_bytes) {
  return ziggurat::guarded([&] {
    const std::string its =
        host_memory_json(ziggurat::params_of(params, count),
                         ziggurat::engine_config_of(ziggurat::required(settings, "settings")),
                         host_bytes, is_gpu(kind));
    ziggurat::give_text(its, text, capacity_bytes, needed_bytes);
  });
}

// SPDX-License-Identifier: Apache-2.0
// integrations/c/ziggurat.cc: the C functions of runtimes and engines: they check what a caller
// wrote and say it in C++. exchange_calls.cc has the functions of exchanges.
#include "integrations/c/ziggurat.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/topology/limits.h"
#include "collectives/rendezvous/rendezvous.h"
#include "integrations/c/c_call.h"
#include "integrations/c/chosen_memory.h"
#include "integrations/c/chosen_placement.h"
#include "integrations/c/embedded_engine.h"
#include "integrations/c/engine_calls.h"
#include "integrations/c/handles.h"
#include "integrations/c/settings_json.h"
#include "integrations/c/stored_params.h"
#include "integrations/c/wrong.h"

namespace {

using ziggurat::array_of;
using ziggurat::bytes_of;
using ziggurat::copied;
using ziggurat::DType;
using ziggurat::EmbeddedEngine;
using ziggurat::engines;
using ziggurat::Error;
using ziggurat::floats_of;
using ziggurat::give;
using ziggurat::give_text;
using ziggurat::guarded;
using ziggurat::last_error;
using ziggurat::LentEngine;
using ziggurat::memory_of;
using ziggurat::on_engine;
using ziggurat::OpenEngine;
using ziggurat::param_at;
using ziggurat::params_of;
using ziggurat::required;
using ziggurat::runtimes;
using ziggurat::TypedSpan;
using ziggurat::wrong;

ziggurat::GroupStep group_of(const ziggurat_group& given) {
  constexpr std::uint32_t kKnown = ZIGGURAT_NESTEROV | ZIGGURAT_MAXIMIZE;
  if ((given.flags & ~kKnown) != 0) {
    throw wrong(
        fmt::format("groups.flags is {:#x}: give ZIGGURAT_NESTEROV, ZIGGURAT_MAXIMIZE, "
                    "both or 0",
                    given.flags));
  }
  return {.learning_rate = given.learning_rate,
          .beta1 = given.beta1,
          .beta2 = given.beta2,
          .eps = given.eps,
          .weight_decay = given.weight_decay,
          .lr_decay = given.lr_decay,
          .dampening = given.dampening,
          .nesterov = (given.flags & ZIGGURAT_NESTEROV) != 0,
          .maximize = (given.flags & ZIGGURAT_MAXIMIZE) != 0};
}

ziggurat::EmbeddedStep step_of(const ziggurat_step_options& given) {
  ziggurat::EmbeddedStep step;
  for (const ziggurat_group& group : array_of(given.groups, given.group_count, "groups"))
    step.groups.push_back(group_of(group));
  if ((given.flags & ~(ZIGGURAT_BLOB_FOLLOWS | ZIGGURAT_UPDATE_AT_ONCE)) != 0) {
    throw wrong(fmt::format(
        "options.flags is {:#x}: give ZIGGURAT_BLOB_FOLLOWS, ZIGGURAT_UPDATE_AT_ONCE, both or 0",
        given.flags));
  }
  step.blob_follows = (given.flags & ZIGGURAT_BLOB_FOLLOWS) != 0;
  step.update_at_once = (given.flags & ZIGGURAT_UPDATE_AT_ONCE) != 0;
  if (given.grad_scale != 0) step.grad_scale = given.grad_scale;
  step.blob = bytes_of(given.blob, given.blob_bytes, "blob");
  return step;
}

/// Gives a text that may be longer at the next call: asks for room for any such text.
void give_changing_text(const std::string& its, char* text, std::uint64_t capacity_bytes,
                        std::uint64_t* needed_bytes) {
  constexpr std::uint64_t kRoomBytes = 4096;
  give_text(its, text, capacity_bytes, nullptr);
  if (needed_bytes != nullptr) *needed_bytes = std::max<std::uint64_t>(kRoomBytes, its.size() + 1);
}

std::string figures_of(const EmbeddedEngine& embedded) {
  const LentEngine& engine = embedded.lent();
  nlohmann::json all;
  for (std::size_t i = 0; i < static_cast<std::size_t>(ziggurat::Counter::kCount); ++i) {
    const auto counter = static_cast<ziggurat::Counter>(i);
    all[std::string(to_string(counter))] = engine.metrics().value(counter);
  }
  const ziggurat::Account host = engine.host_account();
  const ziggurat::FromRanks from_ranks = engine.from_ranks();
  all["from_ranks_bytes"] = from_ranks.bytes;
  all["from_other_nodes_bytes"] = from_ranks.other_nodes_bytes;
  all["host_used_bytes"] = host.used_bytes();
  all["host_peak_bytes"] = host.peak_bytes();
  all["host_budget_bytes"] = host.capacity_bytes();
  const ziggurat::Account units = embedded.units_account();
  all["units_peak_bytes"] = units.peak_bytes();
  all["units_budget_bytes"] = units.capacity_bytes();
  return all.dump();
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

}  // namespace

int32_t ziggurat_abi_version(void) { return ZIGGURAT_ABI_VERSION; }

const char* ziggurat_version(void) { return ZIGGURAT_VERSION; }

const char* ziggurat_last_error(void) { return last_error().in_c.c_str(); }

const char* ziggurat_last_error_in_settings(void) { return last_error().in_settings.c_str(); }

ziggurat_status ziggurat_runtime_create(const char* settings, ziggurat_runtime* runtime) {
  return guarded([&] {
    required(runtime, "runtime");
    *runtime = 0;
    const ziggurat::RuntimeSettings its =
        ziggurat::runtime_settings_of(settings == nullptr ? "{}" : settings);
    // Workers are not pinned, because the embedder's own threads go where the kernel puts them.
    std::unique_ptr<ziggurat::Runtime> created =
        ziggurat::Runtime::create({.threads = its.threads, .pin = false, .trace_path = {}});
    if (its.ranks.world_size > 1)
      created->ranks = ziggurat::connect_ranks(created->reactor, *created->workers, its.ranks);
    *runtime = runtimes().add(std::move(created));
  });
}

ziggurat_status ziggurat_ranks_abort(ziggurat_runtime runtime, const char* reason) {
  return guarded([&] {
    const std::shared_ptr<ziggurat::Runtime> its = runtimes().find(runtime);
    its->reactor.post(
        [its, words = std::string(required(reason, "reason"))] { its->ranks->abort(words); });
  });
}

ziggurat_status ziggurat_runtime_destroy(ziggurat_runtime runtime) {
  return guarded([&] {
    if (!runtimes().remove_if_unused(runtime))
      throw wrong(fmt::format(
          "runtime {} has open engines, devices, exchanges, saves or checkpoints: close them first",
          runtime));
  });
}

ziggurat_status ziggurat_engine_open(ziggurat_runtime runtime, const ziggurat_param* params,
                                     uint64_t count, const char* settings,
                                     ziggurat_engine* engine) {
  return guarded([&] {
    *required(engine, "engine") = 0;
    auto open = std::make_shared<OpenEngine>();
    open->runtime = runtimes().find(runtime);
    open->engine = std::make_unique<EmbeddedEngine>(
        *open->runtime, params_of(params, count),
        ziggurat::engine_config_of(required(settings, "settings")));
    *engine = engines().add(std::move(open));
  });
}

ziggurat_status ziggurat_stored_params(ziggurat_runtime runtime, const char* settings, char* text,
                                       uint64_t capacity_bytes, uint64_t* needed_bytes) {
  return guarded([&] {
    const std::shared_ptr<ziggurat::Runtime> on = runtimes().find(runtime);
    const auto its =
        ziggurat::stored_params(*on, ziggurat::engine_config_of(required(settings, "settings")));
    give_text(ziggurat::stored_params_json(its), text, capacity_bytes, needed_bytes);
  });
}

ziggurat_status ziggurat_free_memory(uint64_t* free_bytes) {
  return guarded([&] { *required(free_bytes, "free_bytes") = ziggurat::free_memory_bytes(); });
}

ziggurat_status ziggurat_choose_placement(const ziggurat_param* params, uint64_t count,
                                          const char* settings, uint64_t free_bytes, char* text,
                                          uint64_t capacity_bytes, uint64_t* needed_bytes) {
  return guarded([&] {
    const std::string its = ziggurat::chosen_placement_json(
        params_of(params, count), ziggurat::engine_config_of(required(settings, "settings")),
        free_bytes);
    give_changing_text(its, text, capacity_bytes, needed_bytes);
  });
}

ziggurat_status ziggurat_choose_memory(const ziggurat_param* params, uint64_t count,
                                       const char* settings, const char* facts, char* text,
                                       uint64_t capacity_bytes, uint64_t* needed_bytes) {
  return guarded([&] {
    const std::string its = ziggurat::chosen_memory_json(
        params_of(params, count), ziggurat::engine_config_of(required(settings, "settings")),
        required(facts, "facts"));
    give_changing_text(its, text, capacity_bytes, needed_bytes);
  });
}

ziggurat_status ziggurat_engine_close(ziggurat_engine engine) {
  return guarded([&] { engines().take(engine)->engine->lent().end_waits(); });
}

ziggurat_status ziggurat_lend_gradient(ziggurat_engine engine, uint64_t param,
                                       const ziggurat_memory* gradient, float scale) {
  return guarded([&] {
    engines().find(engine)->engine->lend_gradient(param, memory_of(gradient, "gradient"), scale);
  });
}

ziggurat_status ziggurat_lend_gradients(ziggurat_engine engine, uint64_t count,
                                        const uint64_t* params, void* const* addresses,
                                        const ziggurat_dtype* dtypes, const float* scales) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    if (count == 0) return;
    required(params, "params");
    required(addresses, "addresses");
    std::vector<ziggurat::LentGradient> all(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      const ziggurat_dtype dtype = dtypes == nullptr ? ZIGGURAT_FP32 : dtypes[i];
      all[i] = {.param = params[i],
                .values = ziggurat::gradient_at(*open->engine, params[i], addresses[i], dtype),
                .scale = scales == nullptr ? 1.0F : scales[i]};
    }
    open->engine->lend_gradients(all);
  });
}

ziggurat_status ziggurat_add_gradient(ziggurat_engine engine, uint64_t param,
                                      const ziggurat_memory* gradient, float scale) {
  return guarded([&] {
    engines().find(engine)->engine->add_gradient(param, memory_of(gradient, "gradient"), scale);
  });
}

ziggurat_status ziggurat_scale_gradient(ziggurat_engine engine, uint64_t param, float scale) {
  return guarded([&] { engines().find(engine)->engine->scale_gradient(param, scale); });
}

ziggurat_status ziggurat_discard_gradient(ziggurat_engine engine, uint64_t param) {
  return guarded([&] { engines().find(engine)->engine->discard_gradient(param); });
}

ziggurat_status ziggurat_discard_gradients(ziggurat_engine engine) {
  return guarded([&] { engines().find(engine)->engine->discard_gradients(); });
}

ziggurat_status ziggurat_gradient_norm(ziggurat_engine engine, double* norm) {
  return guarded(
      [&] { *required(norm, "norm") = engines().find(engine)->engine->gradient_norm(); });
}

ziggurat_status ziggurat_expect_gradients(ziggurat_engine engine) {
  return on_engine(engine, [](LentEngine& its) { its.expect_gradients(); });
}

ziggurat_status ziggurat_lend_param(ziggurat_engine engine, uint64_t param,
                                    const ziggurat_memory* values) {
  return on_engine(engine, [&](LentEngine& its) {
    its.lend_param(param_at(param), memory_of(values, "values"));
  });
}

ziggurat_status ziggurat_param_written(ziggurat_engine engine, uint64_t param) {
  return guarded([&] { engines().find(engine)->engine->param_written(param); });
}

ziggurat_status ziggurat_step(ziggurat_engine engine, const ziggurat_step_options* options,
                              ziggurat_step_result* result) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    ziggurat_step_result made{};
    ziggurat::EmbeddedStep its;
    try {
      made = copied(result, "result");
      its = step_of(copied(options, "options"));
    } catch (const Error& error) {
      // Other ranks may be making the step.
      open->engine->in_turn([&](LentEngine& lent) { lent.refuse_step(error); });
    }
    made.generation = open->engine->step(its).generation;
    give(made, result);
  });
}

ziggurat_status ziggurat_wait(ziggurat_engine engine, uint64_t param) {
  return on_engine(engine, [&](LentEngine& its) {
    if (param == ZIGGURAT_ALL_PARAMS) {
      its.wait_all_updated();
    } else {
      its.wait_updated(param_at(param));
    }
  });
}

ziggurat_status ziggurat_give_blob(ziggurat_engine engine, const void* blob, uint64_t blob_bytes) {
  return guarded(
      [&] { engines().find(engine)->engine->give_blob(bytes_of(blob, blob_bytes, "blob")); });
}

ziggurat_status ziggurat_param_steps(ziggurat_engine engine, uint64_t param, uint64_t* steps) {
  return guarded(
      [&] { *required(steps, "steps") = engines().find(engine)->engine->steps_of(param); });
}

ziggurat_status ziggurat_figures(ziggurat_engine engine, char* text, uint64_t capacity_bytes,
                                 uint64_t* needed_bytes) {
  return guarded([&] {
    give_changing_text(figures_of(*engines().find(engine)->engine), text, capacity_bytes,
                       needed_bytes);
  });
}

ziggurat_status ziggurat_state_names(ziggurat_engine engine, char* text, uint64_t capacity_bytes,
                                     uint64_t* needed_bytes) {
  return guarded([&] {
    give_text(joined(engines().find(engine)->engine->lent().state_names()), text, capacity_bytes,
              needed_bytes);
  });
}

ziggurat_status ziggurat_read_state(ziggurat_engine engine, uint64_t param, const char* name,
                                    const ziggurat_memory* values) {
  return on_engine(engine, [&](LentEngine& its) {
    its.read_state(param_at(param), required(name, "name"), floats_of(values, "values"));
  });
}

ziggurat_status ziggurat_write_state(ziggurat_engine engine, uint64_t param, const char* name,
                                     const ziggurat_memory* values) {
  return guarded([&] {
    engines().find(engine)->engine->write_state(param, required(name, "name"),
                                                floats_of(values, "values"));
  });
}

ziggurat_status ziggurat_pieces_of(ziggurat_engine engine, int32_t rank, char* text,
                                   uint64_t capacity_bytes, uint64_t* needed_bytes) {
  return guarded([&] {
    std::vector<std::string> lines;
    for (const auto& piece : engines().find(engine)->engine->lent().pieces_of(rank))
      lines.push_back(fmt::format("{}\t{}", piece.count, piece.name));
    give_text(joined(lines), text, capacity_bytes, needed_bytes);
  });
}

ziggurat_status ziggurat_read_state_of(ziggurat_engine engine, int32_t rank, const char* param,
                                       const char* name, const ziggurat_memory* values) {
  return on_engine(engine, [&](LentEngine& its) {
    its.read_state_of(rank, required(param, "param"), required(name, "name"),
                      floats_of(values, "values"));
  });
}

ziggurat_status ziggurat_set_param_steps(ziggurat_engine engine, uint64_t param, uint64_t steps) {
  return guarded([&] { engines().find(engine)->engine->set_steps(param, steps); });
}

ziggurat_status ziggurat_make_durable(ziggurat_engine engine) {
  return on_engine(engine, [](LentEngine& its) { its.make_durable(); });
}

ziggurat_status ziggurat_engine_state(ziggurat_engine engine, ziggurat_state* state) {
  return guarded([&] {
    ziggurat_state own = copied(state, "state");
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    const LentEngine& its = open->engine->lent();
    own.resumed = its.resumed() ? 1 : 0;
    own.generation = its.generation();
    own.durable_generation = its.durable_generation();
    own.blob_bytes = its.resumed_blob().size();
    own.blob_ranks = its.resumed_blob_ranks();
    give(own, state);
  });
}

ziggurat_status ziggurat_read_blob(ziggurat_engine engine, void* blob, uint64_t capacity_bytes) {
  return guarded([&] {
    const std::shared_ptr<OpenEngine> open = engines().find(engine);
    ziggurat::give_blob_bytes(open->engine->lent().resumed_blob(), blob, capacity_bytes);
  });
}

ziggurat_status ziggurat_describe(ziggurat_engine engine, char* text, uint64_t capacity_bytes,
                                  uint64_t* needed_bytes) {
  return guarded([&] {
    give_text(joined(engines().find(engine)->engine->lent().description()), text, capacity_bytes,
              needed_bytes);
  });
}

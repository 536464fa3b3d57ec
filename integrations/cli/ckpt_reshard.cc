// SPDX-License-Identifier: Apache-2.0
// integrations/cli/ckpt_reshard.cc: `ziggurat ckpt reshard`, which divides a store again, in place,
// for the ranks that will train from it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string_view>

#include "base/bytes.h"
#include "core/engine/engine_settings.h"
#include "core/engine/state/store_reshard.h"
#include "core/plan/machine_profile.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/run_state.h"
#include "integrations/cli/store_paths.h"

namespace ziggurat::cli {
namespace {

/// The settings of a run that decide how its store is divided.
constexpr std::array<std::string_view, 6> kCut{"tp",          "zero_stage",   "strategy",
                                               "shard_group", "state_format", "host_memory"};

/// Returns `own` with the dimension along which each layer divides for tensor parallelism. A store
/// of undivided layers does not hold it; only the trainer knows it.
ModelSpec divisible(const ModelSpec& own, const StateContent& content, int tensor_parallel) {
  if (!RunIdentity::is_one(content.run_identity)) {
    const bool divided = std::ranges::any_of(own.units, [](const UnitSpec& unit) {
      return std::ranges::any_of(unit.params,
                                 [](const ParamSpec& param) { return param.tp_dim >= 0; });
    });
    if (tensor_parallel == 1 || divided) return own;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("`tp={}`: only the trainer that made the store knows how its layers "
                            "divide; open the store with that trainer and `resume=reshard`",
                            tensor_parallel));
  }
  gpt::ModelConfig model = RunIdentity::parse(content.run_identity).model;
  model.dtype = content.dtype;
  gpt::require_divisible(model, tensor_parallel);
  ModelSpec spec = gpt::make_spec(model);
  for (std::size_t u = 0; u < spec.units.size() && u < own.units.size(); ++u) {
    for (ParamSpec& param : spec.units[u].params) {
      const auto its = std::ranges::find(own.units[u].params, param.name, &ParamSpec::name);
      if (its == own.units[u].params.end()) continue;
      param.frozen = its->frozen;
      param.constant = its->constant;
    }
  }
  return spec;
}

/// Returns the run's identity for `ranks` ranks. A step keeps its number of sequences, so fewer
/// ranks accumulate more micro-batches each. Errors: kInvalidArgument if the ranks cannot share
/// them evenly.
std::string identity_for(const StateContent& content, int ranks, int tensor_parallel) {
  if (!RunIdentity::is_one(content.run_identity)) return content.run_identity;
  RunIdentity identity = RunIdentity::parse(content.run_identity);
  const int before = content.layout.ranks / std::max(1, content.layout.tensor_parallel);
  const int now = ranks / tensor_parallel;
  const std::int64_t micro_batches = identity.accumulate * before;
  if (micro_batches % now != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("`nproc={}`: a step of this run has {} micro-batches (accumulate {} x {} "
                    "data-parallel ranks), which {} data-parallel ranks cannot share evenly; "
                    "choose another number of ranks, or begin a new run with --load",
                    ranks, micro_batches, identity.accumulate, before, now));
  }
  identity.accumulate = micro_batches / now;
  return identity.text();
}

/// Returns the flags with which `ziggurat train` opens the divided store.
std::string train_flags(const ReshardCommand& command, StateFormat format,
                        const std::string& identity) {
  std::string flags = fmt::format("--nproc {}", command.ranks);
  if (RunIdentity::is_one(identity))
    flags += fmt::format(" --accumulate {}", RunIdentity::parse(identity).accumulate);
  const EngineConfig& engine = command.engine;
  if (engine.tensor_parallel > 1) flags += fmt::format(" --tp {}", engine.tensor_parallel);
  if (engine.strategy.zero_stage)
    flags += fmt::format(" --zero-stage {}", *engine.strategy.zero_stage);
  if (engine.strategy.name)
    flags += fmt::format(" --strategy {}", to_string(*engine.strategy.name));
  if (engine.strategy.shard_group > 0)
    flags += fmt::format(" --shard-group {}", engine.strategy.shard_group);
  return flags + fmt::format(" --state-format {}", to_string(format));
}

}  // namespace

std::span<const SettingOf<ReshardCommand>> reshard_settings() {
  using In = SettingsIn<ReshardCommand>;
  static const std::vector<SettingOf<ReshardCommand>> table = [] {
    std::vector<SettingOf<ReshardCommand>> all{In::integer(
        "nproc", &ReshardCommand::ranks, {.min = 1, .max = 1024},
        {.values = "N", .help = "number of ranks that will train from the store (required)"})};
    all.front().default_text.clear();
    std::vector<SettingOf<EngineConfig>> cut;
    for (const SettingOf<EngineConfig>& setting : engine_settings()) {
      if (std::ranges::find(kCut, setting.name) != kCut.end()) cut.push_back(setting);
    }
    for (SettingOf<ReshardCommand>& setting : settings_within(cut, &ReshardCommand::engine)) {
      if (setting.name == "state_format") {
        setting.default_text.clear();
        setting.help =
            "format in which the optimizer's state is kept; if not given, the format stays as it "
            "is";
      }
      all.push_back(std::move(setting));
    }
    return all;
  }();
  return table;
}

ReshardCommand read_reshard(const Settings& settings, std::string store) {
  ReshardCommand command;
  command.store = std::move(store);
  if (!settings.given("nproc"))
    throw UsageError("ckpt reshard: the number of ranks is missing; give --nproc N");
  settings.write_to(command, reshard_settings());
  command.keeps_format = !settings.given("state_format");
  if (command.ranks % command.engine.tensor_parallel != 0) {
    throw UsageError(fmt::format(
        "{} does not divide {}, because {} would be left over; choose another number of ranks",
        settings.described("tp"), settings.described("nproc"),
        command.ranks % command.engine.tensor_parallel));
  }
  return command;
}

int ckpt_reshard(const ReshardCommand& command) {
  Console console;
  const auto runtime = Runtime::create({.threads = 0, .trace_path = ""});
  std::vector<StoreDirectory> store = parse_store(command.store);
  apply_profile(store, read_default_profile().value_or(MachineProfile{}));
  StoreReshard reshard(*runtime, store);
  const StateContent content = reshard.content();
  const StateFormat format = command.keeps_format && content.state
                                 ? content.state->format
                                 : command.engine.optimizer.state.format;
  const int parts = command.engine.tensor_parallel;
  StoreReshard::Target target{
      .model = divisible(reshard.model(), content, parts),
      .run_identity = identity_for(content, command.ranks, parts),
      .ranks = command.ranks,
      .tensor_parallel = parts,
      .strategy = command.engine.strategy,
      .format = format,
      .host_budget_bytes = command.engine.host_budget_bytes,
      .progress = [&](const char* what, std::uint64_t done, std::uint64_t total) {
        console.progress(what, done, total);
      }};
  const std::string flags = train_flags(command, format, target.run_identity);
  const int before = content.layout.ranks;
  const auto begin = std::chrono::steady_clock::now();
  const StoreReshard::Result result = reshard.run(target);
  if (!result.changed) {
    console.line(
        fmt::format("{} is already divided like that and was not changed; `ziggurat train {} ..` "
                    "continues from step {}",
                    command.store, flags, content.step));
    return 0;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (const std::string& note : result.notes) console.line("  " + note);
  console.line(fmt::format(
      "{} is now divided for {} rank{} (before: {}); {} of records were written in {:.1f} s, {}/s",
      command.store, command.ranks, command.ranks == 1 ? "" : "s", before,
      format_bytes(result.record_bytes), seconds,
      gigabytes(static_cast<std::uint64_t>(static_cast<double>(result.record_bytes) /
                                           std::max(seconds, 1e-3)))));
  console.line(
      fmt::format("`ziggurat train {} ..` continues from step {}", flags, reshard.content().step));
  return 0;
}

}  // namespace ziggurat::cli

// SPDX-License-Identifier: Apache-2.0
// integrations/cli/sample.cc: `ziggurat sample`, which lets a stored model write text. One process
// does it, whatever the number of ranks in the state, even while they train.
//
// Holds only the parameters, in an engine without a store whose parameters are all frozen.
#include <fmt/format.h>

#include "core/plan/run_plan.h"
#include "integrations/cli/checkpoint_files.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/run_state.h"
#include "integrations/gpt/trainer.h"
#include "tiers/device/host_device.h"

namespace ziggurat::cli {
namespace {

struct Speaker {
  RunIdentity identity;
  gpt::RunShape shape;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Engine> engine;
};

Speaker open_speaker(Runtime& runtime, StateSource& source, const SampleCommand& command) {
  const StateContent& content = source.content();
  Speaker speaker;
  speaker.identity = RunIdentity::parse(content.run_identity);
  gpt::ModelConfig& model = speaker.identity.model;
  model.dtype = content.dtype;
  speaker.shape = {.batch = 1, .accumulate = 1, .context = speaker.identity.context};
  TrainerNeed need = gpt::Trainer::need(model, speaker.shape, runtime.workers->threads());
  EngineConfig config;
  config.placement = {.params = Tier::kHost, .grads = Tier::kHost, .optimizer = Tier::kHost};
  config.trainer_device_bytes = need.device_bytes;
  config.trainer_held_units = need.held;
  config.param_groups = {{.params = "*", .frozen = true}};
  ModelSpec spec = gpt::make_spec(model);
  assign_groups(spec, config.param_groups);
  const RunPlan plan = plan_run(
      {.model = spec,
       .placement = config.placement,
       .device = {.trainer = std::move(need)},
       .budgets = {.device_bytes = command.device_bytes, .host_bytes = command.host_bytes}});
  config.host_budget_bytes = plan.budgets.host_bytes;
  speaker.device = HostDevice::create(runtime.reactor, plan.budgets.device_bytes);
  speaker.engine =
      Engine::open(spec, config, runtime, *speaker.device, source, {.weights_only = true});
  return speaker;
}

}  // namespace

std::span<const SettingOf<SampleCommand>> sample_settings() {
  using In = SettingsIn<SampleCommand>;
  using C = SampleCommand;
  static const std::vector<SettingOf<C>> table{
      In::text(
          "store", &C::store,
          {.values = "DIR[,DIR..]",
           .help = "folder of the training state of any number of ranks, which may be in use; or a "
                   "checkpoint; or a folder of checkpoints, whose newest is used (required)"}),
      In::text("prompt", &C::prompt, {.values = "TEXT", .help = "text that the model continues"}),
      In::integer("bytes", &C::bytes, {.min = 1, .max = 1'000'000},
                  {.values = "N", .help = "number of bytes to write"}),
      In::number(
          "temperature", &C::temperature, {.min = 0, .max = 100},
          {.values = "T", .help = "how freely bytes are drawn; 0 always takes the likeliest byte"}),
      In::integer("seed", &C::seed, {}, {.values = "S", .help = "seed of the random draw"}),
      In::size("device_memory", &C::device_bytes, 0,
               {.values = "SIZE",
                .help = "memory budget of the device; 0 means as much as the model needs"}),
      In::size("host_memory", &C::host_bytes, 0,
               {.values = "SIZE",
                .help = "budget of pinned host memory; 0 means as much as the model needs"})};
  return table;
}

SampleCommand read_sample(const Settings& settings) {
  SampleCommand command;
  settings.required("store", "the folder that `ziggurat train --store` made, or a checkpoint");
  settings.required("prompt", "at least one byte");
  settings.write_to(command, sample_settings());
  return command;
}

int sample(const SampleCommand& command) {
  const auto runtime = Runtime::create({});
  Speaker speaker;
  read_state(*runtime, command.store, [&](CheckpointFiles& files) {
    speaker = open_speaker(*runtime, files.source(), command);
  });
  gpt::Trainer trainer(*speaker.engine, *speaker.device, *runtime->workers, speaker.identity.model,
                       speaker.shape);
  gpt::SampleOptions options;
  options.count = command.bytes;
  options.temperature = static_cast<float>(command.temperature);
  options.seed = command.seed;
  options.on_byte = [](char byte) {
    std::fputc(byte, stdout);
    std::fflush(stdout);
  };
  fmt::print("{}", command.prompt);
  trainer.sample(command.prompt, options);
  fmt::print("\n");
  return 0;
}

}  // namespace ziggurat::cli

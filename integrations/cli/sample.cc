// SPDX-License-Identifier: Apache-2.0
// integrations/cli/sample.cc: `ziggurat sample`: what a stored model says.
#include <fmt/format.h>

#include <optional>

#include "integrations/cli/commands.h"
#include "integrations/cli/stored_run.h"
#include "integrations/gpt/tensor_ranks.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::cli {

std::span<const SettingOf<SampleCommand>> sample_settings() {
  using In = SettingsIn<SampleCommand>;
  using C = SampleCommand;
  static const std::vector<SettingOf<C>> table{
      In::text("store", &C::store,
               {.values = "DIR[,DIR..]",
                .help = "folder of the training state (required); several, on different drives, "
                        "share it"}),
      In::text("prompt", &C::prompt, {.values = "TEXT", .help = "what the model goes on from"}),
      In::integer("bytes", &C::bytes, {.min = 1, .max = 1'000'000},
                  {.values = "N", .help = "bytes to add"}),
      In::number("temperature", &C::temperature, {.min = 0, .max = 100},
                 {.values = "T", .help = "0 takes the likeliest byte each time"}),
      In::integer("seed", &C::seed, {}, {.values = "S", .help = "of the draw"}),
      In::size("device_memory", &C::device_bytes, 1,
               {.values = "SIZE", .help = "budget of the device, of each rank that the store has"}),
      In::size("host_memory", &C::host_bytes, 1,
               {.values = "SIZE",
                .help = "budget of pinned host memory, of each rank that the store has"})};
  return table;
}

SampleCommand read_sample(const Settings& settings) {
  SampleCommand command;
  settings.required("store", "the folder that `ziggurat train --store` made");
  settings.required("prompt", "at least one byte");
  settings.write_to(command, sample_settings());
  return command;
}

int sample(const SampleCommand& command) {
  Console console;
  StoredRun run =
      StoredRun::open(command.store, {command.device_bytes, command.host_bytes}, console);
  std::optional<gpt::TensorRanks> tensor;
  if (run.layout.parts > 1) tensor.emplace(*run.runtime, run.place);
  const gpt::RunShape shape{.batch = 1, .accumulate = 1, .context = run.identity.context};
  gpt::Trainer trainer(*run.engine, *run.device, *run.runtime->workers, run.identity.model, shape,
                       tensor ? &*tensor : nullptr);
  gpt::SampleOptions options;
  options.count = command.bytes;
  options.temperature = static_cast<float>(command.temperature);
  options.seed = command.seed;
  const bool speaks = run.ranks->first();  // every rank draws the same
  options.on_byte = [speaks](char byte) {
    if (!speaks) return;
    std::fputc(byte, stdout);
    std::fflush(stdout);
  };
  if (speaks) fmt::print("{}", command.prompt);
  trainer.sample(command.prompt, options);
  if (speaks) fmt::print("\n");
  run.part();
  return 0;
}

}  // namespace ziggurat::cli

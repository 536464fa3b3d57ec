// SPDX-License-Identifier: Apache-2.0
// integrations/cli/sample.cc: `ziggurat sample`: what a stored model says.
#include <fmt/format.h>

#include <optional>

#include "integrations/cli/commands.h"
#include "integrations/cli/stored_run.h"
#include "integrations/gpt/tensor_ranks.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::cli {

int sample(const SampleCommand& command) {
  Console console;
  StoredRun run =
      StoredRun::open(command.store, {command.device_bytes, command.host_bytes}, console);
  std::optional<gpt::TensorRanks> tensor;
  if (run.parts > 1) tensor.emplace(*run.runtime, run.parts);
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

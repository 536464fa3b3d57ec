// SPDX-License-Identifier: Apache-2.0
// integrations/cli/export.cc: `ziggurat export`, which writes the fp32 masters of a checkpoint, or
// of a store that may be in use, to a safetensors file, tensor by tensor.
//
// Names, shapes and layout are those of Hugging Face's GPT-2 (integrations/gpt/model.h), so that
// transformers can load the file as it is.
#include <fmt/format.h>

#include "base/bytes.h"
#include "integrations/cli/checkpoint_files.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/run_state.h"
#include "integrations/cli/weights_file.h"

namespace ziggurat::cli {
namespace {

std::map<std::string, std::string> metadata_of(const StateContent& content) {
  std::map<std::string, std::string> metadata{
      {"format", "pt"}, {"model", content.model}, {"steps", fmt::format("{}", content.step)}};
  if (RunIdentity::is_one(content.run_identity)) {
    const RunIdentity identity = RunIdentity::parse(content.run_identity);
    metadata["heads"] = fmt::format("{}", identity.model.heads);
  }
  return metadata;
}

}  // namespace

std::span<const SettingOf<ExportCommand>> export_settings() {
  using In = SettingsIn<ExportCommand>;
  using C = ExportCommand;
  static const std::vector<SettingOf<C>> table{
      In::text(
          "store", &C::store,
          {.values = "DIR[,DIR..]",
           .help = "folder of the training state of any number of ranks, which may be in use; or a "
                   "checkpoint; or a folder of checkpoints, whose newest is used (required)"}),
      In::text("to", &C::to, {.values = "FILE", .help = "the safetensors file to make (required)"}),
      In::parsed(
          "dtype", &C::dtype, named_dtype, [](DType dtype) { return to_string(dtype); },
          {.values = "fp32|bf16|fp16",
           .help = "fp32 writes the masters exactly; bf16 and fp16 round them to half the size"}),
      In::truth("force", SettingKind::kSwitch, &C::force, {.help = "replace FILE if it exists"})};
  return table;
}

ExportCommand read_export(const Settings& settings) {
  ExportCommand command;
  settings.required("store", "the folder that `ziggurat train --store` made, or a checkpoint");
  settings.required("to", "a file name, such as model.safetensors");
  settings.write_to(command, export_settings());
  return command;
}

int export_model(const ExportCommand& command) {
  Console console;
  const auto runtime = Runtime::create({});
  read_state(*runtime, command.store, [&](CheckpointFiles& files) {
    const StateContent& content = files.source().content();
    const WrittenWeights written = write_weights(*runtime, files.source(),
                                                 {.path = command.to,
                                                  .dtype = command.dtype,
                                                  .overwrite = command.force,
                                                  .metadata = metadata_of(content)},
                                                 console);
    console.line(fmt::format("wrote {}: {} at step {}, {} parameters in {}, {}", command.to,
                             content.model, content.step, written.parameters,
                             to_string(command.dtype), format_bytes(written.size_bytes)));
  });
  return 0;
}

}  // namespace ziggurat::cli

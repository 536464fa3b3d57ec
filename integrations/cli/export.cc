// SPDX-License-Identifier: Apache-2.0
// integrations/cli/export.cc: `ziggurat export`: the fp32 masters of a store as a safetensors file,
// unit by unit.
//
// Names, shapes and layout are Hugging Face's GPT-2 (integrations/gpt/model.h), so the file loads
// there as it is.
#include <fmt/format.h>

#include <optional>

#include "base/bytes.h"
#include "core/checkpoint/safetensors_writer.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/stored_run.h"

namespace ziggurat::cli {

std::span<const SettingOf<ExportCommand>> export_settings() {
  using In = SettingsIn<ExportCommand>;
  using C = ExportCommand;
  static const std::vector<SettingOf<C>> table{
      In::text("store", &C::store,
               {.values = "DIR[,DIR..]",
                .help = "folder of the training state (required); several, on different drives, "
                        "share it"}),
      In::text("to", &C::to, {.values = "FILE", .help = "the safetensors file to make (required)"}),
      In::parsed("dtype", &C::dtype, named_dtype, [](DType dtype) { return to_string(dtype); },
                 {.values = "fp32|bf16|fp16",
                  .help = "fp32: the masters, every bit; bf16, fp16: rounded, half the size"}),
      In::truth("force", SettingKind::kSwitch, &C::force, {.help = "replace a file that is there"}),
      In::size("host_memory", &C::host_bytes, 1,
               {.values = "SIZE",
                .help = "budget of pinned host memory, of each rank that the store has"})};
  return table;
}

ExportCommand read_export(const Settings& settings) {
  ExportCommand command;
  settings.required("store", "the folder that `ziggurat train --store` made");
  settings.required("to", "a file name, model.safetensors");
  settings.write_to(command, export_settings());
  return command;
}

int export_model(const ExportCommand& command) {
  Console console;
  StoredRun run = StoredRun::open(command.store,
                                  {.device_bytes = 0, .host_bytes = command.host_bytes}, console);
  std::vector<SafetensorsTensor> tensors;
  for (const UnitSpec& unit : run.spec.units) {
    for (const ParamSpec& param : unit.params) {
      tensors.push_back(
          {.name = param.name, .type = tensor_type(command.dtype), .shape = param.shape});
    }
  }
  const std::uint64_t generation = run.engine->generation();
  std::optional<SafetensorsWriter> writer;
  if (run.ranks->first()) {
    writer.emplace(command.to, std::move(tensors),
                   SafetensorsWriter::Options{
                       .overwrite = command.force,
                       .metadata = {{"format", "pt"},
                                    {"model", run.spec.name},
                                    {"heads", fmt::format("{}", run.identity.model.heads)},
                                    {"steps", fmt::format("{}", generation)}}});
  }
  WholeModel masters = run.masters();
  for (UnitId unit = 0; unit < run.spec.units.size(); ++unit) {
    masters.read(unit, [&](std::span<const float> values) { writer->append(values); });
    if (writer) console.progress("exporting", writer->written_bytes(), writer->file_bytes());
  }
  run.part();
  if (!writer) return 0;
  writer->finish();
  console.line(fmt::format("{}: {} at step {}, {} parameters in {}, {}", command.to, run.spec.name,
                           generation, run.spec.count(), to_string(command.dtype),
                           format_bytes(writer->file_bytes())));
  return 0;
}

}  // namespace ziggurat::cli

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
int export_model(const ExportCommand& command) {
  Console console;
  StoredRun run = StoredRun::open(command.store,
                                  {.device_bytes = 0, .host_bytes = command.host_bytes}, console);
  std::vector<SafetensorsTensor> tensors;
  for (const UnitSpec& unit : run.spec.units) {
    for (const ParamSpec& param : unit.params) {
      tensors.push_back({.name = param.name, .dtype = command.dtype, .shape = param.shape});
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
  for (UnitId unit = 0; unit < run.spec.units.size(); ++unit) {
    run.read_masters(unit, [&](std::span<const float> values) { writer->append(values); });
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

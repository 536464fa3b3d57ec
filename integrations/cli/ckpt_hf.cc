// SPDX-License-Identifier: Apache-2.0
// integrations/cli/ckpt_hf.cc: `ziggurat ckpt to-hf` and `from-hf`, which write and read the
// directories that transformers' from_pretrained() takes: model.safetensors and config.json.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "integrations/cli/checkpoint_files.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/hf_config.h"
#include "integrations/cli/output_file.h"
#include "integrations/cli/run_state.h"
#include "integrations/cli/weights_file.h"

namespace ziggurat::cli {
namespace {

/// Returns the text of config.json: the one that from-hf read, or one that describes the model that
/// `ziggurat train` trained. Empty for the state of another trainer, because only its own script
/// knows the model's configuration.
std::string config_of(const StateContent& content, DType dtype) {
  if (!content.state) {
    const nlohmann::json config = nlohmann::json::parse(content.run_identity, nullptr, false);
    return config.is_object() ? config.dump(2) + "\n" : std::string();
  }
  if (!RunIdentity::is_one(content.run_identity)) return {};
  return hf_config(RunIdentity::parse(content.run_identity).model, dtype);
}

Task<> save_weights(Runtime& runtime, SafetensorsSource& from, const std::string& folder,
                    Console& console) {
  StateContent content = from.content();
  if (!from.config().empty()) {
    const nlohmann::json config = nlohmann::json::parse(from.config(), nullptr, false);
    if (!config.is_object()) {
      throw Error(ErrorCode::kDataLoss, fmt::format("{}/{} is not a JSON object", from.place(),
                                                    SafetensorsSource::kConfigName));
    }
    content.run_identity = config.dump();
    if (const auto type = config.find("model_type"); type != config.end() && type->is_string())
      content.model = type->get<std::string>();
  }
  content.versions = {{"manifest", fmt::format("{}", Manifest::kSchema)}};
  content.layout.placement = "none";
  std::uint64_t total = 0;
  for (const StateTensor& tensor : content.tensors) total += tensor.size_bytes();
  const Give give = [&](StateSink& sink) -> Task<> {
    std::uint64_t done = 0;
    for (std::size_t t = 0; t < from.content().tensors.size(); ++t) {
      const Slice take = [&](const TensorRun& run, std::span<const std::byte> bytes) -> Task<> {
        co_await sink.write(t, std::span(&run, 1), bytes);
        done += bytes.size();
        console.progress("saving", done, total);
      };
      co_await for_each_slice(from, t, take);
    }
  };
  ShardPlan plan = plan_whole_tensors(content.tensors);
  Task<WrittenCheckpoint> writing =
      write_checkpoint(runtime, folder, std::move(content), std::move(plan), give);
  const WrittenCheckpoint written = co_await std::move(writing);
  for (const std::string& note : written.notes) console.line(note);
  console.line(fmt::format("{}: {} tensors, {}", written.directory, from.content().tensors.size(),
                           format_bytes(written.size_bytes)));
}

}  // namespace

int ckpt_to_hf(const CkptCommand& command) {
  Console console;
  const auto runtime = Runtime::create({.threads = 0, .trace_path = ""});
  CheckpointFiles files(*runtime, command.paths.at(0));
  const std::string& to = command.paths.at(1);
  const StateContent& content = files.source().content();
  const std::string config = config_of(content, command.dtype.value_or(DType::kFloat32));
  std::error_code failure;
  std::filesystem::create_directories(to, failure);
  if (failure) throw system_error(failure.value(), fmt::format("cannot make the directory {}", to));
  const WrittenWeights written =
      write_weights(*runtime, files.source(),
                    {.path = fmt::format("{}/{}", to, SafetensorsSource::kFileName),
                     .dtype = command.dtype,
                     .overwrite = command.force},
                    console);
  if (!config.empty())
    write_output(fmt::format("{}/{}", to, SafetensorsSource::kConfigName), config);
  console.line(fmt::format(
      "{}: {} at step {}, {}{}", to, content.model, content.step, format_bytes(written.size_bytes),
      config.empty()
          ? fmt::format("; {} was not written, because the checkpoint does not hold the model's "
                        "configuration; call model.config.save_pretrained(\"{}\") to write it",
                        SafetensorsSource::kConfigName, to)
          : fmt::format("; load it with from_pretrained(\"{}\")", to)));
  return 0;
}

int ckpt_from_hf(const CkptCommand& command) {
  Console console;
  const auto runtime = Runtime::create({.threads = 0, .trace_path = ""});
  const std::string& from = command.paths.at(0);
  const std::filesystem::path parent = std::filesystem::path(from).parent_path();
  if (!std::filesystem::exists(from))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} does not exist; give a directory that save_pretrained() wrote, or "
                            "a .safetensors file",
                            from),
                ENOENT);
  std::filesystem::create_directories(command.paths.at(1));
  runtime->reactor.block_on([](Runtime& run, const CkptCommand& wanted, std::string near,
                               Console& out) -> Task<> {
    const auto io = run.io_engine(run.reactor, near);
    const std::string& path = wanted.paths.at(0);
    if (!SafetensorsSource::is_there(*io, path)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} holds neither {} nor {}; give a directory that save_pretrained() "
                              "wrote, or a .safetensors file",
                              path, SafetensorsSource::kFileName, SafetensorsSource::kIndexName));
    }
    Task<std::unique_ptr<SafetensorsSource>> opening =
        SafetensorsSource::open({.reactor = run.reactor, .io = *io}, path, "");
    const std::unique_ptr<SafetensorsSource> source = co_await std::move(opening);
    if (!source->left_out().empty()) {
      out.line(
          fmt::format("these tensors were left out, because no parameter can have their type: {}",
                      fmt::join(source->left_out(), ", ")));
    }
    co_await save_weights(run, *source, wanted.paths.at(1), out);
  }(*runtime, command, parent.empty() ? "." : parent.string(), console));
  return 0;
}

}  // namespace ziggurat::cli

// SPDX-License-Identifier: Apache-2.0
// integrations/cli/ckpt_hf.cc: `ziggurat ckpt to-hf` and `from-hf`: weights to the directory that
// transformers' from_pretrained() takes, and from one: model.safetensors and config.json.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "core/checkpoint/safetensors_writer.h"
#include "core/checkpoint/tensor_values.h"
#include "integrations/cli/checkpoint_files.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/hf_config.h"
#include "integrations/cli/output_file.h"
#include "integrations/cli/run_state.h"

namespace ziggurat::cli {
namespace {

Task<> copy_tensor(StateSource& from, std::size_t tensor, TensorType type,
                   SafetensorsWriter& writer) {
  const TensorType saved = from.content().tensors[tensor].type;
  const Slice take = [&](const TensorRun& run, std::span<const std::byte> bytes) -> Task<> {
    if (saved == type) {
      writer.append_bits(bytes);
    } else {
      std::vector<float> values(run.count);
      widen(saved, bytes, values);
      writer.append(values);
    }
    co_return;
  };
  co_await for_each_slice(from, tensor, take);
}

/// What from-hf read is given back as it was; what a run trained is its model.
std::string config_of(const StateContent& content, DType dtype) {
  if (!content.state) {
    const nlohmann::json config = nlohmann::json::parse(content.run_identity, nullptr, false);
    return config.is_object() ? config.dump(2) + "\n" : std::string();
  }
  return hf_config(RunIdentity::parse(content.run_identity).model, dtype);
}

/// Weights alone stay what they are, unless --dtype says otherwise; masters are fp32.
TensorType type_of(const CkptCommand& command, const StateContent& content,
                   const StateTensor& tensor) {
  if (command.dtype) return tensor_type(*command.dtype);
  return content.state ? TensorType::kF32 : tensor.type;
}

Task<> save_weights(Runtime& runtime, SafetensorsSource& from, const std::string& folder,
                    Console& console) {
  StateContent content = from.content();
  if (!from.config().empty()) {
    const nlohmann::json config = nlohmann::json::parse(from.config(), nullptr, false);
    if (!config.is_object()) {
      throw Error(ErrorCode::kDataLoss, fmt::format("{}/{}: it is no JSON object", from.place(),
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
  std::vector<std::size_t> masters;
  std::vector<SafetensorsTensor> tensors;
  for (std::size_t t = 0; t < content.tensors.size(); ++t) {
    const StateTensor& tensor = content.tensors[t];
    if (tensor.array != "master") continue;
    masters.push_back(t);
    tensors.push_back(
        {.name = tensor.name, .type = type_of(command, content, tensor), .shape = tensor.shape});
  }
  const std::vector<SafetensorsTensor> types = tensors;
  SafetensorsWriter writer(fmt::format("{}/{}", to, SafetensorsSource::kFileName),
                           std::move(tensors),
                           {.overwrite = command.force, .metadata = {{"format", "pt"}}});
  for (std::size_t m = 0; m < masters.size(); ++m) {
    runtime->reactor.block_on(copy_tensor(files.source(), masters[m], types[m].type, writer));
    console.progress("writing", writer.written_bytes(), writer.file_bytes());
  }
  writer.finish();
  if (!config.empty())
    write_output(fmt::format("{}/{}", to, SafetensorsSource::kConfigName), config);
  console.line(fmt::format(
      "{}: {} at step {}, {}{}", to, content.model, content.step, format_bytes(writer.file_bytes()),
      config.empty() ? "" : fmt::format(": from_pretrained(\"{}\") reads it", to)));
  return 0;
}

int ckpt_from_hf(const CkptCommand& command) {
  Console console;
  const auto runtime = Runtime::create({.threads = 0, .trace_path = ""});
  const std::string& from = command.paths.at(0);
  const std::filesystem::path parent = std::filesystem::path(from).parent_path();
  if (!std::filesystem::exists(from))
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: there is no such directory", from),
                ENOENT);
  std::filesystem::create_directories(command.paths.at(1));
  runtime->reactor.block_on([](Runtime& run, const CkptCommand& wanted, std::string near,
                               Console& out) -> Task<> {
    const auto io = run.io_engine(run.reactor, near);
    const std::string& path = wanted.paths.at(0);
    if (!SafetensorsSource::is_there(*io, path)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: it has neither a {} nor a {}: give a directory that "
                              "save_pretrained() wrote, or a .safetensors file",
                              path, SafetensorsSource::kFileName, SafetensorsSource::kIndexName));
    }
    Task<std::unique_ptr<SafetensorsSource>> opening =
        SafetensorsSource::open({.reactor = run.reactor, .io = *io}, path, "");
    const std::unique_ptr<SafetensorsSource> source = co_await std::move(opening);
    if (!source->left_out().empty()) {
      out.line(fmt::format("left out, since no parameter is of such a type: {}",
                           fmt::join(source->left_out(), ", ")));
    }
    co_await save_weights(run, *source, wanted.paths.at(1), out);
  }(*runtime, command, parent.empty() ? "." : parent.string(), console));
  return 0;
}

}  // namespace ziggurat::cli

// SPDX-License-Identifier: Apache-2.0
// integrations/cli/ckpt_hf.cc: `ziggurat ckpt to-hf`: a checkpoint's masters as the directory that
// transformers' from_pretrained() takes: model.safetensors and config.json.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/error.h"
#include "core/checkpoint/safetensors_writer.h"
#include "integrations/cli/checkpoint_files.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"
#include "integrations/cli/output_file.h"
#include "integrations/cli/run_state.h"

namespace ziggurat::cli {
namespace {

/// Values that are read and written at once.
constexpr std::uint64_t kAtOnce = 1 << 20;

/// transformers' names for what the model is.
nlohmann::json config_of(const StateContent& content, DType dtype) {
  const gpt::ModelConfig model = RunIdentity::parse(content.run_identity).model;
  const char* const torch_dtype = dtype == DType::kFloat32    ? "float32"
                                  : dtype == DType::kBFloat16 ? "bfloat16"
                                                              : "float16";
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"activation_function", "gelu_new"},
          {"n_layer", model.layers},
          {"n_embd", model.width},
          {"n_head", model.heads},
          {"n_inner", model.hidden()},
          {"n_positions", model.context_max},
          {"vocab_size", model.vocabulary},
          {"layer_norm_epsilon", 1e-5},
          {"attn_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"resid_pdrop", 0.0},
          {"tie_word_embeddings", true},
          {"bos_token_id", nullptr},  // every byte is text
          {"eos_token_id", nullptr},
          {"torch_dtype", torch_dtype}};
}

Task<> copy_tensor(StateSource& reader, std::size_t tensor, SafetensorsWriter& writer) {
  const StateTensor& of = reader.content().tensors[tensor];
  for (std::uint64_t first = 0; first < of.count(); first += kAtOnce) {
    const TensorRun run{.first = first, .count = std::min(kAtOnce, of.count() - first), .at = 0};
    std::vector<std::byte> bytes(run.count * size_bytes(of.type));
    co_await reader.read(tensor, std::span(&run, 1), bytes);
    std::vector<float> values(run.count);
    if (of.type == TensorType::kF32) {
      std::memcpy(values.data(), bytes.data(), bytes.size());
    } else {
      const auto* narrow = reinterpret_cast<const bf16*>(bytes.data());
      std::transform(narrow, narrow + run.count, values.begin(), bf16_to_float);
    }
    writer.append(values);
  }
}

}  // namespace

int ckpt_to_hf(const CkptCommand& command) {
  Console console;
  const auto runtime = Runtime::create({.threads = 0, .trace_path = ""});
  CheckpointFiles files(*runtime, command.paths.at(0));
  const std::string& to = command.paths.at(1);
  const StateContent& content = files.source().content();
  const std::string config = config_of(content, command.dtype).dump(2) + "\n";
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
        {.name = tensor.name, .type = tensor_type(command.dtype), .shape = tensor.shape});
  }
  SafetensorsWriter writer(to + "/model.safetensors", std::move(tensors),
                           {.overwrite = command.force, .metadata = {{"format", "pt"}}});
  for (const std::size_t tensor : masters) {
    runtime->reactor.block_on(copy_tensor(files.source(), tensor, writer));
    console.progress("writing", writer.written_bytes(), writer.file_bytes());
  }
  writer.finish();
  write_output(to + "/config.json", config);
  console.line(fmt::format("{}: {} at step {} in {}, {}: from_pretrained(\"{}\") reads it", to,
                           content.model, content.step, to_string(command.dtype),
                           format_bytes(writer.file_bytes()), to));
  return 0;
}

}  // namespace ziggurat::cli

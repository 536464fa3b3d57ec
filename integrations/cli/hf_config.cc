// SPDX-License-Identifier: Apache-2.0
// integrations/cli/hf_config.cc: writes and compares the keys of transformers' GPT2Config.
#include "integrations/cli/hf_config.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace ziggurat::cli {
namespace {

/// Returns the keys that decide what the model computes. Weights made with other values of these
/// keys do not fit the model.
nlohmann::json model_of(const gpt::ModelConfig& model) {
  return {{"model_type", "gpt2"},
          {"activation_function", "gelu_new"},
          {"n_layer", model.layers},
          {"n_embd", model.width},
          {"n_head", model.heads},
          {"n_inner", model.hidden()},
          {"n_positions", model.context_max},
          {"vocab_size", model.vocabulary},
          {"layer_norm_epsilon", 1e-5},
          {"tie_word_embeddings", true}};
}

}  // namespace

std::string hf_config(const gpt::ModelConfig& model, DType dtype) {
  nlohmann::json config = model_of(model);
  config["architectures"] = {"GPT2LMHeadModel"};
  for (const char* const dropout : {"attn_pdrop", "embd_pdrop", "resid_pdrop"})
    config[dropout] = 0.0;
  config["bos_token_id"] = nullptr;  // every byte is text, so none marks a beginning
  config["eos_token_id"] = nullptr;
  config["torch_dtype"] = dtype == DType::kFloat32    ? "float32"
                          : dtype == DType::kBFloat16 ? "bfloat16"
                                                      : "float16";
  return config.dump(2) + "\n";
}

void require_hf_config(const std::string& text, const gpt::ModelConfig& model,
                       const std::string& place) {
  const nlohmann::json theirs = nlohmann::json::parse(text, nullptr, false);
  if (!theirs.is_object())
    throw Error(ErrorCode::kDataLoss, fmt::format("{} is not a JSON object", place));
  const nlohmann::json needed = model_of(model);
  for (const auto& [key, ours] : needed.items()) {
    const auto found = theirs.find(key);
    // An absent key, or null, stands for transformers' default, which is what our model computes.
    if (found == theirs.end() || found->is_null() || *found == ours) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} has {} {}, but this run's model has {}; give weights of the same model",
                    place, key, found->dump(), ours.dump()));
  }
}

}  // namespace ziggurat::cli

// SPDX-License-Identifier: Apache-2.0
// core/plan/models/named_models.cc: the table of published models.
#include "core/plan/models/named_models.h"

#include <algorithm>
#include <cctype>
#include <vector>

namespace ziggurat {
namespace {

/// A model of GPT's kind (Radford et al. 2019; Brown et al. 2020, table 2.1).
ModelShape gpt(const char* name, std::int64_t layers, std::int64_t hidden, std::int64_t heads,
               std::int64_t context) {
  ModelShape shape = ModelShape::gpt(layers, hidden, heads, 50'257, context);
  shape.name = name;
  return shape;
}

struct Grouped {
  std::int64_t layers, hidden, heads, kv_heads, ffn, vocabulary, context;
  std::int64_t head_dim = 128;
  bool tied = false;
};

/// A model of Llama's kind.
ModelShape llama(const char* name, const Grouped& sizes) {
  ModelShape shape;
  shape.name = name;
  shape.layers = sizes.layers;
  shape.hidden = sizes.hidden;
  shape.heads = sizes.heads;
  shape.kv_heads = sizes.kv_heads;
  shape.head_dim = sizes.head_dim;
  shape.ffn = sizes.ffn;
  shape.vocabulary = sizes.vocabulary;
  shape.context = sizes.context;
  shape.tied = sizes.tied;
  return shape;
}

ModelShape qwen2(const char* name, const Grouped& sizes) {
  ModelShape shape = llama(name, sizes);
  shape.qkv_biases = true;
  return shape;
}

ModelShape qwen3(const char* name, const Grouped& sizes, const Experts& experts = {}) {
  ModelShape shape = llama(name, sizes);
  shape.qk_norms = true;
  shape.experts = experts;
  return shape;
}

ModelShape with_experts(ModelShape shape, const Experts& experts) {
  shape.experts = experts;
  return shape;
}

ModelShape deepseek_v3() {
  ModelShape shape = llama("deepseek-v3", {61, 7168, 128, 128, 18'432, 129'280, 163'840, 192});
  shape.latent = {
      .q_rank = 1536, .kv_rank = 512, .nope_dim = 128, .rope_dim = 64, .value_dim = 128};
  shape.experts = {.count = 256,
                   .per_token = 8,
                   .ffn = 2048,
                   .shared_ffn = 2048,
                   .dense_layers = 3,
                   .router_biases = true};
  return shape;
}

/// GLM-4.5-Air's shape, of which INTELLECT-3 is a training.
ModelShape glm_air(const char* name) {
  ModelShape shape = llama(name, {46, 4096, 96, 8, 10'944, 151'552, 131'072});
  shape.qkv_biases = true;
  shape.experts = {.count = 128,
                   .per_token = 8,
                   .ffn = 1408,
                   .shared_ffn = 1408,
                   .dense_layers = 1,
                   .router_biases = true};
  return shape;
}

std::vector<ModelShape> table_of_models() {
  return {
      gpt("gpt2", 12, 768, 12, 1024),
      gpt("gpt2-medium", 24, 1024, 16, 1024),
      gpt("gpt2-large", 36, 1280, 20, 1024),
      gpt("gpt2-xl", 48, 1600, 25, 1024),
      gpt("gpt3-6.7b", 32, 4096, 32, 2048),
      gpt("gpt3-13b", 40, 5120, 40, 2048),
      gpt("gpt3-175b", 96, 12'288, 96, 2048),
      llama("llama-2-7b", {32, 4096, 32, 32, 11'008, 32'000, 4096}),
      llama("llama-2-13b", {40, 5120, 40, 40, 13'824, 32'000, 4096}),
      llama("llama-2-70b", {80, 8192, 64, 8, 28'672, 32'000, 4096}),
      llama("llama-3.2-1b", {16, 2048, 32, 8, 8192, 128'256, 131'072, 64, true}),
      llama("llama-3.2-3b", {28, 3072, 24, 8, 8192, 128'256, 131'072, 128, true}),
      llama("llama-3-8b", {32, 4096, 32, 8, 14'336, 128'256, 8192}),
      llama("llama-3.1-8b", {32, 4096, 32, 8, 14'336, 128'256, 131'072}),
      llama("llama-3-70b", {80, 8192, 64, 8, 28'672, 128'256, 8192}),
      llama("llama-3.1-70b", {80, 8192, 64, 8, 28'672, 128'256, 131'072}),
      llama("llama-3.1-405b", {126, 16'384, 128, 8, 53'248, 128'256, 131'072}),
      llama("mistral-7b", {32, 4096, 32, 8, 14'336, 32'000, 32'768}),
      llama("mistral-7b-v0.3", {32, 4096, 32, 8, 14'336, 32'768, 32'768}),
      with_experts(llama("mixtral-8x7b", {32, 4096, 32, 8, 14'336, 32'000, 32'768}),
                   {.count = 8, .per_token = 2, .ffn = 14'336}),
      with_experts(llama("mixtral-8x22b", {56, 6144, 48, 8, 16'384, 32'768, 65'536}),
                   {.count = 8, .per_token = 2, .ffn = 16'384}),
      qwen2("qwen2.5-0.5b", {24, 896, 14, 2, 4864, 151'936, 32'768, 64, true}),
      qwen2("qwen2.5-1.5b", {28, 1536, 12, 2, 8960, 151'936, 32'768, 128, true}),
      qwen2("qwen2.5-7b", {28, 3584, 28, 4, 18'944, 152'064, 131'072}),
      qwen2("qwen2.5-14b", {48, 5120, 40, 8, 13'824, 152'064, 131'072}),
      qwen2("qwen2.5-32b", {64, 5120, 40, 8, 27'648, 152'064, 131'072}),
      qwen2("qwen2.5-72b", {80, 8192, 64, 8, 29'568, 152'064, 131'072}),
      qwen3("qwen3-0.6b", {28, 1024, 16, 8, 3072, 151'936, 40'960, 128, true}),
      qwen3("qwen3-1.7b", {28, 2048, 16, 8, 6144, 151'936, 40'960, 128, true}),
      qwen3("qwen3-4b", {36, 2560, 32, 8, 9728, 151'936, 262'144, 128, true}),
      qwen3("qwen3-8b", {36, 4096, 32, 8, 12'288, 151'936, 40'960}),
      qwen3("qwen3-14b", {40, 5120, 40, 8, 17'408, 151'936, 40'960}),
      qwen3("qwen3-32b", {64, 5120, 64, 8, 25'600, 151'936, 40'960}),
      qwen3("qwen3-30b-a3b", {48, 2048, 32, 4, 6144, 151'936, 262'144},
            {.count = 128, .per_token = 8, .ffn = 768}),
      qwen3("qwen3-235b-a22b", {94, 4096, 64, 4, 12'288, 151'936, 262'144},
            {.count = 128, .per_token = 8, .ffn = 1536}),
      glm_air("glm-4.5-air"),
      glm_air("intellect-3"),
      deepseek_v3(),
  };
}

}  // namespace

std::span<const ModelShape> named_models() {
  static const std::vector<ModelShape> all = table_of_models();
  return all;
}

std::optional<ModelShape> named_model(std::string_view name) {
  std::string wanted(name.substr(name.rfind('/') + 1));
  std::ranges::transform(wanted, wanted.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (wanted == "gpt2-small") wanted = "gpt2";
  const ModelShape* found = nullptr;
  for (const ModelShape& shape : named_models()) {
    if (wanted == shape.name) return shape;
    // What follows a whole name, such as "-instruct-2507", does not change the sizes.
    const bool begins = wanted.starts_with(shape.name + "-") && !shape.name.starts_with("gpt2");
    if (begins && (found == nullptr || shape.name.size() > found->name.size())) found = &shape;
  }
  if (found == nullptr) return std::nullopt;
  return *found;
}

std::string model_names() {
  std::string names;
  for (const ModelShape& shape : named_models()) names += (names.empty() ? "" : ", ") + shape.name;
  return names;
}

}  // namespace ziggurat

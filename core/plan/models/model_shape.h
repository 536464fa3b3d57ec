// SPDX-License-Identifier: Apache-2.0
// core/plan/models/model_shape.h: the sizes of a transformer that decide what it takes and
// computes.
//
// One struct describes the families that people train: GPT-2 and GPT-3 (biases, LayerNorm, learned
// positions), Llama and Mistral (RMSNorm, gated MLP, grouped heads), Qwen (biases of q, k and v, or
// norms of q and k), Mixtral, Qwen and GLM with experts, DeepSeek with latent attention. Counts of
// parameters are exact: a test holds them to the published ones. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

namespace ziggurat {

/// Latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1). Not used if kv_rank is 0.
struct LatentAttention {
  std::int64_t q_rank = 0;  ///< 0 if the query is not compressed
  std::int64_t kv_rank = 0;
  std::int64_t nope_dim = 0;  ///< of a head's query and key, without rotary positions
  std::int64_t rope_dim = 0;  ///< with rotary positions; the key's is shared by all heads
  std::int64_t value_dim = 0;
};

/// Experts in place of an MLP. Not used if `count` is 0.
struct Experts {
  std::int64_t count = 0;
  std::int64_t per_token = 0;
  std::int64_t ffn = 0;           ///< width of one expert
  std::int64_t shared_ffn = 0;    ///< width of all shared experts together
  std::int64_t dense_layers = 0;  ///< the first layers, which have a plain MLP
  bool shared_gate = false;       ///< a gate of one number for the shared experts (Qwen2)
  bool router_biases = false;     ///< a bias of each expert, for balance (DeepSeek-V3)
};

struct ModelShape {
  std::string name;
  std::int64_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t ffn = 0;
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  ///< learned positions; 0 for rotary ones
  std::int64_t context = 0;    ///< the longest sequence it is made for
  bool gated = true;           ///< the MLP has three matrices: gate, up and down
  bool layer_norms = false;    ///< a norm has a bias too
  bool biases = false;         ///< every matrix of a layer has a bias
  bool qkv_biases = false;     ///< only q, k and v have one
  bool output_bias = false;    ///< attention's output has one too
  bool qk_norms = false;       ///< a norm over head_dim for q and for k
  bool tied = false;           ///< the head is the table of the embedding
  Experts experts{};
  LatentAttention latent{};

  /// Returns a shape like GPT-2's, or like Llama's with grouped heads and a gated MLP.
  static ModelShape gpt(std::int64_t layers, std::int64_t hidden, std::int64_t heads,
                        std::int64_t vocabulary, std::int64_t context);

  std::int64_t query_width() const noexcept;     ///< of all heads' queries
  std::int64_t key_width() const noexcept;       ///< of all heads' keys, as attention reads them
  std::int64_t value_width() const noexcept;     ///< of all heads' values
  std::int64_t attended_width() const noexcept;  ///< of what attention gives
  bool has_experts(std::int64_t layer) const noexcept;
};

/// The parameters of a model, by part.
struct ParameterCount {
  std::int64_t embedding = 0;  ///< tokens and learned positions
  std::int64_t head = 0;       ///< 0 if tied
  std::int64_t attention = 0;  ///< of one layer, with its norms
  std::int64_t expert = 0;     ///< one of them
  std::int64_t total = 0;
  std::int64_t active = 0;  ///< those that one token passes through
  std::int64_t largest_layer = 0;
};

ParameterCount count_parameters(const ModelShape& shape);

/// Returns how many parameters layer `layer` has.
std::int64_t layer_parameters(const ModelShape& shape, std::int64_t layer);

/// Counts a low-rank pair for each matrix of attention and MLP, or of attention alone; experts that
/// are adapted have a pair each.
struct LoraTargets {
  std::int64_t rank = 0;
  bool attention = true;
  bool mlp = true;
  bool experts = false;
};
std::int64_t lora_parameters(const ModelShape& shape, const LoraTargets& targets);

/// Checks that the sizes describe a model. Errors: kInvalidArgument naming `place` and the size.
void require_shape(const ModelShape& shape, const std::string& place);

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/model.h: GPT-2's shape as units of named parameters, and their initial values.
//
// Names, shapes and order of the matrices are Hugging Face's GPT-2 (Conv1D layout: [in, out]), so
// weights export 1:1. The vocabulary is the 256 bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "core/engine/engine.h"
#include "core/sharding/model_spec.h"
#include "core/sharding/tensor_part.h"

namespace ziggurat::gpt {

struct ModelConfig {
  std::int64_t layers = 12;
  std::int64_t width = 768;
  std::int64_t heads = 12;
  std::int64_t vocabulary = 256;
  std::int64_t context_max = 1024;  ///< number of learned positions
  DType dtype = DType::kBFloat16;   ///< type of parameters and activations; sums are fp32
  /// The part of each layer that this rank computes, if several ranks divide the layers: some of
  /// attention's heads, of the MLP's hidden columns and of the vocabulary (Shoeybi et al. 2019,
  /// "Megatron-LM", section 3).
  TensorPart part{};

  std::int64_t head_width() const { return width / heads; }
  std::int64_t hidden() const { return 4 * width; }
  ModelConfig whole() const {
    ModelConfig all = *this;
    all.part = {};
    return all;
  }
  // For this part.
  std::int64_t part_heads() const { return heads / part.ranks; }
  std::int64_t part_width() const { return width / part.ranks; }  ///< width of all its heads
  std::int64_t part_hidden() const { return hidden() / part.ranks; }
  std::int64_t part_vocabulary() const { return vocabulary / part.ranks; }
  std::int64_t first_token() const { return part.rank * part_vocabulary(); }

  bool operator==(const ModelConfig&) const = default;
};

/// Reads "gpt2-small" (12x768x12), "gpt2-medium" (24x1024x16) or LAYERSxWIDTHxHEADS.
/// The dtype is bf16. Errors: kInvalidArgument naming what is wrong; the width must be a multiple
/// of 16 and of the heads.
ModelConfig parse_model(std::string_view text);
/// Errors: kInvalidArgument, with the arithmetic, unless `ranks` divide the heads, the width (into
/// multiples of 16) and the vocabulary (also into multiples of 16).
void require_divisible(const ModelConfig& model, int ranks);
/// "12x768x12".
std::string to_string(const ModelConfig& config);

/// Unit 0 holds the parameters that are tied or shared (wte, wpe, ln_f); unit 1 + i is block i.
/// Matrices come first in each unit.
inline constexpr UnitId kEmbeddingUnit = 0;
constexpr UnitId block_unit(std::int64_t block) { return static_cast<UnitId>(1 + block); }
/// Returns the spec of config.part. The spec's name is to_string(config), which names the whole
/// model; parse_model() reads it back, except for the dtype.
ModelSpec make_spec(const ModelConfig& config);

/// Returns the initial values: Normal(0, 0.02), residual projections divided by sqrt(2 layers);
/// biases 0; norms 1. A value is a function of (seed, unit, element of the whole unit) alone and
/// uses no libm, so any range has the same values on every machine, and parts have the values of
/// the whole. Thread-safe.
Initializer make_initializer(const ModelConfig& config, std::uint64_t seed);

/// Where each parameter of unit 0 starts in the flat span of config.part, in elements.
struct EmbeddingLayout {
  explicit EmbeddingLayout(const ModelConfig& config);
  std::int64_t wte, wpe, ln_f_weight, ln_f_bias;
};

/// Where each parameter of a block starts in the flat span of config.part, in elements.
struct BlockLayout {
  explicit BlockLayout(const ModelConfig& config);
  std::int64_t qkv_weight, attention_projection_weight, fc_weight, mlp_projection_weight;
  std::int64_t ln_1_weight, ln_1_bias, qkv_bias, attention_projection_bias;
  std::int64_t ln_2_weight, ln_2_bias, fc_bias, mlp_projection_bias;
};

}  // namespace ziggurat::gpt

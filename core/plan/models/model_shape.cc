// SPDX-License-Identifier: Apache-2.0
// core/plan/models/model_shape.cc: counts the parameters of a transformer, matrix by matrix.
#include "core/plan/models/model_shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace ziggurat {
namespace {

std::int64_t norm_of(const ModelShape& shape) {
  return shape.layer_norms ? 2 * shape.hidden : shape.hidden;
}

std::int64_t latent_parameters(const ModelShape& shape) {
  const LatentAttention& latent = shape.latent;
  const std::int64_t query = shape.heads * (latent.nope_dim + latent.rope_dim);
  const std::int64_t queries =
      latent.q_rank == 0 ? shape.hidden * query : latent.q_rank * (shape.hidden + 1 + query);
  const std::int64_t keys = shape.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank +
                            latent.kv_rank * shape.heads * (latent.nope_dim + latent.value_dim);
  return queries + keys + shape.heads * latent.value_dim * shape.hidden;
}

std::int64_t attention_parameters(const ModelShape& shape) {
  if (shape.latent.kv_rank > 0) return latent_parameters(shape) + norm_of(shape);
  const std::int64_t widths = shape.query_width() + shape.key_width() + shape.value_width();
  std::int64_t count = shape.hidden * widths + shape.query_width() * shape.hidden;
  if (shape.biases || shape.qkv_biases) count += widths;
  if (shape.biases || shape.output_bias) count += shape.hidden;
  if (shape.qk_norms) count += 2 * shape.head_dim;
  return count + norm_of(shape);
}

/// Returns the matrices of an MLP of width `ffn`, with biases where the model has them.
std::int64_t mlp_parameters(const ModelShape& shape, std::int64_t ffn) {
  const std::int64_t into = shape.gated ? 2 : 1;
  return (into + 1) * shape.hidden * ffn + (shape.biases ? into * ffn + shape.hidden : 0);
}

std::int64_t router_parameters(const ModelShape& shape) {
  const Experts& experts = shape.experts;
  std::int64_t count = experts.count * shape.hidden + norm_of(shape);
  if (experts.router_biases) count += experts.count;
  if (experts.shared_ffn > 0) count += mlp_parameters(shape, experts.shared_ffn);
  if (experts.shared_gate) count += shape.hidden;
  return count;
}

/// Returns the sum of the widths into and out of each matrix of attention.
std::int64_t attention_widths(const ModelShape& shape) {
  const std::int64_t output = shape.attended_width() + shape.hidden;
  const LatentAttention& latent = shape.latent;
  if (latent.kv_rank == 0) {
    return 3 * shape.hidden + shape.query_width() + shape.key_width() + shape.value_width() +
           output;
  }
  const std::int64_t queries = latent.q_rank == 0
                                   ? shape.hidden + shape.query_width()
                                   : shape.hidden + 2 * latent.q_rank + shape.query_width();
  const std::int64_t keys = shape.hidden + latent.kv_rank + latent.rope_dim;
  const std::int64_t heads = latent.kv_rank + shape.heads * (latent.nope_dim + latent.value_dim);
  return queries + keys + heads + output;
}

}  // namespace

ModelShape ModelShape::gpt(std::int64_t layers, std::int64_t hidden, std::int64_t heads,
                           std::int64_t vocabulary, std::int64_t context) {
  ModelShape shape;
  shape.name = fmt::format("{}x{}x{}", layers, hidden, heads);
  shape.layers = layers;
  shape.hidden = hidden;
  shape.heads = shape.kv_heads = heads;
  shape.head_dim = heads > 0 ? hidden / heads : 0;
  shape.ffn = 4 * hidden;
  shape.vocabulary = vocabulary;
  shape.positions = shape.context = context;
  shape.gated = false;
  shape.layer_norms = shape.biases = shape.tied = true;
  return shape;
}

std::int64_t ModelShape::query_width() const noexcept {
  return heads * (latent.kv_rank > 0 ? latent.nope_dim + latent.rope_dim : head_dim);
}

std::int64_t ModelShape::key_width() const noexcept {
  return latent.kv_rank > 0 ? query_width() : kv_heads * head_dim;
}

std::int64_t ModelShape::value_width() const noexcept {
  return latent.kv_rank > 0 ? heads * latent.value_dim : kv_heads * head_dim;
}

std::int64_t ModelShape::attended_width() const noexcept {
  return heads * (latent.kv_rank > 0 ? latent.value_dim : head_dim);
}

bool ModelShape::has_experts(std::int64_t layer) const noexcept {
  return experts.count > 0 && layer >= experts.dense_layers;
}

std::int64_t layer_parameters(const ModelShape& shape, std::int64_t layer) {
  const std::int64_t attention = attention_parameters(shape);
  if (!shape.has_experts(layer))
    return attention + mlp_parameters(shape, shape.ffn) + norm_of(shape);
  return attention + router_parameters(shape) +
         shape.experts.count * mlp_parameters(shape, shape.experts.ffn);
}

ParameterCount count_parameters(const ModelShape& shape) {
  ParameterCount count;
  count.embedding = (shape.vocabulary + shape.positions) * shape.hidden;
  count.head = shape.tied ? 0 : shape.vocabulary * shape.hidden;
  count.attention = attention_parameters(shape);
  count.total = count.active = count.embedding + count.head + norm_of(shape);
  if (shape.experts.count > 0) count.expert = mlp_parameters(shape, shape.experts.ffn);
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const std::int64_t size = layer_parameters(shape, layer);
    count.total += size;
    count.active += size;
    if (shape.has_experts(layer))
      count.active -= (shape.experts.count - shape.experts.per_token) * count.expert;
    count.largest_layer = std::max(count.largest_layer, size);
  }
  return count;
}

std::int64_t lora_parameters(const ModelShape& shape, const LoraTargets& targets) {
  const std::int64_t widths_of_attention = attention_widths(shape);
  const auto widths_of_mlp = [&](std::int64_t ffn) {
    return (shape.gated ? 3 : 2) * (shape.hidden + ffn);
  };
  std::int64_t widths = 0;
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    if (targets.attention) widths += widths_of_attention;
    if (!shape.has_experts(layer)) {
      if (targets.mlp) widths += widths_of_mlp(shape.ffn);
      continue;
    }
    if (targets.mlp && shape.experts.shared_ffn > 0)
      widths += widths_of_mlp(shape.experts.shared_ffn);
    if (targets.experts) widths += shape.experts.count * widths_of_mlp(shape.experts.ffn);
  }
  return targets.rank * widths;
}

void require_shape(const ModelShape& shape, const std::string& place) {
  constexpr std::int64_t kMost = 1'000'000'000;
  const std::pair<const char*, std::int64_t> sizes[] = {
      {"layers", shape.layers},     {"hidden", shape.hidden},     {"heads", shape.heads},
      {"kv_heads", shape.kv_heads}, {"head_dim", shape.head_dim}, {"vocabulary", shape.vocabulary}};
  for (const auto& [name, size] : sizes) {
    if (size >= 1 && size < kMost) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {} is {}, but must be between 1 and {}", place, name, size, kMost - 1));
  }
  if (shape.layers > 10'000) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: layers is {}, but must be at most 10000", place, shape.layers));
  }
  // In double, which does not overflow.
  const double ffn = static_cast<double>(
      std::max({shape.ffn,
                shape.experts.ffn * std::max<std::int64_t>(1, std::min(shape.experts.count, kMost)),
                shape.experts.shared_ffn}));
  const LatentAttention& latent = shape.latent;
  const double head = static_cast<double>(
      std::max({shape.head_dim, latent.nope_dim, latent.rope_dim, latent.value_dim}));
  const double width = std::max(static_cast<double>(shape.hidden),
                                static_cast<double>(std::max(latent.q_rank, latent.kv_rank)));
  const double layer = 4 * width * (ffn + 4 * head * static_cast<double>(shape.heads));
  const double tables = 2 * width * static_cast<double>(shape.vocabulary + shape.positions);
  if (!(layer * static_cast<double>(shape.layers) + tables < 1e17)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: its sizes make more parameters than are counted here", place));
  }
  if (shape.heads % shape.kv_heads != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} heads cannot share {} heads of keys and values evenly", place,
                            shape.heads, shape.kv_heads));
  }
  const Experts& experts = shape.experts;
  if (experts.count == 0 || experts.dense_layers > 0) {
    if (shape.ffn < 1 || shape.ffn >= kMost) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the MLP's width is {}, but must be between 1 and {}", place,
                              shape.ffn, kMost - 1));
    }
  }
  if (experts.count > 0 && (experts.per_token < 1 || experts.per_token > experts.count ||
                            experts.ffn < 1 || experts.ffn >= kMost)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: a token passes through {} of {} experts of width {}, which is no "
                            "mixture of experts",
                            place, experts.per_token, experts.count, experts.ffn));
  }
}

}  // namespace ziggurat

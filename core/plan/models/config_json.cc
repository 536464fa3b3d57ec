// SPDX-License-Identifier: Apache-2.0
// core/plan/models/config_json.cc: the keys of transformers' configurations, family by family.
#include "core/plan/models/config_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/error.h"
#include "core/plan/models/named_models.h"

namespace ziggurat {
namespace {

constexpr std::uintmax_t kIndexBytesMax = 64U << 20U;  // an index names every tensor
constexpr std::int64_t kCountMax = 1'000'000'000;
constexpr const char* kIndex = "model.safetensors.index.json";

/// The keys of one configuration, with the place for messages.
class Keys {
 public:
  Keys(const nlohmann::json& object, const std::string& place) : object_(object), place_(place) {}

  /// Returns an integer; an absent key or null gives `otherwise`, which is needed if it is -1.
  std::int64_t integer(const char* key, std::int64_t otherwise = -1) const {
    const auto found = object_.find(key);
    if (found == object_.end() || found->is_null()) {
      if (otherwise >= 0) return otherwise;
      refuse(fmt::format("has no {}, without which the model's size is not known", key));
    }
    if (!found->is_number_integer() || found->get<std::int64_t>() < 0 ||
        found->get<std::int64_t>() > kCountMax)
      refuse(fmt::format("has {} {}, which must be a whole number from 0 to {}", key, found->dump(),
                         kCountMax));
    return found->get<std::int64_t>();
  }
  /// Returns an integer of at least 1.
  std::int64_t count(const char* key, std::int64_t otherwise = -1) const {
    const std::int64_t found = integer(key, otherwise);
    if (found == 0) refuse(fmt::format("has {} 0, which must be at least 1", key));
    return found;
  }
  bool truth(const char* key, bool otherwise) const {
    const auto found = object_.find(key);
    if (found == object_.end() || found->is_null()) return otherwise;
    if (!found->is_boolean())
      refuse(fmt::format("has {} {}, which must be true or false", key, found->dump()));
    return found->get<bool>();
  }
  std::string text(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() && found->is_string() ? found->get<std::string>() : "";
  }
  bool has(const char* key) const { return object_.contains(key); }
  /// Refuses a key that changes the shape, unless it has the one value that is known here.
  void require(const char* key, const nlohmann::json& known) const {
    const auto found = object_.find(key);
    if (found == object_.end() || found->is_null() || *found == known) return;
    refuse(fmt::format("has {} {}, but only {} is known here: give its sizes otherwise", key,
                       found->dump(), known.dump()));
  }
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} {}", place_, why));
  }

 private:
  const nlohmann::json& object_;
  const std::string& place_;
};

ModelShape gpt2_of(const Keys& keys) {
  ModelShape shape =
      ModelShape::gpt(keys.integer("n_layer"), keys.integer("n_embd"), keys.integer("n_head"),
                      keys.integer("vocab_size"), keys.integer("n_positions", 1024));
  shape.ffn = keys.integer("n_inner", 4 * shape.hidden);
  shape.tied = keys.truth("tie_word_embeddings", true);
  return shape;
}

ModelShape neox_of(const Keys& keys) {
  ModelShape shape =
      ModelShape::gpt(keys.integer("num_hidden_layers"), keys.integer("hidden_size"),
                      keys.integer("num_attention_heads"), keys.integer("vocab_size"),
                      keys.integer("max_position_embeddings", 2048));
  shape.ffn = keys.integer("intermediate_size");
  shape.positions = 0;
  shape.tied = keys.truth("tie_word_embeddings", false);
  keys.require("attention_bias", true);
  return shape;
}

/// Returns what Llama and those after it share.
ModelShape grouped_of(const Keys& keys) {
  ModelShape shape;
  shape.layers = keys.integer("num_hidden_layers");
  shape.hidden = keys.integer("hidden_size");
  shape.heads = keys.integer("num_attention_heads");
  shape.kv_heads = keys.integer("num_key_value_heads", shape.heads);
  shape.head_dim = keys.integer("head_dim", shape.heads > 0 ? shape.hidden / shape.heads : 0);
  shape.ffn = keys.integer("intermediate_size", 0);
  shape.vocabulary = keys.integer("vocab_size");
  shape.context = keys.integer("max_position_embeddings", 0);
  shape.tied = keys.truth("tie_word_embeddings", false);
  return shape;
}

/// Attention's bias is one of all four matrices.
ModelShape llama_of(const Keys& keys) {
  ModelShape shape = grouped_of(keys);
  shape.qkv_biases = shape.output_bias = keys.truth("attention_bias", false);
  keys.require("mlp_bias", false);
  return shape;
}

ModelShape qwen2_of(const Keys& keys) {
  ModelShape shape = grouped_of(keys);
  shape.qkv_biases = true;
  return shape;
}

ModelShape qwen3_of(const Keys& keys) {
  ModelShape shape = llama_of(keys);
  shape.qk_norms = true;
  if (keys.text("model_type") == "qwen3" && !keys.has("head_dim")) shape.head_dim = 128;
  return shape;
}

/// Qwen can have plain MLPs in chosen layers, which no published model does.
void require_experts_everywhere(const Keys& keys) {
  keys.require("decoder_sparse_step", 1);
  keys.require("mlp_only_layers", nlohmann::json::array());
}

ModelShape mixtral_of(const Keys& keys) {
  ModelShape shape = llama_of(keys);
  shape.experts = {.count = keys.count("num_local_experts", 8),
                   .per_token = keys.integer("num_experts_per_tok", 2),
                   .ffn = shape.ffn};
  return shape;
}

ModelShape qwen3_moe_of(const Keys& keys) {
  ModelShape shape = qwen3_of(keys);
  require_experts_everywhere(keys);
  shape.experts = {.count = keys.count("num_experts", 128),
                   .per_token = keys.integer("num_experts_per_tok", 8),
                   .ffn = keys.integer("moe_intermediate_size")};
  return shape;
}

ModelShape qwen2_moe_of(const Keys& keys) {
  ModelShape shape = qwen2_of(keys);
  require_experts_everywhere(keys);
  shape.experts = {.count = keys.count("num_experts", 60),
                   .per_token = keys.integer("num_experts_per_tok", 4),
                   .ffn = keys.integer("moe_intermediate_size"),
                   .shared_ffn = keys.integer("shared_expert_intermediate_size"),
                   .shared_gate = true};
  return shape;
}

Experts routed_of(const Keys& keys) {
  Experts experts{.count = keys.count("n_routed_experts"),
                  .per_token = keys.integer("num_experts_per_tok"),
                  .ffn = keys.integer("moe_intermediate_size"),
                  .dense_layers = keys.integer("first_k_dense_replace", 0)};
  keys.require("moe_layer_freq", 1);
  experts.shared_ffn = keys.integer("n_shared_experts", 0) * experts.ffn;
  return experts;
}

ModelShape glm4_moe_of(const Keys& keys) {
  ModelShape shape = grouped_of(keys);
  shape.qkv_biases = keys.truth("attention_bias", false);
  shape.qk_norms = keys.truth("use_qk_norm", false);
  shape.experts = routed_of(keys);
  shape.experts.router_biases = true;
  return shape;
}

ModelShape deepseek_of(const Keys& keys) {
  ModelShape shape = grouped_of(keys);
  keys.require("attention_bias", false);
  shape.latent = {.q_rank = keys.integer("q_lora_rank", 0),
                  .kv_rank = keys.integer("kv_lora_rank"),
                  .nope_dim = keys.integer("qk_nope_head_dim"),
                  .rope_dim = keys.integer("qk_rope_head_dim"),
                  .value_dim = keys.integer("v_head_dim")};
  shape.head_dim = shape.latent.nope_dim + shape.latent.rope_dim;
  shape.experts = routed_of(keys);
  shape.experts.router_biases = keys.text("topk_method") == "noaux_tc";
  return shape;
}

struct Family {
  const char* model_type;
  ModelShape (*read)(const Keys&);
};
constexpr Family kFamilies[] = {
    {"gpt2", gpt2_of},
    {"gpt_neox", neox_of},
    {"llama", llama_of},
    {"mistral", llama_of},
    {"qwen2", qwen2_of},
    {"qwen3", qwen3_of},
    {"mixtral", mixtral_of},
    {"qwen2_moe", qwen2_moe_of},
    {"qwen3_moe", qwen3_moe_of},
    {"deepseek_v2", deepseek_of},
    {"deepseek_v3", deepseek_of},
    {"glm4_moe", glm4_moe_of},
    {"phi3", grouped_of},
};

std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw system_error(errno, fmt::format("{} cannot be opened", path));
  if (std::filesystem::file_size(path) > kIndexBytesMax)
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} is too large for a config", path));
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) throw system_error(EIO, fmt::format("{} cannot be read", path));
  return text;
}

/// Checks that the weights beside a configuration have its number of parameters.
void require_index(const std::string& path, const ModelShape& shape) {
  const nlohmann::json index = nlohmann::json::parse(file_text(path), nullptr, false);
  const auto metadata = index.is_object() ? index.find("metadata") : index.end();
  if (metadata == index.end() || !metadata->is_object() || !metadata->contains("total_size") ||
      !metadata->at("total_size").is_number_unsigned()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} has no metadata.total_size, which says how large the weights are", path));
  }
  const auto bytes = metadata->at("total_size").get<std::uint64_t>();
  const auto count = static_cast<std::uint64_t>(count_parameters(shape).total);
  // Buffers that are saved too, or a router in fp32, take less than a hundredth.
  const bool fits = std::ranges::any_of(std::array{1U, 2U, 4U}, [&](std::uint64_t element) {
    return bytes >= count * element && bytes - count * element <= count * element / 100;
  });
  if (!fits) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has weights of {} bytes, but the configuration beside it describes "
                            "{} parameters: they are not of one model, or it has parts that are "
                            "not known here",
                            path, bytes, count));
  }
}

/// Reads "32x4096x32"; nullopt if `text` is not of that form.
std::optional<ModelShape> parse_sizes(const std::string& text) {
  std::vector<std::int64_t> sizes;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end && sizes.size() < 3) {
    std::int64_t size = 0;
    const auto [next, error] = std::from_chars(at, end, size);
    if (error != std::errc{}) return std::nullopt;
    sizes.push_back(size);
    if (next == end) break;
    if (*next != 'x') return std::nullopt;
    at = next + 1;
  }
  if (sizes.size() != 3) return std::nullopt;
  if (sizes[2] > 0 && sizes[1] % sizes[2] != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: width {} cannot be divided among {} heads", text, sizes[1], sizes[2]));
  }
  return ModelShape::gpt(sizes[0], sizes[1], sizes[2], 50'257, 2048);
}

}  // namespace

ModelShape parse_model_config(std::string_view text, const std::string& place) {
  const nlohmann::json object = nlohmann::json::parse(text, nullptr, false);
  if (!object.is_object())
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} is not a JSON object", place));
  const Keys keys(object, place);
  if (object.contains("weight_map"))
    keys.refuse("is an index of weights: give the config.json of the model, or its directory");
  const std::string type = keys.text("model_type");
  if (type.empty()) keys.refuse("has no model_type, which says how its keys are read");
  const auto* const family =
      std::ranges::find_if(kFamilies, [&](const Family& one) { return type == one.model_type; });
  if (family == std::end(kFamilies)) {
    std::string known;
    for (const Family& one : kFamilies)
      known += (known.empty() ? "" : ", ") + std::string(one.model_type);
    keys.refuse(fmt::format("has model_type '{}', which is not known; known are {}", type, known));
  }
  ModelShape shape = family->read(keys);
  const std::string name = keys.text("_name_or_path");
  shape.name = name.empty() ? type : name;
  require_shape(shape, place);
  return shape;
}

ModelShape read_model_config(const std::string& path) {
  namespace fs = std::filesystem;
  const bool directory = fs::is_directory(path);
  const fs::path file = directory ? fs::path(path) / "config.json" : fs::path(path);
  ModelShape shape = parse_model_config(file_text(file.string()), file.string());
  const fs::path index = file.parent_path() / kIndex;
  if (fs::exists(index)) require_index(index.string(), shape);
  return shape;
}

ModelShape find_model(const std::string& text) {
  // A model on disk is meant before a published one whose name its directory begins with.
  const std::filesystem::path path(text);
  if (std::filesystem::is_regular_file(path) || std::filesystem::exists(path / "config.json"))
    return read_model_config(text);
  if (auto named = named_model(text)) return *named;
  if (auto sizes = parse_sizes(text)) {
    sizes->name = text;
    require_shape(*sizes, text);
    return *sizes;
  }
  if (std::filesystem::exists(text)) return read_model_config(text);
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is not a known model; give the path of a config.json or of its "
                          "directory, LAYERSxHIDDENxHEADS such as 32x4096x32, or one of {}",
                          text, model_names()));
}

}  // namespace ziggurat

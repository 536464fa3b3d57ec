// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/training_json.cc: tables of keys, read strictly.
#include "core/plan/strategies/training_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <span>
#include <variant>

#include "base/error.h"
#include "core/plan/machines/machine.h"
#include "core/plan/models/config_json.h"
#include "core/plan/strategies/compare.h"
#include "core/plan/strategies/step_memory.h"
#include "core/plan/strategies/step_time.h"
#include "core/plan/strategies/verdict_json.h"

namespace ziggurat {
namespace {

using nlohmann::json;

[[noreturn]] void refuse_key(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("the request's {} {}", path, why));
}

/// A key and the field that it sets.
template <class Struct>
struct Key {
  const char* name;
  std::variant<int Struct::*, std::int64_t Struct::*, double Struct::*, bool Struct::*,
               Tier Struct::*, std::string Struct::*>
      field;
};

constexpr double kMostOfANumber = 1e18;
constexpr std::int64_t kMostLoraRank = 65'536;

void set(double& to, const json& value, const std::string& path) {
  if (!value.is_number() || !(value.get<double>() >= 0) || value.get<double>() > kMostOfANumber)
    refuse_key(path, fmt::format("is {}, but must be a number from 0 on", value.dump()));
  to = value.get<double>();
}
void set(std::int64_t& to, const json& value, const std::string& path) {
  double number = 0;
  set(number, value, path);
  to = static_cast<std::int64_t>(number);
  if (static_cast<double>(to) != number)
    refuse_key(path, fmt::format("is {}, but must be a whole number", value.dump()));
}
void set(int& to, const json& value, const std::string& path) {
  std::int64_t number = 0;
  set(number, value, path);
  if (number > 100'000'000) refuse_key(path, fmt::format("is {}, which is too large", number));
  to = static_cast<int>(number);
}
void set(bool& to, const json& value, const std::string& path) {
  if (!value.is_boolean())
    refuse_key(path, fmt::format("is {}, but must be true or false", value.dump()));
  to = value.get<bool>();
}
void set(std::string& to, const json& value, const std::string& path) {
  if (!value.is_string()) refuse_key(path, fmt::format("is {}, but must be a text", value.dump()));
  to = value.get<std::string>();
}
void set(Tier& to, const json& value, const std::string& path) {
  std::string word;
  set(word, value, path);
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    if (word != to_string(tier)) continue;
    to = tier;
    return;
  }
  refuse_key(path, fmt::format("is '{}', but must be device, host or nvme", word));
}

/// Sets the fields that `object` has. `also` names keys that the caller reads.
template <class Struct>
void read(Struct& into, const json& object, const std::string& path,
          std::span<const Key<Struct>> keys, std::span<const std::string_view> also = {}) {
  if (!object.is_object()) refuse_key(path, "must be an object");
  for (const auto& [name, value] : object.items()) {
    bool known = std::ranges::find(also, std::string_view(name)) != also.end();
    for (const Key<Struct>& key : keys) {
      if (name != key.name) continue;
      known = true;
      std::visit([&](auto field) { set(into.*field, value, path + "." + name); }, key.field);
    }
    if (!known) refuse_key(path, fmt::format("has an unknown key '{}'", name));
  }
}

constexpr Key<ModelShape> kModelKeys[] = {{"name", &ModelShape::name},
                                          {"layers", &ModelShape::layers},
                                          {"hidden", &ModelShape::hidden},
                                          {"heads", &ModelShape::heads},
                                          {"kv_heads", &ModelShape::kv_heads},
                                          {"head_dim", &ModelShape::head_dim},
                                          {"ffn", &ModelShape::ffn},
                                          {"vocabulary", &ModelShape::vocabulary},
                                          {"positions", &ModelShape::positions},
                                          {"context", &ModelShape::context},
                                          {"gated", &ModelShape::gated},
                                          {"layer_norms", &ModelShape::layer_norms},
                                          {"biases", &ModelShape::biases},
                                          {"qkv_biases", &ModelShape::qkv_biases},
                                          {"output_bias", &ModelShape::output_bias},
                                          {"qk_norms", &ModelShape::qk_norms},
                                          {"tied", &ModelShape::tied}};
constexpr Key<Experts> kExpertKeys[] = {{"count", &Experts::count},
                                        {"per_token", &Experts::per_token},
                                        {"ffn", &Experts::ffn},
                                        {"shared_ffn", &Experts::shared_ffn},
                                        {"dense_layers", &Experts::dense_layers},
                                        {"shared_gate", &Experts::shared_gate},
                                        {"router_biases", &Experts::router_biases}};
constexpr Key<LatentAttention> kLatentKeys[] = {{"q_rank", &LatentAttention::q_rank},
                                                {"kv_rank", &LatentAttention::kv_rank},
                                                {"nope_dim", &LatentAttention::nope_dim},
                                                {"rope_dim", &LatentAttention::rope_dim},
                                                {"value_dim", &LatentAttention::value_dim}};
constexpr Key<ParallelLayout> kLayoutKeys[] = {
    {"dp", &ParallelLayout::dp},
    {"tp", &ParallelLayout::tp},
    {"pp", &ParallelLayout::pp},
    {"ep", &ParallelLayout::ep},
    {"sequence_parallel", &ParallelLayout::sequence_parallel},
    {"pipeline_chunks", &ParallelLayout::pipeline_chunks},
    {"stage", &ParallelLayout::stage},
    {"shard_group", &ParallelLayout::shard_group},
    {"hpz", &ParallelLayout::hpz},
    {"keeps_gathered", &ParallelLayout::keeps_gathered},
    {"quantized", &ParallelLayout::quantized},
    {"params", &ParallelLayout::params},
    {"optimizer", &ParallelLayout::optimizer}};
constexpr Key<StateRecipe> kRecipeKeys[] = {{"param", &StateRecipe::param},
                                            {"gradient", &StateRecipe::gradient},
                                            {"master", &StateRecipe::master},
                                            {"moments", &StateRecipe::moments}};
constexpr Key<LoraTargets> kLoraKeys[] = {{"rank", &LoraTargets::rank},
                                          {"attention", &LoraTargets::attention},
                                          {"mlp", &LoraTargets::mlp},
                                          {"experts", &LoraTargets::experts}};
constexpr Key<Software> kSoftwareKeys[] = {
    {"flash", &Software::flash},
    {"dropout", &Software::dropout},
    {"norms_in_fp32", &Software::norms_in_fp32},
    {"experts_in_fp32", &Software::experts_in_fp32},
    {"loss_bytes", &Software::loss_bytes},
    {"loss_tokens", &Software::loss_tokens},
    {"gathered_units", &Software::gathered_units},
    {"unreduced_bytes", &Software::unreduced_bytes},
    {"unreduced_head_bytes", &Software::unreduced_head_bytes},
    {"in_flight_layers", &Software::in_flight_layers},
    {"bucket_bytes", &Software::bucket_bytes},
    {"overlaps", &Software::overlaps},
    {"staged", &Software::staged},
    {"direct", &Software::direct},
    {"vertical", &Software::vertical},
    {"leaves_out_last", &Software::leaves_out_last},
    {"host_forward_layer_s", &Software::host_forward_layer_s},
    {"host_backward_layer_s", &Software::host_backward_layer_s},
    {"host_micro_batch_s", &Software::host_micro_batch_s},
    {"collective_start_s", &Software::collective_start_s},
    {"last_stage_recomputes", &Software::last_stage_recomputes}};
constexpr Key<Training> kTrainingKeys[] = {
    {"sequence", &Training::sequence},
    {"micro_batch", &Training::micro_batch},
    {"micro_batches", &Training::micro_batches},
    {"offloads_activations", &Training::offloads_activations}};

ModelShape model_of(const json& value) {
  if (value.is_string()) return find_model(value.get<std::string>());
  constexpr std::string_view kParts[] = {"experts", "latent"};
  ModelShape shape;
  read<ModelShape>(shape, value, "model", kModelKeys, kParts);
  if (value.contains("experts"))
    read<Experts>(shape.experts, value.at("experts"), "model.experts", kExpertKeys);
  if (value.contains("latent"))
    read<LatentAttention>(shape.latent, value.at("latent"), "model.latent", kLatentKeys);
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  if (shape.head_dim == 0 && shape.heads > 0) shape.head_dim = shape.hidden / shape.heads;
  require_shape(shape, "the request's model");
  return shape;
}

Recompute recompute_of(const json& value) {
  std::string word;
  set(word, value, "recompute");
  if (word == "nothing") return Recompute::kNothing;
  if (word == "selective") return Recompute::kSelective;
  if (word == "full") return Recompute::kFull;
  refuse_key("recompute", fmt::format("is '{}', but must be nothing, selective or full", word));
}

void require_counts(const Training& training) {
  const ParallelLayout& layout = training.layout;
  for (const std::int64_t count :
       {std::int64_t{layout.dp}, std::int64_t{layout.tp}, std::int64_t{layout.pp},
        std::int64_t{layout.ep}, training.sequence, training.micro_batch, training.micro_batches}) {
    if (count < 1) refuse_key("layout and batch", "must have counts of at least 1");
  }
  if (layout.stage > 3) refuse_key("layout.stage", "must be 0 to 3");
  if (training.lora.rank > kMostLoraRank)
    refuse_key("lora.rank", fmt::format("must be at most {}", kMostLoraRank));
  // What is only arithmetic holds for any system.
  const std::string why = refusal_of(System::kPyTorch, training.model, layout);
  if (!why.empty()) refuse_key("layout", fmt::format("is impossible: {}", why));
  if (static_cast<double>(layout.dp) * layout.tp * layout.pp > 1e8)
    refuse_key("layout", "has more than 100 million ranks");
  if (static_cast<double>(training.sequence) * static_cast<double>(training.micro_batch) > 1e12)
    refuse_key("sequence", "times micro_batch must be at most a trillion tokens");
}

Training training_of(const json& request) {
  constexpr std::string_view kParts[] = {"model", "machine",  "layout",   "recipe",
                                         "lora",  "software", "recompute"};
  Training training;
  read<Training>(training, request, "object", kTrainingKeys, kParts);
  if (!request.contains("model")) refuse_key("model", "is missing");
  training.model = model_of(request.at("model"));
  const auto part = [&](const char* name, auto& into, auto keys,
                        std::span<const std::string_view> also = {}) {
    if (request.contains(name)) read(into, request.at(name), name, keys, also);
  };
  part("layout", training.layout, std::span<const Key<ParallelLayout>>(kLayoutKeys));
  part("recipe", training.recipe, std::span<const Key<StateRecipe>>(kRecipeKeys));
  part("software", training.software, std::span<const Key<Software>>(kSoftwareKeys));
  constexpr std::string_view kBesideLora[] = {"copies", "frozen_param_bytes"};
  part("lora", training.lora, std::span<const Key<LoraTargets>>(kLoraKeys), kBesideLora);
  if (request.contains("lora")) {
    const json& lora = request.at("lora");
    if (lora.contains("copies")) set(training.lora_copies, lora.at("copies"), "lora.copies");
    if (lora.contains("frozen_param_bytes"))
      set(training.frozen_param_bytes, lora.at("frozen_param_bytes"), "lora.frozen_param_bytes");
  }
  if (request.contains("recompute")) training.recompute = recompute_of(request.at("recompute"));
  require_counts(training);
  return training;
}

json lines_of(const std::vector<MemoryLine>& lines) {
  json all = json::array();
  for (const MemoryLine& line : lines) {
    all.push_back({{"what", line.what}, {"tier", to_string(line.tier)}, {"bytes", line.bytes}});
  }
  return all;
}

json memory_of(const Training& training) {
  const StepMemory memory = step_memory(training);
  json instants = json::array();
  for (const Instant& instant : memory.instants) {
    instants.push_back(
        {{"name", instant.name}, {"bytes", instant.bytes()}, {"lines", lines_of(instant.lines)}});
  }
  return {{"device_bytes", memory.device_bytes()},
          {"worst", memory.worst().name},
          {"instants", std::move(instants)},
          {"below", lines_of(memory.below)}};
}

json time_of(const Training& training, const Machine& machine) {
  const StepTime time = step_time(training, machine);
  return {{"seconds", time.seconds},
          {"bound", time.bound},
          {"binds", time.binds},
          {"busy", json_of_lines(time.busy)},
          {"lines", json_of_lines(time.lines)}};
}

/// Answers a request with "gpus", which names no layout.
json compared(json request) {
  Job job;
  const json gpus = request.at("gpus");
  set(job.gpus, gpus, "gpus");
  request.erase("gpus");
  if (request.contains("layout")) refuse_key("gpus", "is there, so that layout may not be");
  if (!request.contains("machine")) refuse_key("machine", "is missing");
  const Training training = training_of(request);
  if (job.gpus < 1) refuse_key("gpus", "must be at least 1");
  std::string name;
  set(name, request.at("machine"), "machine");
  job.machine = find_machine(name);
  job.model = training.model;
  job.sequence = training.sequence;
  job.micro_batch = training.micro_batch;
  job.micro_batches = training.micro_batches;
  job.lora = training.lora;
  job.recipe = training.recipe;
  return json_of_comparison(job, compare(job));
}

/// Returns the room of a machine, for who counts what a model takes in another way.
json room_of(const json& name) {
  std::string text;
  set(text, name, "machine");
  const Machine machine = find_machine(text);
  return {{"machine", machine.name},
          {"gpus", machine.gpus},
          {"device_bytes", machine.device_bytes},
          {"host_bytes", machine.host_bytes},
          {"drive_bytes", machine.drive_bytes},
          {"one_memory", machine.one_memory},
          {"margin", kMemoryMargin},
          {"context_bytes", kContextBytes},
          {"host_share", kHostShare}};
}

json answer(const json& request) {
  if (request.is_object() && request.size() == 1 && request.contains("machine"))
    return room_of(request.at("machine"));
  if (request.contains("gpus")) return compared(request);
  const Training training = training_of(request);
  const ParameterCount count = count_parameters(training.model);
  json given{{"parameters", count.total},
             {"active_parameters", count.active},
             {"memory", memory_of(training)}};
  if (request.contains("machine")) {
    std::string name;
    set(name, request.at("machine"), "machine");
    given["time"] = time_of(training, find_machine(name));
  }
  return given;
}

}  // namespace

std::string answer_json(std::string_view request) {
  const json asked = json::parse(request, nullptr, false);
  if (asked.is_discarded()) throw Error(ErrorCode::kInvalidArgument, "the request is not JSON");
  if (!asked.is_array()) return answer(asked).dump();
  json all = json::array();
  for (const json& one : asked) all.push_back(answer(one));
  return all.dump();
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_models_test.cc: counts of parameters against the published ones, and what a
// config.json and a machine's file may be.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "core/plan/machines/machine.h"
#include "core/plan/models/config_json.h"
#include "core/plan/models/named_models.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat {
namespace plan_models_test {

std::int64_t total(const char* name) { return count_parameters(named_model(name).value()).total; }

// The numbers are those of the weights on the Hugging Face hub (the sum of all tensors' elements),
// and for GPT-3 those of its own shape: the paper rounds to 175.0 B.
TEST(PlanModels, CountAsPublished) {
  const std::pair<const char*, std::int64_t> published[] = {
      {"gpt2", 124'439'808},
      {"gpt2-medium", 354'823'168},
      {"gpt2-large", 774'030'080},
      {"gpt2-xl", 1'557'611'200},
      {"meta-llama/Llama-2-7b", 6'738'415'616},
      {"llama-2-13b", 13'015'864'320},
      {"llama-2-70b", 68'976'648'192},
      {"llama-3.2-1b", 1'235'814'400},
      {"llama-3.2-3b", 3'212'749'824},
      {"llama-3-8b", 8'030'261'248},
      {"llama-3.1-70b", 70'553'706'496},
      {"llama-3.1-405b", 405'853'388'800},
      {"mistral-7b", 7'241'732'096},
      {"mixtral-8x7b", 46'702'792'704},
      {"mixtral-8x22b", 140'630'071'296},
      {"qwen2.5-0.5b", 494'032'768},
      {"qwen2.5-7b", 7'615'616'512},
      {"qwen2.5-72b", 72'706'203'648},
      {"Qwen/Qwen3-0.6B", 596'049'920},
      {"Qwen/Qwen3-4B-Instruct-2507", 4'022'468'096},
      {"qwen3-8b", 8'190'735'360},
      {"qwen3-32b", 32'762'123'264},
      {"Qwen/Qwen3-30B-A3B-Instruct-2507", 30'532'122'624},
      {"Qwen/Qwen3-235B-A22B-Instruct-2507", 235'093'634'560},
      {"deepseek-v3", 671'026'419'200},
  };
  for (const auto& [name, count] : published) EXPECT_EQ(total(name), count) << name;
  EXPECT_NEAR(static_cast<double>(total("gpt3-175b")), 175e9, 0.5e9);
  EXPECT_NEAR(static_cast<double>(total("PrimeIntellect/INTELLECT-3")), 106e9, 1e9);
}

TEST(PlanModels, CountWhatATokenPassesThrough) {
  const auto active = [](const char* name) {
    return static_cast<double>(count_parameters(named_model(name).value()).active) / 1e9;
  };
  EXPECT_NEAR(active("mixtral-8x7b"), 12.9, 0.05);
  EXPECT_NEAR(active("qwen3-30b-a3b"), 3.3, 0.1);
  EXPECT_NEAR(active("qwen3-235b-a22b"), 22, 0.3);
  EXPECT_NEAR(active("deepseek-v3"), 37.5, 0.6);
}

TEST(PlanModels, AdaptNamedLayers) {
  const ModelShape llama = named_model("llama-2-7b").value();
  // Hu et al. 2021: a pair of r * (in + out) for each matrix; q, k, v and o are 4096 x 4096.
  EXPECT_EQ(lora_parameters(llama, {.rank = 8, .mlp = false}), 32 * 4 * 8 * 2 * 4096);
  EXPECT_EQ(lora_parameters(llama, {.rank = 16}), 39'976'960);  // PEFT, all linear layers
  // Attention's output has as many columns in as there are queries, not as values.
  EXPECT_EQ(lora_parameters(*named_model("llama-3-8b"), {.rank = 16}), 41'943'040);
  // q_a, q_b, kv_a, kv_b and o of 61 layers.
  EXPECT_EQ(lora_parameters(*named_model("deepseek-v3"), {.rank = 1, .mlp = false}),
            61 * ((7168 + 1536) + (1536 + 128 * 192) + (7168 + 576) + (512 + 128 * 256) +
                  (128 * 128 + 7168)));
}

TEST(PlanModels, ReadAConfigAndTheIndexBesideIt) {
  const testing::ScratchDirectory scratch;
  const std::string config =
      R"({"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
    "vocab_size": 128256, "tie_word_embeddings": true})";
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(scratch.path() + "/" + name) << text;
  };
  write("config.json", config);
  const std::string& directory = scratch.path();
  EXPECT_EQ(count_parameters(read_model_config(directory)).total, 1'235'814'400);
  write("model.safetensors.index.json", R"({"metadata": {"total_size": 2471628800}})");
  EXPECT_EQ(count_parameters(find_model(directory)).total, 1'235'814'400);
  write("model.safetensors.index.json", R"({"metadata": {"total_size": 3000000000}})");
  EXPECT_THROW(find_model(directory), Error);
}

// The keys of the config.json that lies beside the published weights, as far as they decide a
// count.
TEST(PlanModels, ReadTheConfigsOfAllFamilies) {
  const std::pair<const char*, std::int64_t> published[] = {
      {R"({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
           "n_positions": 1024, "n_ctx": 1024})",
       124'439'808},
      {R"({"model_type": "gpt_neox", "num_hidden_layers": 32, "hidden_size": 4096,
           "num_attention_heads": 32, "intermediate_size": 16384, "vocab_size": 50432,
           "tie_word_embeddings": false, "max_position_embeddings": 2048})",
       6'857'302'016},
      {R"({"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
           "vocab_size": 32000, "head_dim": null})",
       7'241'732'096},
      {R"({"model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 8192,
           "vocab_size": 32064, "tie_word_embeddings": false})",
       3'821'079'552},
      {R"({"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
           "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
           "vocab_size": 151936, "tie_word_embeddings": true})",
       494'032'768},
      {R"({"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "head_dim": 128,
           "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
           "vocab_size": 151936, "tie_word_embeddings": true, "attention_bias": false})",
       596'049'920},
      {R"({"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
           "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2})",
       46'702'792'704},
      {R"({"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24,
           "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
           "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4,
           "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
           "tie_word_embeddings": false})",
       14'315'784'192},
      {R"({"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
           "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4,
           "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
           "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1})",
       30'532'122'624},
      {R"({"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
           "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
           "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128,
           "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "n_routed_experts": 256,
           "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
           "first_k_dense_replace": 3, "topk_method": "noaux_tc"})",
       671'026'419'200},
      {R"({"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
           "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
           "vocab_size": 102400, "q_lora_rank": null, "kv_lora_rank": 512, "v_head_dim": 128,
           "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "n_routed_experts": 64,
           "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
           "first_k_dense_replace": 1, "topk_method": "greedy"})",
       15'706'484'224},
  };
  for (const auto& [config, count] : published)
    EXPECT_EQ(count_parameters(parse_model_config(config, "config.json")).total, count) << config;
}

// A key that changes the shape is counted or refused, never passed over.
TEST(PlanModels, KeepKeysThatChangeTheShape) {
  const auto read = [](const std::string& more) {
    return parse_model_config(R"({"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
                                  "num_attention_heads": 4, "intermediate_size": 96, )" +
                                  more + "}",
                              "config.json");
  };
  const auto total = [&](const std::string& more) { return count_parameters(read(more)).total; };
  EXPECT_EQ(
      total(R"("model_type": "llama", "attention_bias": true)") - total(R"("model_type": "llama")"),
      2 * 4 * 64);
  EXPECT_EQ(read(R"("model_type": "qwen3")").head_dim, 128);  // as transformers has it
  for (const char* const refused :
       {R"("model_type": "llama", "mlp_bias": true)",
        R"("model_type": "gpt_neox", "attention_bias": false)",
        R"("model_type": "mixtral", "num_local_experts": 0)",
        R"("model_type": "qwen3_moe", "moe_intermediate_size": 8, "mlp_only_layers": [0])",
        R"("model_type": "qwen2_moe", "moe_intermediate_size": 8, "decoder_sparse_step": 2,
           "shared_expert_intermediate_size": 8)"})
    EXPECT_THROW(read(refused), Error) << refused;
  EXPECT_THROW(find_model("2x100x3"), Error);
}

TEST(PlanModels, OnDiskGoBeforeNames) {
  const testing::ScratchDirectory scratch;
  const auto folder = std::filesystem::path(scratch.path()) / "llama-3-8b-pruned";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
             "num_attention_heads": 4, "intermediate_size": 96})";
  EXPECT_EQ(find_model(folder.string()).layers, 2);
  EXPECT_EQ(find_model("llama-3-8b-instruct").layers, 32);
  EXPECT_EQ(find_model("mistral-7b-v0.3").vocabulary, 32'768);
}

TEST(PlanModels, RefuseWhatTheyDoNotKnow) {
  const auto message = [](const char* text) -> std::string {
    try {
      static_cast<void>(parse_model_config(text, "config.json"));
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_NE(message(R"({"model_type": "mamba"})").find("known are gpt2"), std::string::npos);
  EXPECT_NE(message(R"({"model_type": "llama"})").find("has no num_hidden_layers"),
            std::string::npos);
  EXPECT_NE(message(R"({"model_type": "llama", "num_hidden_layers": "4"})")
                .find("must be a whole number"),
            std::string::npos);
  EXPECT_NE(message(R"({"model_type": 5})").find("has no model_type"), std::string::npos);
  EXPECT_NE(message(R"({"weight_map": {}})").find("is an index of weights"), std::string::npos);
  EXPECT_NE(message("[]").find("not a JSON object"), std::string::npos);
  EXPECT_NE(message(R"({"model_type": "gpt2", "n_layer": 10000, "n_embd": 900000000, "n_head": 1,
                        "vocab_size": 900000000})")
                .find("more parameters than are counted"),
            std::string::npos);
  EXPECT_THROW(find_model("nothing-like-it"), Error);
  EXPECT_EQ(count_parameters(find_model("2x64x4")).attention, 4 * 64 * 64 + 4 * 64 + 128);
}

TEST(PlanMachines, AFileChangesWhatItNames) {
  const Machine fat = parse_machine(R"({"like": "4090x8", "host_bytes": 1e12})", "mine.json");
  EXPECT_DOUBLE_EQ(fat.host_bytes, 1e12);
  EXPECT_DOUBLE_EQ(fat.flops, find_machine("4090x8").flops);
  EXPECT_THROW(parse_machine(R"({"like": "4090x8", "gpu": 2})", "mine.json"), Error);
  EXPECT_THROW(parse_machine(R"({"gpus": 1})", "mine.json"), Error);
}

// What would make a time infinite, or no number at all.
TEST(PlanMachines, AFileNeedsWhatTimesAreDividedBy) {
  for (const char* const change :
       {R"("host_bandwidth": 0)", R"("host_bytes": 0)", R"("drive_bandwidth": 0)",
        R"("flops": 1e-300)", R"("flops": 1e300)", R"("gpus": 0)", R"("name": 3)"}) {
    EXPECT_THROW(parse_machine(fmt::format(R"({{"like": "a100x8", {}}})", change), "mine.json"),
                 Error)
        << change;
  }
  EXPECT_NO_THROW(
      parse_machine(R"({"like": "a100x8", "drive_bytes": 0, "drive_bandwidth": 0})", "mine.json"));
}

}  // namespace plan_models_test
}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// tests/integrations/deepspeed_config_test.cc: files as people have them, in DeepSpeed's words,
// ours or both; and what is said of a key that does nothing, is not built, or is not known.
//
// That values are DeepSpeed's own is for cli_deepspeed_peers_test.py, which asks it.
#include <gmock/gmock.h>

#include <map>

#include "base/error.h"
#include "integrations/deepspeed/config_json.h"

namespace ziggurat {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsSupersetOf;
using testing::Pair;

using Settings = std::map<std::string, std::string>;

/// Flags given, our defaults and the settings that there are.
ConfigContext context(const Settings& flags = {}, int launched = 1) {
  static const Settings kDefaults{{"batch", "2"},      {"accumulate", "4"}, {"tp", "1"},
                                  {"nproc", "1"},      {"dtype", "bf16"},   {"lr", "0.0006"},
                                  {"steps", "60"},     {"clip", "1"},       {"store", ""},
                                  {"zero_stage", "2"}, {"placement", ""}};
  ConfigContext its;
  its.flag = [flags](std::string_view name) -> std::optional<std::string> {
    const auto found = flags.find(std::string(name));
    return found == flags.end() ? std::nullopt : std::optional(found->second);
  };
  its.fallback = [](std::string_view name) {
    const auto found = kDefaults.find(std::string(name));
    return found == kDefaults.end() ? std::string() : found->second;
  };
  for (const auto& [name, text] : kDefaults) its.names.push_back(name);
  its.launched_ranks = launched;
  return its;
}

Settings settings(const std::string& text, const ConfigContext& with = context()) {
  Settings all;
  for (const ConfigSetting& setting : read_config(text, "ds.json", with).settings)
    all[setting.name] =
        setting.value.is_string() ? setting.value.get<std::string>() : setting.value.dump();
  return all;
}

/// What the file says itself, without DeepSpeed's defaults.
Settings said(const std::string& text, const ConfigContext& with = context()) {
  Settings all;
  for (const ConfigSetting& setting : read_config(text, "ds.json", with).settings) {
    if (setting.assumed) continue;
    all[setting.name] =
        setting.value.is_string() ? setting.value.get<std::string>() : setting.value.dump();
  }
  return all;
}

std::vector<std::string> notes(const std::string& text, const ConfigContext& with = context()) {
  return read_config(text, "ds.json", with).notes;
}

std::string refusal(const std::string& text, const ConfigContext& with = context()) {
  try {
    read_config(text, "ds.json", with);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

/// A file with this, and the one key that DeepSpeed cannot do without.
std::string with_batch(const std::string& more) {
  return R"({"train_micro_batch_size_per_gpu": 2)" + (more.empty() ? "" : ", " + more) + "}";
}

TEST(DeepSpeedConfig, AFlatFileIsGivenAsItIs) {
  EXPECT_EQ(
      settings(R"({"steps": 9, "optimizer": "lion", "lr": 1e-3, "zero-stage": 3})"),
      (Settings{{"steps", "9"}, {"optimizer", "lion"}, {"lr", "0.001"}, {"zero_stage", "3"}}));
}

// The shape of LLaMA-Factory's, Axolotl's and Accelerate's stage 3 files with offload.
TEST(DeepSpeedConfig, AFileOfStage3WithOffloadIsRead) {
  const char* text = R"({
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,  // comments are read over
    "zero_allow_untested_optimizer": true,  # and so are Hjson's
    "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW",
                  "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR",
                  "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 20,
                             "total_num_steps": "auto"}},
    "zero_optimization": {
      "stage": 3,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pin_memory": true},
      "offload_param": {"device": "cpu", "pin_memory": true},
      "overlap_comm": true,
      "contiguous_gradients": true,
      "sub_group_size": 1e9,
      "reduce_bucket_size": 5e8,
      "stage3_prefetch_bucket_size": "auto",
      "stage3_param_persistence_threshold": 1e5,
      "max_live_parameters": 1e9,
      "stage3_gather_16bit_weights_on_model_save": true,
    },
  })";
  EXPECT_EQ(said(text), (Settings{{"batch", "2"},
                                  {"accumulate", "4"},
                                  {"clip", "1"},
                                  {"dtype", "bf16"},
                                  {"optimizer", "adamw"},
                                  {"betas", "[0.9,0.95]"},
                                  {"eps", "1e-08"},
                                  {"weight_decay", "0.1"},
                                  {"schedule", "WarmupDecayLR"},
                                  {"warmup_min_lr", "0"},
                                  {"warmup_max_lr", "0.0003"},
                                  {"warmup_num_steps", "20"},
                                  {"zero_stage", "3"},
                                  {"reduce_bucket_size", "500000000"},
                                  {"param_persistence_threshold", "100000"},
                                  {"max_live_parameters", "1000000000"},
                                  {"store", "/local"},
                                  {"placement", "params=host,grads=host,optimizer=nvme"}}));
  for (const char* note :
       {"optimizer.params.lr\" changes nothing: WarmupDecayLR",
        "scheduler.params.total_num_steps\" is \"auto\"",
        "stage3_prefetch_bucket_size\" is \"auto\"", "zero_optimization.overlap_comm\"",
        "zero_optimization.sub_group_size\"", "fp16.loss_scale\" is for fp16"}) {
    EXPECT_THAT(notes(text), Contains(HasSubstr(note)));
  }
}

TEST(DeepSpeedConfig, WhatIsAbsentIsAsInDeepSpeed) {
  EXPECT_EQ(settings(with_batch("")),
            (Settings{{"batch", "2"},
                      {"accumulate", "1"},
                      {"clip", "1.0"},
                      {"dtype", "fp32"},
                      {"zero_stage", "0"},
                      {"placement", "params=device,grads=device,optimizer=device"},
                      {"reduce_bucket_size", "500000000"},
                      {"prefetch_bucket_size", "50000000"},
                      {"max_live_parameters", "1000000000"},
                      {"max_reuse_distance", "1000000000"},
                      {"param_persistence_threshold", "100000"}}));
  EXPECT_THAT(notes(with_batch("")), Contains(HasSubstr("\"optimizer\" is missing")));
  EXPECT_THAT(
      settings(with_batch(R"("optimizer": {"type": "AdamW"})")),
      IsSupersetOf({Pair("lr", "0.001"), Pair("betas", "[0.9,0.999]"), Pair("eps", "1e-08"),
                    Pair("weight_decay", "0"), Pair("schedule", "constant"), Pair("warmup", "0")}));
  EXPECT_THAT(settings(with_batch(R"("optimizer": {"type": "Adagrad"})")),
              IsSupersetOf({Pair("lr", "0.01"), Pair("eps", "1e-10")}));
  EXPECT_THAT(
      settings(with_batch(R"("optimizer": {"type": "AdamW", "params": {"torch_adam": true}})")),
      Contains(Pair("weight_decay", "0.01")));
}

TEST(DeepSpeedConfig, ADefaultOfTheirsIsNotWhatTheFileSays) {
  for (const ConfigSetting& setting : read_config(with_batch(""), "ds.json", context()).settings)
    EXPECT_EQ(setting.assumed, setting.name != "batch") << setting.name;
}

TEST(DeepSpeedConfig, BatchSizesAreCompleted) {
  const auto batches = [](const std::string& text, const ConfigContext& with = context()) {
    const Settings all = settings("{" + text + "}", with);
    return all.at("batch") + " x " + all.at("accumulate");
  };
  EXPECT_EQ(batches(R"("train_batch_size": 128)"), "128 x 1");
  EXPECT_EQ(batches(R"("train_batch_size": 128)", context({}, 8)), "16 x 1");
  EXPECT_EQ(batches(R"("train_batch_size": 128)", context({{"nproc", "4"}})), "32 x 1");
  EXPECT_EQ(batches(R"("train_batch_size": 128)", context({{"nproc", "4"}, {"tp", "2"}})),
            "64 x 1");
  EXPECT_EQ(
      batches(R"("train_batch_size": 128, "train_micro_batch_size_per_gpu": 4)", context({}, 8)),
      "4 x 4");
  EXPECT_EQ(batches(R"("train_batch_size": 128, "gradient_accumulation_steps": 4)"), "32 x 4");
  EXPECT_EQ(batches(R"("train_micro_batch_size_per_gpu": 3)"), "3 x 1");
  EXPECT_EQ(batches(R"("train_batch_size": 24, "nproc": 2)"), "12 x 1");
  EXPECT_EQ(batches(R"("train_batch_size": 24)", context({{"batch", "6"}})), "6 x 4")
      << "a flag wins";
  EXPECT_EQ(batches(R"("train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto",
                        "gradient_accumulation_steps": "auto")"),
            "24 x 1");
  EXPECT_EQ(batches(R"("train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                        "gradient_accumulation_steps": "auto")"),
            "2 x 4")
      << "our defaults";
}

TEST(DeepSpeedConfig, BatchSizesThatDisagreeAreRefusedWithTheArithmetic) {
  EXPECT_THAT(refusal(R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
                          "gradient_accumulation_steps": 4})"),
              AllOf(HasSubstr("\"train_batch_size\" is 32"), HasSubstr("4 x 4 x 1 is 16")));
  EXPECT_THAT(refusal(R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})"),
              HasSubstr("4 x 2 x 1 is 8"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 4})", context({}, 8)), HasSubstr("0 x 1 x 8"));
  EXPECT_THAT(refusal(R"({"gradient_accumulation_steps": 4, "bf16": {"enabled": true}})"),
              HasSubstr("\"train_micro_batch_size_per_gpu\" is missing"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 0})"), HasSubstr("\"train_batch_size\" is 0"));
  EXPECT_THAT(refusal(R"({"train_micro_batch_size_per_gpu": 2, "batch": 2})"),
              HasSubstr("the same setting"));
}

TEST(DeepSpeedConfig, BothNamesMayStandInOneFileButNotForOneSetting) {
  EXPECT_EQ(said(R"({"store": "s", "batch": 3, "zero_optimization": {"stage": 2}})"),
            (Settings{{"store", "s"}, {"batch", "3"}, {"zero_stage", "2"}}));
  EXPECT_THAT(refusal(R"({"zero-stage": 3, "zero_optimization": {"stage": 2}})"),
              AllOf(HasSubstr("\"zero-stage\""), HasSubstr("\"zero_optimization.stage\""),
                    HasSubstr("the same setting")));
  EXPECT_THAT(refusal(with_batch(R"("placement": "all=host",
                                    "zero_optimization": {"offload_param": {"device": "cpu"}})")),
              HasSubstr("the same setting"));
}

TEST(DeepSpeedConfig, OffloadSaysWhereEverythingIs) {
  const auto placement = [](const std::string& offload) {
    return settings(with_batch("\"zero_optimization\": {" + offload + "}"))["placement"];
  };
  EXPECT_EQ(placement(R"("offload_optimizer": {"device": "cpu"})"),
            "params=device,grads=host,optimizer=host");
  EXPECT_EQ(placement(R"("offload_param": {"device": "nvme"})"),
            "params=nvme,grads=device,optimizer=device");
  EXPECT_EQ(placement(R"("cpu_offload": true)"), "params=device,grads=host,optimizer=host");
  EXPECT_EQ(placement(R"("stage": 2)"), "params=device,grads=device,optimizer=device");
  EXPECT_THAT(refusal(with_batch(R"("zero_optimization": {"offload_param": {"device": "gpu"}})")),
              AllOf(HasSubstr("zero_optimization.offload_param.device"), HasSubstr("cpu or nvme")));
}

TEST(DeepSpeedConfig, AnNvmePathIsTheStoreUnlessOneIsGiven) {
  const std::string text = with_batch(
      R"("zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/b"},
          "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}})");
  EXPECT_EQ(settings(text)["store"], "/a");
  EXPECT_THAT(notes(text), Contains(AllOf(HasSubstr("offload_param.nvme_path\" changes nothing"),
                                          HasSubstr("`store`"))));
  EXPECT_FALSE(settings(text, context({{"store", "mine"}})).contains("store"));
}

TEST(DeepSpeedConfig, ATypeIsTheOneThatIsEnabled) {
  EXPECT_THAT(settings(with_batch(R"("fp16": {"enabled": true, "hysteresis": 3})")),
              IsSupersetOf({Pair("dtype", "fp16"), Pair("hysteresis", "3")}));
  EXPECT_EQ(settings(with_batch(R"("bfloat16": {"enabled": true})"))["dtype"], "bf16");
  EXPECT_EQ(settings(with_batch(R"("fp16": {"enabled": false})"))["dtype"], "fp32");
  EXPECT_EQ(
      settings(with_batch(R"("fp16": {"enabled": "auto"}, "bf16": {"enabled": true})"))["dtype"],
      "bf16");
  EXPECT_THAT(refusal(with_batch(R"("fp16": {"enabled": true}, "bf16": {"enabled": true})")),
              HasSubstr("a model has one type"));
}

TEST(DeepSpeedConfig, AutoIsTheFlagOrOurDefaultAndSaid) {
  const std::string text = with_batch(R"("gradient_clipping": "auto",
      "fp16": {"enabled": "auto", "loss_scale": 128})");
  EXPECT_FALSE(settings(text).contains("clip"));
  EXPECT_FALSE(settings(text).contains("dtype"));
  EXPECT_THAT(
      notes(text),
      Contains(HasSubstr("\"gradient_clipping\" is \"auto\", so `clip` is 1, our default")));
  EXPECT_THAT(notes(text, context({{"clip", "0.5"}})),
              Contains(HasSubstr("`clip` is 0.5, as its flag says")));
  EXPECT_FALSE(settings(text).contains("loss_scale")) << "bf16 has none";
  EXPECT_TRUE(settings(text, context({{"dtype", "fp16"}})).contains("loss_scale"));
}

TEST(DeepSpeedConfig, OptimizersGoByDeepSpeedsNames) {
  const auto optimizer = [](const std::string& type, const std::string& params = "{}") {
    return settings(with_batch(R"("optimizer": {"type": ")" + type + R"(", "params": )" + params +
                               "}"))["optimizer"];
  };
  EXPECT_EQ(optimizer("Adam"), "adamw") << "it decouples decay";
  EXPECT_EQ(optimizer("DeepSpeedCPUAdam"), "adamw");
  EXPECT_EQ(optimizer("Adam", R"({"adam_w_mode": false})"), "adam");
  EXPECT_EQ(optimizer("AdamW", R"({"adam_w_mode": false})"), "adamw") << "whatever it says";
  EXPECT_EQ(optimizer("DeepSpeedCPULion"), "lion");
  EXPECT_EQ(
      settings(with_batch(R"("optimizer": {"type": "SGD", "params": {"momentum": 0.9}})"))["betas"],
      "[0.9,0.999]");
  EXPECT_THAT(refusal(with_batch(R"("optimizer": {"type": "OneBitAdam"})")),
              AllOf(HasSubstr("optimizer.type"), HasSubstr("OneBitAdam"), HasSubstr("Lion")));
  EXPECT_THAT(
      refusal(with_batch(R"("optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}})")),
      AllOf(HasSubstr("max_grad_norm"), HasSubstr("gradient_clipping")));
}

TEST(DeepSpeedConfig, AScheduleTakesTheOptimizersRateOrReplacesIt) {
  const auto with = [](const std::string& schedule) {
    return with_batch(R"("optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
                         "scheduler": )" +
                      schedule);
  };
  const std::string own_peak = with(R"({"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}})");
  EXPECT_EQ(settings(own_peak)["warmup_max_lr"], "0.0003");
  EXPECT_FALSE(settings(own_peak).contains("lr"));
  EXPECT_THAT(notes(own_peak), Contains(HasSubstr("\"optimizer.params.lr\" changes nothing")));
  EXPECT_EQ(settings(with(R"({"type": "WarmupLR"})"))["lr"], "0.0001");
  EXPECT_EQ(settings(with(R"({"type": "WarmupDecayLR",
                              "params": {"total_num_steps": 9, "warmup_max_lr": "auto"}})"))
                ["warmup_max_lr"],
            "0.0001");
  EXPECT_THAT(refusal(with(R"({"type": "WarmupDecayLR"})")),
              HasSubstr("\"scheduler.params.total_num_steps\" is missing"));
}

TEST(DeepSpeedConfig, WhatWouldChangeResultsAndIsNotBuiltIsRefusedByPath) {
  EXPECT_THAT(
      refusal(with_batch(R"("zero_optimization": {"zero_quantized_nontrainable_weights": true})")),
      AllOf(HasSubstr("zero_optimization.zero_quantized_nontrainable_weights"),
            HasSubstr("not supported")));
  EXPECT_THAT(refusal(with_batch(R"("bf16": {"bf16_optimizer_states": true})")),
              HasSubstr("state_format"));
  EXPECT_THAT(refusal(with_batch(R"("zero_optimization": {"zenflow": {"topk_ratio": 0.1}})")),
              HasSubstr("zero_optimization.zenflow"));
  EXPECT_THAT(refusal(with_batch(R"("elasticity": {"enabled": false})")),
              AllOf(HasSubstr("\"elasticity\""), HasSubstr("DeepSpeed has removed this key")));
}

TEST(DeepSpeedConfig, AnUnknownKeyIsRefusedOrNotedAsInDeepSpeed) {
  EXPECT_THAT(refusal(with_batch(R"("zero_optimization": {"overlap_com": true})")),
              AllOf(HasSubstr("zero_optimization.overlap_com"),
                    HasSubstr("did you mean \"overlap_comm\"?")));
  EXPECT_THAT(refusal(with_batch(R"("zero_optimization": {"offload_param": {"devise": "cpu"}})")),
              HasSubstr("did you mean \"device\"?"));
  EXPECT_THAT(
      refusal(with_batch(R"("zero_optimization": {"offload_optimizer": {"max_in_cpu": 1e9}})")),
      HasSubstr("zero_optimization.offload_optimizer.max_in_cpu"));
  EXPECT_THAT(refusal(with_batch(R"("fp16": true)")), HasSubstr("\"fp16\" must be an object"));
  EXPECT_THAT(notes(with_batch(R"("activation_checkpointing": {"cpu_checkpoint": true})")),
              Contains(AllOf(HasSubstr("activation_checkpointing.cpu_checkpoint\""),
                             HasSubstr("did you mean \"cpu_checkpointing\"?"))));
  EXPECT_THAT(
      notes(with_batch(R"("_description": "mine")")),
      Contains(HasSubstr("\"_description\" changes nothing: neither Ziggurat nor DeepSpeed")));
  EXPECT_TRUE(said(with_batch(R"("stepz": 3)")).contains("stepz")) << "near ours: for the caller";
}

TEST(DeepSpeedConfig, QuantizedGradientsHaveFourBitsAsTheyHaveThere) {
  const std::string text = with_batch(R"("communication_data_type": "fp16",
      "zero_optimization": {"stage": 3, "zero_quantized_weights": true,
                            "zero_quantized_gradients": true})");
  const ConfigContext four = context({}, 4);
  EXPECT_THAT(said(text, four),
              IsSupersetOf({Pair("quantized_gradients", "4"), Pair("quantized_weights", "true")}));
  EXPECT_FALSE(said(text, four).contains("reduce_dtype"));
  EXPECT_THAT(notes(text, four), Contains(HasSubstr("communication_data_type\" changes nothing")));
  EXPECT_THAT(notes(text), Contains(HasSubstr("there is one rank")));
  EXPECT_EQ(settings(with_batch(R"("communication_data_type": "FP32")"))["reduce_dtype"], "fp32");
  EXPECT_THAT(refusal(with_batch(R"("zero_optimization": {"zero_quantized_gradients": 8})")),
              AllOf(HasSubstr("zero_quantized_gradients"), HasSubstr("true or false")));
}

TEST(DeepSpeedConfig, ASecondPartitionOfOneIsNone) {
  const auto one = [](const std::string& text, int ranks = 16) {
    return said(with_batch(text), context({}, ranks));
  };
  const std::string eight = R"("zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8})";
  EXPECT_FALSE(
      one(R"("zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1})").contains("hpz"));
  EXPECT_EQ(one(eight)["hpz"], "8");
  EXPECT_FALSE(one(eight, 8).contains("hpz")) << "there are no more ranks";
  EXPECT_FALSE(
      one(R"("zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8})").contains("hpz"))
      << "it is for stage 3";
  EXPECT_EQ(one(R"("tensor_parallel": {"autotp_size": 4})")["tp"], "4");
}

TEST(DeepSpeedConfig, NullIsAsIfTheKeyWereAbsent) {
  EXPECT_EQ(settings(with_batch(R"("gradient_clipping": null, "communication_data_type": null,
                                   "scheduler": null, "steps_per_print": Infinity)")),
            settings(with_batch("")));
}

TEST(DeepSpeedConfig, AMachineProfilesAioIsNoDeepSpeedConfig) {
  EXPECT_EQ(settings(R"({"steps": 3, "aio": {"queue_depth": 8}})"), (Settings{{"steps", "3"}}));
}

TEST(DeepSpeedConfig, HostileTextIsRefused) {
  EXPECT_THAT(refusal("{\"x\": " + std::string(100'000, '[')), HasSubstr("nested"));
  EXPECT_THAT(refusal(R"({"fp16": {"enabled": true, "enabled": false}})"), HasSubstr("twice"));
  EXPECT_THAT(refusal("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal("// only a comment"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("{\"a\": \"#,}"), HasSubstr("not JSON"));
  EXPECT_EQ(settings(R"({"store": "a # b, // c,}"})"), (Settings{{"store", "a # b, // c,}"}}));
}

}  // namespace
}  // namespace ziggurat

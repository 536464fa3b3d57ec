// SPDX-License-Identifier: Apache-2.0
// tests/integrations/deepspeed_config_test.cc: files as people have them, in DeepSpeed's words,
// ours or both; and what is said of a key that does nothing, is not built, or is not known.
#include "integrations/deepspeed/config_json.h"

#include <gmock/gmock.h>

#include <map>

#include "base/error.h"

namespace ziggurat {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

std::map<std::string, std::string> settings(const std::string& text) {
  std::map<std::string, std::string> all;
  for (const ConfigSetting& setting : read_config(text, "ds.json").settings)
    all[setting.key] =
        setting.value.is_string() ? setting.value.get<std::string>() : setting.value.dump();
  return all;
}

std::string refusal(const std::string& text) {
  try {
    read_config(text, "ds.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

using Settings = std::map<std::string, std::string>;

TEST(ConfigJson, AFlatFileIsGivenAsItIs) {
  EXPECT_EQ(settings(R"({"steps": 9, "optimizer": "lion", "lr": 1e-3})"),
            (Settings{{"steps", "9"}, {"optimizer", "lion"}, {"lr", "0.001"}}));
}

// The shape of LLaMA-Factory's, Axolotl's and Accelerate's stage 3 files with offload.
TEST(ConfigJson, ADeepSpeedFileOfStage3WithOffloadIsRead) {
  const char* text = R"({
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,  // comments are read over
    "zero_allow_untested_optimizer": true,
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
      "stage3_gather_16bit_weights_on_model_save": true
    }
  })";
  EXPECT_EQ(settings(text), (Settings{{"batch", "2"},
                                      {"accumulate", "4"},
                                      {"clip", "1"},
                                      {"dtype", "bf16"},
                                      {"optimizer", "adamw"},
                                      {"lr", "0.0003"},
                                      {"betas", "[0.9,0.95]"},
                                      {"weight-decay", "0.1"},
                                      {"schedule", "WarmupDecayLR"},
                                      {"warmup-min-lr", "0"},
                                      {"warmup-max-lr", "0.0003"},
                                      {"warmup-num-steps", "20"},
                                      {"zero-stage", "3"},
                                      {"reduce-bucket-size", "500000000"},
                                      {"placement", "params=host,grads=host,optimizer=nvme"}}));
  const std::vector<std::string> notes = read_config(text, "ds.json").notes;
  for (const char* said :
       {"zero_optimization.offload_optimizer.nvme_path\" changes nothing: all that is on NVMe",
        "zero_optimization.overlap_comm\"", "zero_optimization.sub_group_size\"",
        "zero_optimization.stage3_param_persistence_threshold\"",
        "zero_optimization.max_live_parameters\"", "fp16.loss_scale\" is for fp16"}) {
    EXPECT_THAT(notes, Contains(HasSubstr(said)));
  }
}

TEST(ConfigJson, BothNamesMayStandInOneFileButNotForOneSetting) {
  EXPECT_EQ(settings(R"({"store": "s", "zero_optimization": {"stage": 2}})"),
            (Settings{{"store", "s"}, {"zero-stage", "2"}}));
  EXPECT_THAT(refusal(R"({"zero-stage": 3, "zero_optimization": {"stage": 2}})"),
              AllOf(HasSubstr("\"zero-stage\""), HasSubstr("\"zero_optimization.stage\""),
                    HasSubstr("one setting")));
  EXPECT_THAT(refusal(R"({"placement": "all=host",
                          "zero_optimization": {"offload_param": {"device": "cpu"}}})"),
              HasSubstr("one setting"));
}

TEST(ConfigJson, OffloadSaysWhereEverythingIs) {
  const auto placement = [](const std::string& offload) {
    return settings("{\"zero_optimization\": {" + offload + "}}")["placement"];
  };
  EXPECT_EQ(placement(R"("offload_optimizer": {"device": "cpu"})"),
            "params=device,grads=host,optimizer=host");
  EXPECT_EQ(placement(R"("offload_param": {"device": "nvme"})"),
            "params=nvme,grads=device,optimizer=device");
  EXPECT_EQ(placement(R"("stage": 2)"), "");
  EXPECT_THAT(refusal(R"({"zero_optimization": {"offload_param": {"device": "gpu"}}})"),
              AllOf(HasSubstr("zero_optimization.offload_param.device"), HasSubstr("cpu or nvme")));
}

TEST(ConfigJson, ATypeIsTheOneThatIsEnabled) {
  EXPECT_EQ(settings(R"({"fp16": {"enabled": true, "hysteresis": 3}})"),
            (Settings{{"dtype", "fp16"}, {"hysteresis", "3"}}));
  EXPECT_EQ(settings(R"({"bfloat16": {"enabled": true}})"), (Settings{{"dtype", "bf16"}}));
  EXPECT_EQ(settings(R"({"fp16": {"enabled": false}})"), (Settings{{"dtype", "fp32"}}));
  EXPECT_EQ(settings(R"({"fp16": {"enabled": "auto"}})"), Settings{});
  EXPECT_THAT(refusal(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"),
              HasSubstr("a model has one type"));
}

TEST(ConfigJson, DeepSpeedsAdamDecouplesDecay) {
  EXPECT_EQ(settings(R"({"optimizer": {"type": "Adam"}})"), (Settings{{"optimizer", "adamw"}}));
  EXPECT_THAT(refusal(R"({"optimizer": {"type": "OneBitAdam"}})"),
              AllOf(HasSubstr("optimizer.type"), HasSubstr("OneBitAdam"), HasSubstr("Lion")));
  EXPECT_THAT(refusal(R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}})"),
              AllOf(HasSubstr("optimizer.params.adam_w_mode"), HasSubstr("\"adam\"")));
}

TEST(ConfigJson, WhatWouldChangeResultsAndIsNotBuiltIsRefusedByPath) {
  EXPECT_THAT(refusal(R"({"zero_optimization": {"zero_quantized_nontrainable_weights": true}})"),
              AllOf(HasSubstr("zero_optimization.zero_quantized_nontrainable_weights"),
                    HasSubstr("not built")));
  EXPECT_THAT(refusal(R"({"bf16": {"bf16_optimizer_states": true}})"), HasSubstr("state-format"));
}

TEST(ConfigJson, AnUnknownKeyIsNamedByItsPathWithWhatWasMeant) {
  EXPECT_THAT(refusal(R"({"zero_optimization": {"overlap_com": true}})"),
              AllOf(HasSubstr("zero_optimization.overlap_com"),
                    HasSubstr("did you mean \"overlap_comm\"?")));
  EXPECT_THAT(refusal(R"({"zero_optimization": {"offload_param": {"devise": "cpu"}}})"),
              HasSubstr("did you mean \"device\"?"));
  EXPECT_THAT(refusal(R"({"fp16": true})"), HasSubstr("\"fp16\" must be an object"));
}

TEST(ConfigJson, QuantizedGradientsHaveFourBitsAsTheyHaveThere) {
  EXPECT_EQ(settings(R"({"zero_optimization": {"zero_quantized_weights": true,
                                               "zero_quantized_gradients": true}})"),
            (Settings{{"quantized-gradients", "4"}, {"quantized-weights", "true"}}));
  EXPECT_EQ(settings(R"({"zero_optimization": {"zero_quantized_weights": false,
                                               "zero_quantized_gradients": false}})"),
            Settings{});
  EXPECT_THAT(refusal(R"({"zero_optimization": {"zero_quantized_gradients": 8}})"),
              AllOf(HasSubstr("zero_quantized_gradients"), HasSubstr("true or false")));
}

TEST(ConfigJson, ASecondPartitionOfOneIsNone) {
  EXPECT_EQ(settings(R"({"zero_optimization": {"zero_hpz_partition_size": 1}})"), Settings{});
  EXPECT_EQ(settings(R"({"tensor_parallel": {"autotp_size": 0}})"), Settings{});
  EXPECT_EQ(settings(R"({"tensor_parallel": {"autotp_size": 4}})"), (Settings{{"tp", "4"}}));
  EXPECT_EQ(settings(R"({"zero_optimization": {"zero_hpz_partition_size": 8}})"),
            (Settings{{"hpz", "8"}}));
}

TEST(ConfigJson, AutoNullAndOtherToolsSectionsLeaveDefaults) {
  EXPECT_EQ(settings(R"({"gradient_clipping": "auto", "communication_data_type": null,
                         "tensorboard": {"enabled": true}})"),
            Settings{});
}

TEST(ConfigJson, HostileTextIsRefused) {
  EXPECT_THAT(refusal("{\"x\": " + std::string(100'000, '[')), HasSubstr("nested"));
  EXPECT_THAT(refusal(R"({"fp16": {"enabled": true, "enabled": false}})"), HasSubstr("twice"));
  EXPECT_THAT(refusal("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal("// only a comment"), HasSubstr("not JSON"));
}

}  // namespace
}  // namespace ziggurat

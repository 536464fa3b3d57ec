// SPDX-License-Identifier: Apache-2.0
// tests/integrations/deepspeed_script_test.cc: the same files where a script of its own trains:
// what it is handed, what is said otherwise, and what nobody fills in.
//
// That values are DeepSpeed's own is for python/deepspeed_config_test.py, which asks it.
#include <gmock/gmock.h>

#include <map>

#include "base/error.h"
#include "integrations/deepspeed/config_json.h"

namespace ziggurat {
namespace {

using nlohmann::json;
using testing::Contains;
using testing::HasSubstr;
using testing::IsSupersetOf;
using testing::Not;
using testing::Pair;

ConfigFile read(const std::string& more, int ranks = 1) {
  ConfigContext context;
  context.script = true;
  context.launched_ranks = ranks;
  context.names = {"placement", "host_memory"};
  const std::string separator = more.empty() ? "" : ", ";
  return read_config(R"({"train_micro_batch_size_per_gpu": 2)" + separator + more + "}", "ds.json",
                     context);
}

std::map<std::string, std::string> values(const std::vector<ConfigSetting>& settings) {
  std::map<std::string, std::string> all;
  for (const ConfigSetting& setting : settings) all[setting.name] = setting.value.dump();
  return all;
}

std::string script_refusal(const std::string& more) {
  try {
    read(more);
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

TEST(DeepSpeedScript, WhatItHonoursIsHandedWithDeepSpeedsDefaults) {
  const ConfigFile its = read(R"("dump_state": true, "wandb": {"enabled": true, "team": "t"},
                                 "bf16": {"check_grad_overflow": false})");
  EXPECT_THAT(values(its.handed),
              IsSupersetOf({Pair("dump_state", "true"), Pair("wandb.team", "\"t\""),
                            Pair("wandb.project", "\"deepspeed\""),
                            Pair("bf16.check_grad_overflow", "false"),
                            Pair("steps_per_print", "null"), Pair("aio.queue_depth", "8")}));
  for (const ConfigSetting& handed : its.handed) {
    const bool said = handed.name == "dump_state" || handed.name == "wandb.enabled" ||
                      handed.name == "wandb.team" || handed.name == "bf16.check_grad_overflow";
    const bool device = handed.name.ends_with(".device") || handed.name.ends_with("nvme_path");
    EXPECT_TRUE(device || handed.assumed != said) << handed.name;
  }
  EXPECT_EQ(its.given["dump_state"], true);
}

TEST(DeepSpeedScript, StateIsInMemoryOrInADirectory) {
  const auto placement = [](const std::string& offload) {
    return values(read(R"("zero_optimization": {"stage": 2)" + offload + "}").settings)
        .at("placement");
  };
  EXPECT_EQ(placement(""), "\"host\"");
  EXPECT_EQ(placement(R"(, "offload_optimizer": {"device": "cpu"})"), "\"host\"");
  EXPECT_EQ(placement(R"(, "cpu_offload": true)"), "\"host\"");
  EXPECT_EQ(placement(R"(, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"})"),
            "\"nvme:/n\"");
  EXPECT_THAT(script_refusal(R"("zero_optimization": {"offload_optimizer": {"device": "nvme"}})"),
              HasSubstr("offload_optimizer.nvme_path\" is missing"));
  EXPECT_EQ(values(read(R"("placement": "nvme:/m")").settings).at("placement"), "\"nvme:/m\"");
}

TEST(DeepSpeedScript, ParametersAreOffloadedInStageThreeAlone) {
  const auto notes = [](const char* zero) { return read(zero).notes; };
  const auto unused = Contains(HasSubstr("parameters are offloaded in stage 3 alone"));
  EXPECT_THAT(notes(R"("zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}})"),
              Not(unused));
  EXPECT_THAT(notes(R"("zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}})"),
              unused);
  EXPECT_THAT(notes(R"("zero_optimization": {"offload_param": {"device": "nvme"}})"), unused);
  EXPECT_THAT(notes(R"("zero_optimization": {"offload_param": {"device": "none"}})"), Not(unused));
}

TEST(DeepSpeedScript, AutoIsDroppedWhereDeepSpeedDropsIt) {
  const ConfigFile its = read(R"("zero_optimization": {"stage": "auto"},
                                 "csv_monitor": {"job_name": "auto"}, "fp16": {"enabled": "auto"})");
  EXPECT_THAT(values(its.settings),
              IsSupersetOf({Pair("zero_stage", "0"), Pair("dtype", "\"fp32\"")}));
  EXPECT_THAT(values(its.handed), Contains(Pair("csv_monitor.job_name", "\"DeepSpeedJobName\"")));
  for (const char* more : {R"("gradient_clipping": "auto")", R"("aio": {"queue_depth": "auto"})",
                           R"("optimizer": {"type": "AdamW", "params": {"lr": "auto"}})"})
    EXPECT_THAT(script_refusal(more), HasSubstr("is \"auto\": give a value")) << more;
}

TEST(DeepSpeedScript, SchedulesAreDeepSpeedsFiveWithWhatTheyNeed) {
  EXPECT_THAT(script_refusal(R"("scheduler": {"type": "StepLR"})"), HasSubstr("WarmupCosineLR"));
  EXPECT_THAT(script_refusal(R"("scheduler": {"type": "OneCycle"})"),
              HasSubstr("\"scheduler.params.cycle_min_lr\" is missing"));
  const std::string both = R"("optimizer": {"type": "Adam", "params": {"lr": 0.5}},
                              "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}})";
  EXPECT_THAT(values(read(both).settings),
              IsSupersetOf({Pair("lr", "0.5"), Pair("warmup_max_lr", "0.25")}))
      << "the optimizer is made with its own";
}

TEST(DeepSpeedScript, AKeyNearOursIsRefusedAndAnotherOneNamed) {
  EXPECT_THAT(script_refusal(R"("host_memry": 1)"), HasSubstr("did you mean \"host_memory\"?"));
  EXPECT_THAT(read(R"("comms_config": {})").notes,
              Contains(HasSubstr("neither Ziggurat nor DeepSpeed has this key")));
  EXPECT_THAT(script_refusal(R"("optimizer": "adamw")"),
              HasSubstr("\"optimizer\" must be an object"));
}

TEST(DeepSpeedScript, WhatIsNotEnabledMayBeSaid) {
  EXPECT_NO_THROW(
      read(R"("data_efficiency": {"enabled": false, "seed": 3}, "expert_parallel": {})"));
  EXPECT_THAT(script_refusal(R"("data_efficiency": {"enabled": true})"),
              HasSubstr("data_efficiency"));
}

TEST(DeepSpeedScript, TheParametersTypeIsTheOneThatIsEnabled) {
  EXPECT_NO_THROW(
      read(R"("bf16": {"enabled": true}, "data_types": {"param_dtype": "torch.bfloat16"})"));
  EXPECT_THAT(script_refusal(R"("data_types": {"param_dtype": "half"})"),
              HasSubstr("the model is in fp32"));
}

}  // namespace
}  // namespace ziggurat

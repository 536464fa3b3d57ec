// SPDX-License-Identifier: Apache-2.0
// tests/integrations/deepspeed_config_test.cc: what files in DeepSpeed's words, ours or both mean
// to the command and to a training script, case by case as in deepspeed_cases.json; and how their
// text is read.
//
// A case has a "config", or "more" beside a micro-batch of 2, and for "both" readers, the "command"
// or the "script" the settings that there must be (null: must not be) or words of the refusal. That
// its values are DeepSpeed's own is for python/deepspeed_config_test.py, which asks it.
#include <gmock/gmock.h>

#include <fstream>
#include <map>
#include <set>

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

using Settings = std::map<std::string, std::string>;

/// Flags given, our defaults and the settings that there are.
ConfigContext command(const Settings& flags = {}, int launched = 1) {
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

ConfigContext script(int launched = 1) {
  ConfigContext its;
  its.script = true;
  its.launched_ranks = launched;
  its.names = {"placement", "host_memory"};
  return its;
}

json values(const std::vector<ConfigSetting>& settings) {
  json all = json::object();
  for (const ConfigSetting& setting : settings) all[setting.name] = setting.value;
  return all;
}
json settings(const std::string& text) {
  return values(read_config(text, "ds.json", command()).settings);
}

std::string refusal(const std::string& text, const ConfigContext& with = command()) {
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

/// One text or several.
std::vector<std::string> words(const json& one, const std::string& key) {
  if (!one.contains(key)) return {};
  if (one[key].is_string()) return {one[key].get<std::string>()};
  return one[key].get<std::vector<std::string>>();
}

std::string text_of(const json& one) {
  if (one.contains("config")) return one["config"].dump();
  json config = one["more"];
  config["train_micro_batch_size_per_gpu"] = 2;
  return config.dump();
}

/// What `reader` makes of the case; nothing where the case does not say.
void expect_meaning(const json& one, const std::string& reader, const ConfigContext& context) {
  SCOPED_TRACE(reader);
  std::vector<std::string> refused = words(one, "refused");
  if (refused.empty()) refused = words(one, reader + "_refused");
  if (!refused.empty()) {
    const std::string said = refusal(text_of(one), context);
    for (const std::string& word : refused) EXPECT_THAT(said, HasSubstr(word));
    return;
  }
  json expected = one.value("both", json());
  if (one.contains(reader)) expected = one[reader];
  if (expected.is_null()) return;
  const ConfigFile file = read_config(text_of(one), "ds.json", context);
  const json found = values(file.settings);
  for (const auto& [name, value] : expected.items()) {
    if (value.is_null()) {
      EXPECT_FALSE(found.contains(name)) << name << " is " << found[name];
    } else {
      EXPECT_EQ(found.value(name, json()), value) << name;
    }
  }
  for (const std::string& key : {std::string("notes"), reader + "_notes"})
    for (const std::string& word : words(one, key))
      EXPECT_THAT(file.notes, Contains(HasSubstr(word)));
}

TEST(DeepSpeedConfig, MeansWhatTheTableSays) {
  const json cases =
      json::parse(std::ifstream(ZIGGURAT_SOURCE_DIR "/tests/integrations/deepspeed_cases.json"));
  ASSERT_GT(cases.size(), 100U);
  // The last three are for the Python tests alone.
  const std::set<std::string> known{
      "what",          "config",       "more",      "flags",           "ranks",          "both",
      "command",       "script",       "refused",   "command_refused", "script_refused", "notes",
      "command_notes", "script_notes", "deepspeed", "left_out",        "engine_refuses"};
  for (const json& one : cases) {
    SCOPED_TRACE(one["what"].get<std::string>() + ": " + text_of(one));
    for (const auto& [key, unused] : one.items())
      EXPECT_TRUE(known.contains(key)) << key << " is read by nobody";
    const int ranks = one.value("ranks", 1);
    expect_meaning(one, "command", command(one.value("flags", Settings()), ranks));
    if (!one.contains("flags")) expect_meaning(one, "script", script(ranks));
  }
}

TEST(DeepSpeedConfig, AFlatFileIsGivenAsItIs) {
  EXPECT_EQ(settings(R"({"steps": 9, "optimizer": "lion", "lr": 1e-3, "zero-stage": 3})"),
            json::parse(R"({"steps": 9, "optimizer": "lion", "lr": 1e-3, "zero_stage": 3})"));
}

TEST(DeepSpeedConfig, WhatIsAbsentIsAsInDeepSpeedAndNotWhatTheFileSays) {
  const ConfigFile file = read_config(with_batch(""), "ds.json", command());
  EXPECT_EQ(values(file.settings), json::parse(R"({
      "batch": 2, "accumulate": 1, "clip": 1.0, "dtype": "fp32", "zero_stage": 0,
      "placement": "params=device,grads=device,optimizer=device",
      "reduce_bucket_size": 500000000, "prefetch_bucket_size": 50000000,
      "max_live_parameters": 1000000000, "max_reuse_distance": 1000000000,
      "param_persistence_threshold": 100000})"));
  EXPECT_THAT(file.notes, Contains(HasSubstr("\"optimizer\" is missing")));
  for (const ConfigSetting& setting : file.settings)
    EXPECT_EQ(setting.assumed, setting.name != "batch") << setting.name;
}

TEST(DeepSpeedConfig, NullIsAsIfTheKeyWereAbsent) {
  EXPECT_EQ(settings(with_batch(R"("gradient_clipping": null, "communication_data_type": null,
                                   "scheduler": null, "steps_per_print": Infinity)")),
            settings(with_batch("")));
}

TEST(DeepSpeedConfig, AMachineProfilesAioIsNoDeepSpeedConfig) {
  EXPECT_EQ(settings(R"({"steps": 3, "aio": {"queue_depth": 8}})"), (json{{"steps", 3}}));
}

TEST(DeepSpeedConfig, CommentsAreReadOverAndHostileTextIsRefused) {
  EXPECT_EQ(settings("{\"steps\": 9,  // a line\n\"lr\": 1, /* some */ # and Hjson's\n}"),
            (json{{"steps", 9}, {"lr", 1}}));
  EXPECT_EQ(settings(R"({"store": "a # b, // c,}"})"), (json{{"store", "a # b, // c,}"}}));
  EXPECT_THAT(refusal("{\"x\": " + std::string(100'000, '[')), HasSubstr("nested"));
  EXPECT_THAT(refusal(R"({"fp16": {"enabled": true, "enabled": false}})"), HasSubstr("twice"));
  EXPECT_THAT(refusal("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal("// only a comment"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("{\"a\": \"#,}"), HasSubstr("not JSON"));
}

ConfigFile read_for_script(const std::string& more) {
  return read_config(with_batch(more), "ds.json", script());
}

TEST(DeepSpeedScript, WhatItHonoursIsHandedWithDeepSpeedsDefaults) {
  const ConfigFile its = read_for_script(R"("dump_state": true,
      "wandb": {"enabled": true, "team": "t"}, "bf16": {"check_grad_overflow": false},
      "csv_monitor": {"job_name": "auto"})");
  const std::map<std::string, json> handed = values(its.handed);
  EXPECT_THAT(handed,
              IsSupersetOf({Pair("dump_state", json(true)), Pair("wandb.team", json("t")),
                            Pair("wandb.project", json("deepspeed")),
                            Pair("bf16.check_grad_overflow", json(false)),
                            Pair("steps_per_print", json()), Pair("aio.queue_depth", json(8)),
                            Pair("csv_monitor.job_name", json("DeepSpeedJobName"))}));
  for (const ConfigSetting& one : its.handed) {
    const bool said = one.name == "dump_state" || one.name == "wandb.enabled" ||
                      one.name == "wandb.team" || one.name == "bf16.check_grad_overflow";
    const bool device = one.name.ends_with(".device") || one.name.ends_with("nvme_path");
    EXPECT_TRUE(device || one.assumed != said) << one.name;
  }
  EXPECT_EQ(its.given["dump_state"], true);
}

TEST(DeepSpeedScript, ParametersAreOffloadedInStageThreeAlone) {
  const auto notes = [](const char* zero) { return read_for_script(zero).notes; };
  const auto unused = Contains(HasSubstr("parameters are offloaded in stage 3 alone"));
  EXPECT_THAT(notes(R"("zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}})"),
              Not(unused));
  EXPECT_THAT(notes(R"("zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}})"),
              unused);
  EXPECT_THAT(notes(R"("zero_optimization": {"offload_param": {"device": "nvme"}})"), unused);
  EXPECT_THAT(notes(R"("zero_optimization": {"offload_param": {"device": "none"}})"), Not(unused));
}

}  // namespace
}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_settings_test.cc: flags and settings files mean the same, and nonsense is
// named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <regex>
#include <set>

#include "base/bytes.h"
#include "integrations/cli/flag_words.h"
#include "integrations/cli/settings.h"
#include "integrations/cli/store_paths.h"
#include "integrations/cli/train_options.h"

namespace ziggurat::cli {
namespace cli_settings_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

Settings defaults() {
  Settings settings(train_settings());
  settings.apply_flag("data", "text");
  settings.apply_flag("store", "state");
  return settings;
}

std::string complaint(const std::function<void()>& action) {
  try {
    action();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

std::string complaint_about(const std::string& key, const std::string& value) {
  Settings settings = defaults();
  settings.apply_flag(key, value);
  return complaint([&] { read_train_options(settings); });
}

TEST(CliSettings, DefaultsAreTheDemos) {
  const TrainOptions options = read_train_options(defaults());
  EXPECT_EQ(options.model, gpt::parse_model("gpt2-small"));
  EXPECT_EQ(options.steps, 60U);
  EXPECT_EQ(options.shape.tokens_per_step(), 2048);
  const auto* schedule = std::get_if<ConstantSchedule>(&options.schedule.schedule);
  ASSERT_NE(schedule, nullptr);
  EXPECT_EQ(schedule->lr, 6e-4);
  EXPECT_EQ(schedule->warmup, 10U);
  EXPECT_TRUE(options.engine.param_groups.empty());
  EXPECT_EQ(options.engine.optimizer.beta2, 0.95F);
  EXPECT_EQ(options.engine.clip_norm, 1.0);
  EXPECT_EQ(options.device_bytes, 160 * kMiB);
  EXPECT_EQ(options.engine.host_budget_bytes, 384 * kMiB);
  EXPECT_EQ(options.engine.placement.optimizer, Tier::kNvme);
  EXPECT_EQ(options.engine.slots, 2);
}

TEST(CliSettings, AFileSaysWhatFlagsSay) {
  Settings from_flags = defaults();
  for (const auto& [key, value] : std::map<std::string, std::string>{{"model", "2x64x2"},
                                                                     {"lr", "0.001"},
                                                                     {"betas", "0.8,0.9"},
                                                                     {"device-memory", "8MiB"},
                                                                     {"host-memory", "16777216"},
                                                                     {"print-loss-bits", "true"},
                                                                     {"steps", "7"}}) {
    from_flags.apply_flag(key, value);
  }
  Settings from_file = defaults();
  from_file.apply_json(
      R"({"model": "2x64x2", "lr": 1e-3, "betas": [0.8, 0.9], "device-memory": "8MiB",
                           "host-memory": 16777216, "print-loss-bits": true, "steps": 7})",
      "run.json");
  const TrainOptions a = read_train_options(from_flags);
  const TrainOptions b = read_train_options(from_file);
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.schedule.parameters, b.schedule.parameters);
  EXPECT_EQ(a.engine.optimizer.beta1, b.engine.optimizer.beta1);
  EXPECT_EQ(a.engine.optimizer.beta2, b.engine.optimizer.beta2);
  EXPECT_EQ(a.device_bytes, b.device_bytes);
  EXPECT_EQ(a.engine.host_budget_bytes, b.engine.host_budget_bytes);
  EXPECT_EQ(a.print_loss_bits, b.print_loss_bits);
  EXPECT_EQ(a.steps, b.steps);
}

TEST(CliSettings, FlagsWinOverTheFileInEitherOrder) {
  for (const bool flag_first : {true, false}) {
    Settings settings = defaults();
    if (flag_first) settings.apply_flag("steps", "5");
    settings.apply_json(R"({"steps": 9, "batch": 3})", "run.json");
    if (!flag_first) settings.apply_flag("steps", "5");
    EXPECT_EQ(read_train_options(settings).steps, 5U);
    EXPECT_EQ(read_train_options(settings).shape.batch, 3);
  }
}

// The same run in DeepSpeed's words and in ours.
TEST(CliSettings, AFileMayBeDeepSpeeds) {
  Settings theirs = defaults();
  theirs.apply_json(R"({
    "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
    "fp16": {"enabled": true, "initial_scale_power": 12},
    "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": true,
                          "offload_optimizer": {"device": "cpu"}}})",
                    "ds.json");
  Settings ours = defaults();
  ours.apply_json(R"({"batch": 3, "accumulate": 2, "clip": 0.5, "dtype": "fp16",
    "initial-scale-power": 12, "optimizer": "lion", "lr": 1e-4, "betas": [0.9, 0.99],
    "schedule": "WarmupLR", "warmup-num-steps": 7, "warmup-type": "linear",
    "zero-stage": 3, "reduce-bucket-size": 500000000,
    "placement": "params=device,grads=host,optimizer=host"})",
                  "run.json");
  const TrainOptions a = read_train_options(theirs);
  const TrainOptions b = read_train_options(ours);
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.shape.batch, b.shape.batch);
  EXPECT_EQ(a.shape.accumulate, b.shape.accumulate);
  EXPECT_EQ(a.engine.clip_norm, b.engine.clip_norm);
  EXPECT_EQ(a.engine.optimizer.state, b.engine.optimizer.state);
  EXPECT_EQ(a.engine.optimizer.beta2, b.engine.optimizer.beta2);
  EXPECT_EQ(a.schedule.parameters, b.schedule.parameters);
  EXPECT_EQ(a.loss_scale.parameters, b.loss_scale.parameters);
  EXPECT_EQ(to_string(a.engine.placement), to_string(b.engine.placement));
  EXPECT_EQ(a.engine.strategy.zero_stage, b.engine.strategy.zero_stage);
  EXPECT_EQ(a.engine.reduce_bucket_elements, b.engine.reduce_bucket_elements);
  EXPECT_THAT(theirs.notes(), ::testing::ElementsAre(HasSubstr("zero_optimization.overlap_comm")));
  EXPECT_THAT(complaint([&] {
                Settings wrong = defaults();
                wrong.apply_json(R"({"train_micro_batch_size_per_gpu": 0})", "ds.json");
                read_train_options(wrong);
              }),
              HasSubstr("\"train_micro_batch_size_per_gpu\" is 0"));
}

TEST(CliSettings, EveryKeyCanBeInTheFile) {
  for (const Setting& setting : train_settings()) {
    Settings settings(train_settings());
    const char* value = "null";
    EXPECT_THAT(complaint([&] {
                  settings.apply_json("{\"" + dashed(setting.name) + "\": " + value + "}",
                                      "run.json");
                }),
                AllOf(HasSubstr("\"" + dashed(setting.name) + "\""), HasSubstr("must be")));
  }
}

TEST(CliSettings, NonsenseIsNamedWithFlagValueAndWhatWouldDo) {
  EXPECT_THAT(complaint_about("batch", "0"), AllOf(HasSubstr("--batch 0"), HasSubstr("1 to")));
  EXPECT_THAT(complaint_about("batch", "two"),
              AllOf(HasSubstr("--batch two"), HasSubstr("whole number")));
  EXPECT_THAT(complaint_about("batch", "2.5"), HasSubstr("--batch 2.5"));
  EXPECT_THAT(complaint_about("batch", "99999999999999999999"), HasSubstr("--batch"));
  EXPECT_THAT(complaint_about("lr", "nan"), HasSubstr("--lr nan"));
  EXPECT_THAT(complaint_about("lr", "-1"), HasSubstr("--lr -1"));
  EXPECT_THAT(complaint_about("lr", "1e-3x"), HasSubstr("not a number"));
  EXPECT_THAT(complaint_about("betas", "0.9"),
              AllOf(HasSubstr("--betas 0.9"), HasSubstr("give 2")));
  EXPECT_THAT(complaint_about("betas", "0.9,1"), HasSubstr("--betas"));
  EXPECT_THAT(complaint_about("device-memory", "lots"),
              AllOf(HasSubstr("--device-memory lots"), HasSubstr("160MiB")));
  EXPECT_THAT(complaint_about("device-memory", "12"), HasSubstr("too small"));
  EXPECT_THAT(complaint_about("host-memory", "-3GiB"), HasSubstr("--host-memory -3GiB"));
  EXPECT_THAT(complaint_about("slots", "3"), AllOf(HasSubstr("--slots 3"), HasSubstr("1 to 2")));
  EXPECT_THAT(complaint_about("resume", "maybe"),
              AllOf(HasSubstr("--resume maybe"), HasSubstr("auto, never")));
  EXPECT_THAT(complaint_about("optimizer", "adamax"),
              AllOf(HasSubstr("--optimizer adamax"), HasSubstr("adamw, adam, lion")));
  EXPECT_THAT(complaint_about("state-format", "4bit"),
              AllOf(HasSubstr("--state-format 4bit"), HasSubstr("8bit, split")));
  EXPECT_THAT(complaint_about("model", "huge"), HasSubstr("--model huge"));
  EXPECT_THAT(complaint_about("placement", "params=moon"), HasSubstr("moon"));
  EXPECT_THAT(complaint_about("context", "100000"), HasSubstr("--context 100000"));
  EXPECT_THAT(complaint_about("data", ""), HasSubstr("--data"));
  EXPECT_THAT(complaint([] { read_train_options(Settings(train_settings())); }),
              HasSubstr("--data is missing"));
}

TEST(CliSettings, OptimizerAndFormatAreReadAndMustGoTogether) {
  Settings settings = defaults();
  settings.apply_json(R"({"optimizer": "lion", "state-format": "bf16", "rounding": "stochastic"})",
                      "run.json");
  settings.apply_flag("seed", "9");
  const OptimizerConfig optimizer = read_train_options(settings).engine.optimizer;
  EXPECT_EQ(optimizer.state, (StateKind{OptimizerKind::kLion, StateFormat::kBf16}));
  EXPECT_EQ(optimizer.state_rounding, Rounding::kStochastic);
  EXPECT_EQ(optimizer.param_rounding, Rounding::kStochastic);
  EXPECT_EQ(optimizer.rounding_seed, 9U);
  settings.apply_flag("state-format", "split");
  EXPECT_THAT(complaint([&] { read_train_options(settings); }),
              AllOf(HasSubstr("--state-format split"), HasSubstr("stochastic")));
}

TEST(CliSettings, AFilesMistakesAreNamedByFileAndKey) {
  const auto about = [](const std::string& json) {
    Settings settings = defaults();
    return complaint([&] {
      settings.apply_json(json, "run.json");
      read_train_options(settings);
    });
  };
  EXPECT_THAT(about(R"({"stepz": 3})"),
              AllOf(HasSubstr("run.json"), HasSubstr("\"stepz\""), HasSubstr("\"steps\"")));
  EXPECT_THAT(about(R"({"steps": "3"})"), AllOf(HasSubstr("\"steps\""), HasSubstr("whole number")));
  EXPECT_THAT(about(R"({"steps": 3.5})"), HasSubstr("\"steps\""));
  EXPECT_THAT(about(R"({"betas": [0.9, "x"]})"), HasSubstr("\"betas\""));
  EXPECT_THAT(about(R"({"print-loss-bits": 1})"), HasSubstr("true or false"));
  EXPECT_THAT(about(R"({"steps": 3, "steps": 4})"), HasSubstr("twice"));
  EXPECT_THAT(about(R"({"batch": 0})"), AllOf(HasSubstr("\"batch\" in run.json"), HasSubstr("0")));
  EXPECT_THAT(about("[1, 2]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(about("{\"steps\": "), HasSubstr("not JSON"));
  EXPECT_THAT(about(""), HasSubstr("not JSON"));
  EXPECT_THAT(about("{\"x\": " + std::string(100'000, '[')), HasSubstr("nested"));
}

// Whatever is in the file, the answer is settings or a usage error: nothing else, and no crash.
TEST(CliSettings, AnyBytesAreSettingsOrAUsageError) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::string good =
      R"({"model": "2x64x2", "lr": 1e-3, "betas": [0.8, 0.9], "device-memory": "8MiB", "steps": 7})";
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    for (unsigned edits = 1 + random() % 6; edits > 0; --edits) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0: text[at] = static_cast<char>(random()); break;
        case 1: text.erase(at, 1 + random() % 5); break;
        default: text.insert(at, text.substr(random() % text.size(), 10));
      }
      if (text.empty()) text = "{";
    }
    Settings settings = defaults();
    try {
      settings.apply_json(text, "run.json");
      read_train_options(settings);
    } catch (const UsageError&) {
    }
  }
}

TrainOptions with(const std::map<std::string, std::string>& flags) {
  Settings settings = defaults();
  for (const auto& [key, value] : flags) settings.apply_flag(key, value);
  return read_train_options(settings);
}

std::string complaint_of(const std::map<std::string, std::string>& flags) {
  return complaint([&] { with(flags); });
}

TEST(CliSchedule, TakesItsParametersAndFillsInTheRest) {
  const auto decay = std::get<WarmupDecayLR>(
      with({{"schedule", "WarmupDecayLR"}, {"warmup-num-steps", "20"}, {"steps", "77"}})
          .schedule.schedule);
  EXPECT_EQ(decay.warmup.warmup_num_steps, 20U);
  EXPECT_EQ(decay.warmup.warmup_max_lr, 0.001) << "DeepSpeed's default";
  EXPECT_EQ(decay.warmup.warmup_type, WarmupType::kLog);
  EXPECT_EQ(decay.total_num_steps, 77U) << "--steps";

  const auto warmup =
      std::get<WarmupLR>(with({{"schedule", "WarmupLR"}, {"lr", "0.5"}}).schedule.schedule);
  EXPECT_EQ(warmup.warmup_max_lr, 0.5) << "the optimizer's rate";

  const auto cycle = std::get<OneCycle>(with({{"schedule", "OneCycle"},
                                              {"cycle-min-lr", "0.1"},
                                              {"cycle-max-lr", "0.2"},
                                              {"cycle-first-step-size", "5"},
                                              {"cycle-momentum", "false"}})
                                            .schedule.schedule);
  EXPECT_EQ(cycle.cycle_second_step_size, 5U) << "as many as the first";
  EXPECT_FALSE(cycle.cycle_momentum);
}

TEST(CliSchedule, AFileSaysWhatFlagsSay) {
  Settings settings = defaults();
  settings.apply_json(R"({"schedule": "OneCycle", "cycle-min-lr": 0.1, "cycle-max-lr": 0.2,
                          "cycle-momentum": false, "cycle-first-step-size": 9})",
                      "run.json");
  EXPECT_EQ(read_train_options(settings).schedule.parameters, with({{"schedule", "OneCycle"},
                                                                    {"cycle-min-lr", "0.1"},
                                                                    {"cycle-max-lr", "0.2"},
                                                                    {"cycle-momentum", "false"},
                                                                    {"cycle-first-step-size", "9"}})
                                                                  .schedule.parameters);
}

TEST(CliSchedule, MistakesAreOneLineThatListsWhatThereIs) {
  EXPECT_THAT(complaint_of({{"schedule", "warmuplr"}}),
              AllOf(HasSubstr("--schedule warmuplr"), HasSubstr("constant, cosine, WarmupLR, "),
                    HasSubstr("LRRangeTest")));
  EXPECT_THAT(complaint_of({{"schedule", "OneCycle"}, {"cycle-max-lr", "1"}}),
              HasSubstr("--cycle-min-lr is missing"));
  EXPECT_THAT(complaint_of({{"schedule", "cosine"}, {"cycle-min-lr", "1"}}),
              AllOf(HasSubstr("--cycle-min-lr 1"), HasSubstr("cosine has no such parameter"),
                    HasSubstr("lr, min-lr, total-num-steps, warmup")));
  EXPECT_THAT(complaint_of({{"schedule", "WarmupLR"}, {"lr", "1"}, {"warmup-max-lr", "1"}}),
              AllOf(HasSubstr("--lr 1"), HasSubstr("no such parameter")));
  EXPECT_THAT(complaint_of({{"schedule", "WarmupLR"}, {"warmup-num-steps", "0"}}),
              HasSubstr("--warmup-num-steps 0"));
  EXPECT_THAT(complaint_of({{"schedule", "WarmupLR"}, {"warmup-type", "cubic"}}),
              AllOf(HasSubstr("--warmup-type cubic"), HasSubstr("log, linear")));
  EXPECT_THAT(complaint_of({{"schedule", "OneCycle"},
                            {"cycle-min-lr", "1"},
                            {"cycle-max-lr", "1"},
                            {"cycle-first-step-size", "2"},
                            {"decay-step-size", "1"},
                            {"decay-mom-rate", "0.1"}}),
              AllOf(HasSubstr("--decay-mom-rate 0.1"), HasSubstr("at step 60")));
}

TEST(CliDtype, Fp16ComesWithADynamicLossScaleAndTheOthersWithNone) {
  for (const char* dtype : {"bf16", "fp32"}) {
    Settings settings = defaults();
    settings.apply_flag("dtype", dtype);
    const TrainOptions options = read_train_options(settings);
    EXPECT_EQ(to_string(options.model.dtype), dtype);
    EXPECT_FALSE(options.loss_scale.config.has_value());
    EXPECT_TRUE(options.loss_scale.parameters.empty());
  }
  Settings settings = defaults();
  settings.apply_flag("dtype", "fp16");
  const auto scale = read_train_options(settings).loss_scale.config;
  ASSERT_TRUE(scale.has_value());
  EXPECT_EQ(LossScaler(*scale).scale(), 65536);
  EXPECT_TRUE(LossScaler(*scale).dynamic());
  EXPECT_EQ(scale->loss_scale_window, 1000U);
  EXPECT_EQ(scale->hysteresis, 2U);
}

TEST(CliDtype, TheLossScaleTakesDeepSpeedsParametersFromFlagsOrAFile) {
  Settings settings = defaults();
  settings.apply_json(
      R"({"dtype": "fp16", "initial-scale-power": 10, "loss-scale-window": 7, "hysteresis": 3,
          "consecutive-hysteresis": true, "min-loss-scale": 0.5})",
      "run.json");
  LossScaleConfig scale = *read_train_options(settings).loss_scale.config;
  EXPECT_EQ(LossScaler(scale).scale(), 1024);
  EXPECT_EQ(scale.loss_scale_window, 7U);
  EXPECT_EQ(scale.hysteresis, 3U);
  EXPECT_TRUE(scale.consecutive_hysteresis);
  EXPECT_EQ(scale.min_loss_scale, 0.5);
  settings.apply_flag("loss-scale", "128");
  scale = *read_train_options(settings).loss_scale.config;
  EXPECT_EQ(LossScaler(scale).scale(), 128);
  EXPECT_FALSE(LossScaler(scale).dynamic());
}

TEST(CliDtype, MistakesAreNamed) {
  EXPECT_THAT(complaint_about("dtype", "fp8"), HasSubstr("bf16, fp16, fp32"));
  EXPECT_THAT(complaint_about("loss-scale", "1024"),
              AllOf(HasSubstr("--loss-scale 1024"), HasSubstr("--dtype fp16")));
  const auto of_fp16 = [](const std::string& key, const std::string& value) {
    Settings settings = defaults();
    settings.apply_flag("dtype", "fp16");
    settings.apply_flag(key, value);
    return complaint([&] { read_train_options(settings); });
  };
  EXPECT_THAT(of_fp16("hysteresis", "0"), HasSubstr("--hysteresis 0"));
  EXPECT_THAT(of_fp16("initial-scale-power", "127"), HasSubstr("0 to 126"));
  EXPECT_THAT(of_fp16("min-loss-scale", "0"), HasSubstr("min_loss_scale 0"));
}

TEST(CliGroups, AreReadFromAFlagOrAFile) {
  const auto check = [](const std::vector<ParamGroup>& groups) {
    ASSERT_EQ(groups.size(), 2U);
    EXPECT_EQ(groups[0].params, "h.0.*");
    EXPECT_EQ(groups[0].lr_scale, 0.5F);
    EXPECT_EQ(groups[0].beta2, 0.99F);
    EXPECT_EQ(groups[0].weight_decay, std::nullopt);
    EXPECT_EQ(groups[1].params, "*bias");
    EXPECT_EQ(groups[1].weight_decay, 0.25F);
    EXPECT_EQ(groups[1].eps, 1e-6F);
  };
  check(with({{"param-groups", "h.0.*:lr-scale=0.5,beta2=0.99;*bias:weight-decay=0.25,eps=1e-6"}})
            .engine.param_groups);
  Settings settings = defaults();
  settings.apply_json(R"({"param-groups": [{"params": "h.0.*", "lr-scale": 0.5, "beta2": 0.99},
                          {"params": "*bias", "weight-decay": 0.25, "eps": 1e-6}]})",
                      "run.json");
  check(read_train_options(settings).engine.param_groups);
  EXPECT_TRUE(
      with({{"param-groups", "wte.*:frozen;h.0.*:lr-scale=0.5"}}).engine.param_groups[0].frozen);
  Settings frozen = defaults();
  frozen.apply_json(R"({"param-groups": [{"params": "wte.*", "frozen": true}]})", "run.json");
  EXPECT_TRUE(read_train_options(frozen).engine.param_groups[0].frozen);
}

TEST(CliGroups, MistakesAreNamed) {
  const auto about = [](const std::string& groups) {
    return complaint_of({{"param-groups", groups}});
  };
  EXPECT_THAT(about("wte.weight"), HasSubstr("PATTERN:KEY=VALUE"));
  EXPECT_THAT(about("wte.weight:frozen=2"), HasSubstr("'frozen=2'"));
  EXPECT_THAT(about("wte.weight:lr=1"), AllOf(HasSubstr("'lr=1'"), HasSubstr("lr-scale")));
  EXPECT_THAT(about("wte.weight:lr-scale=x"), HasSubstr("'lr-scale=x'"));
  EXPECT_THAT(about("wte.weight:lr-scale=-1"), HasSubstr("lr-scale -1"));
  EXPECT_THAT(about("wte.weight:beta1=1"), HasSubstr("beta1 1"));
  EXPECT_THAT(about("layers.*:lr-scale=2"),
              AllOf(HasSubstr("'layers.*'"), HasSubstr("no parameter"), HasSubstr("wte.weight")));
  EXPECT_THAT(about("*:lr-scale=2;wte.*:lr-scale=3"),
              AllOf(HasSubstr("'wte.*'"), HasSubstr("first group")));
  Settings settings = defaults();
  EXPECT_THAT(
      complaint([&] { settings.apply_json(R"({"param-groups": [{"lr-scale": 2}]})", "run.json"); }),
      AllOf(HasSubstr("\"param-groups\""), HasSubstr("must be a list of groups")));
}

TEST(CliSettings, WhatALibraryCallsASettingIsSaidAsItsFlag) {
  EXPECT_EQ(in_flags("`zero_stage=3` needs `params=host`"), "--zero-stage 3 needs `params=host`");
  EXPECT_EQ(in_flags("give a larger `host_memory`"), "give a larger --host-memory");
  EXPECT_EQ(in_flags("`allow_raw_device` reads it"), "--allow-raw-device reads it");
  EXPECT_EQ(in_flags("try `ziggurat plan`"), "try `ziggurat plan`");
  EXPECT_EQ(in_flags("a quote ` alone"), "a quote ` alone");
  EXPECT_EQ(in_flags(""), "");
}

/// The words between backticks in the strings of a source, without comments.
std::set<std::string> quoted_words(const std::filesystem::path& source) {
  std::ifstream file(source);
  std::string strings;
  for (std::string line; std::getline(file, line);) {
    const std::size_t comment = line.find("//");
    if (comment != std::string::npos) line.resize(comment);
    static const std::regex kString(R"re("((?:[^"\\]|\\.)*)")re");
    for (auto at = std::sregex_iterator(line.begin(), line.end(), kString);
         at != std::sregex_iterator(); ++at)
      strings += (*at)[1];  // a message goes on in the next line's
  }
  std::set<std::string> words;
  static const std::regex kQuoted("`([^`]*)`");
  for (auto at = std::sregex_iterator(strings.begin(), strings.end(), kQuoted);
       at != std::sregex_iterator(); ++at)
    words.insert((*at)[1]);
  return words;
}

// Libraries name settings; whoever reads a message of the command has flags.
TEST(CliSettings, EveryWordThatALibraryQuotesIsAFlagOrACommand) {
  namespace fs = std::filesystem;
  const std::set<std::string> others{"run", "first_elements",
                                     "pieces",  // a trainer's that lends its memory
                                     "ulimit -l unlimited"};
  std::size_t seen = 0;
  for (const char* const folder : {"base", "aio", "tiers", "optimizer", "collectives", "core",
                                   "integrations/gpt", "integrations/measure"}) {
    for (const auto& entry :
         fs::recursive_directory_iterator(fs::path(ZIGGURAT_SOURCE_DIR) / folder)) {
      const std::string name = entry.path().filename().string();
      if (!name.ends_with(".cc") && !name.ends_with(".h")) continue;
      for (const std::string& word : quoted_words(entry.path())) {
        if (word.starts_with("ziggurat ") || word.starts_with("{") || others.contains(word))
          continue;
        ++seen;
        EXPECT_THAT(in_flags("`" + word + "`"), ::testing::StartsWith("--")) << name;
      }
    }
  }
  EXPECT_GT(seen, 50U);
}

/// The notes of a run with these flags.
std::vector<std::string> notes_with(const std::map<std::string, std::string>& flags) {
  Settings settings = defaults();
  for (const auto& [key, value] : flags) settings.apply_flag(key, value);
  return notes_of(settings, read_train_options(settings));
}

TEST(CliSettings, WhatIsGivenAndChangesNothingIsNoted) {
  using ::testing::ElementsAre;
  using ::testing::IsEmpty;
  EXPECT_THAT(notes_with({}), IsEmpty());
  EXPECT_THAT(notes_with({{"reduce-dtype", "fp32"}}),
              ElementsAre(AllOf(HasSubstr("reduce-dtype"), HasSubstr("one data-parallel rank"))));
  EXPECT_THAT(notes_with({{"collectives", "mpi"}}),
              ElementsAre(AllOf(HasSubstr("collectives"), HasSubstr("with one rank"))));
  const std::map<std::string, std::string> loading{{"max-live-parameters", "1000000"}};
  EXPECT_THAT(notes_with(loading), IsEmpty());
  auto on_device = loading;
  on_device["placement"] = "params=device,grads=host,optimizer=nvme";
  EXPECT_THAT(notes_with(on_device),
              ElementsAre(AllOf(HasSubstr("max-live-parameters"), HasSubstr("on the device"))));
}

TEST(CliSettings, TheClosestWordIsOfferedOnlyIfItIsClose) {
  const std::vector<std::string> words{"--batch", "--steps", "--store"};
  EXPECT_EQ(closest("--bach", words), "--batch");
  EXPECT_EQ(closest("--stor", words), "--store");
  EXPECT_EQ(closest("--temperature", words), "");
}

TEST(StorePaths, AreWeighedByTheDriveUnderThemIfAllAreKnown) {
  MachineProfile profile;
  profile.drives.resize(2);
  profile.drives[0].path = "/";
  profile.drives[0].sweep_gb_per_s = 1;
  profile.drives[1].path = "/fast";
  profile.drives[1].sweep_gb_per_s = 7;
  auto store = parse_store("/fast/run,/fastest/run");
  ASSERT_TRUE(apply_profile(store, profile));
  EXPECT_EQ(store[0].weight, 7000U);
  EXPECT_EQ(store[1].weight, 1000U) << "/fastest is not under /fast";
  profile.drives.erase(profile.drives.begin());
  auto unknown = parse_store("/fast/run,/fastest/run");
  EXPECT_FALSE(apply_profile(unknown, profile));
  EXPECT_EQ(unknown[0].weight, unknown[1].weight);
}

TEST(StorePaths, ADriveIsGivenWhatItWasMeasuredToNeed) {
  MachineProfile profile;
  profile.drives.resize(1);
  profile.drives[0].path = "/fast";
  profile.drives[0].block_bytes = 1 << 20;
  profile.drives[0].queue_depth = 8;
  auto store = parse_store("/fast/run,/slow/run");
  apply_profile(store, profile);
  EXPECT_EQ(store[0].outstanding_bytes, 8U << 20);
  EXPECT_EQ(store[1].outstanding_bytes, 0U) << "not known";
}

}  // namespace cli_settings_test
}  // namespace ziggurat::cli

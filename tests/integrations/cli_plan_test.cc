// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_plan_test.cc: `ziggurat plan` says what the papers' formulas give, and
// what is wrong with a question.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_plan_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CliPlan : public ::testing::Test {
 protected:
  Output plan(const Arguments& flags) {
    return ziggurat(folder_.path(), Arguments{"plan"} + flags);
  }
  std::string shown(const Arguments& flags) {
    const Output output = plan(flags);
    EXPECT_EQ(output.exit_code, 0) << output.err;
    return output.out;
  }
  /// What is wrong with the command.
  std::string complaint(const Arguments& flags) {
    const Output output = plan(flags);
    EXPECT_EQ(output.exit_code, 2) << output.out;
    return output.err;
  }
  nlohmann::json json(const Arguments& flags) {
    shown(flags + Arguments{"--json", folder_ / "plan.json"});
    return nlohmann::json::parse(contents(folder_ / "plan.json"));
  }
  TemporaryFolder folder_;
};

// Rajbhandari et al. 2020, "ZeRO", figure 1.
TEST_F(CliPlan, ShowsAllStagesBesideThePapersFormula) {
  const std::string out = shown({"--model", "7.5B", "--ranks", "64", "--placement", "all=device"});
  EXPECT_THAT(out, AllOf(HasSubstr("7,500,000,000 parameters"), HasSubstr("2 + 2 + 12 bytes"),
                         HasSubstr("GB (1e9 bytes)"), HasSubstr("dp 64 x tp 1 x pp 1 x cp 1")));
  EXPECT_THAT(out, ::testing::ContainsRegex("formula +120\\.000 +31\\.406 +16\\.641 +1\\.875\n"));
  EXPECT_THAT(out, ::testing::ContainsRegex("one copy +120\\.000 +16\\.641 +16\\.641 +1\\.875\n"));
  EXPECT_THAT(out, HasSubstr("Stage 1 keeps what stage 2 keeps"));
}

TEST_F(CliPlan, SevenSeventyAnd175BillionByTheFormulasOfBothRecipes) {
  struct Row {
    const char* model;
    const char* ranks;
    const char* format;
    double bytes;
  };
  for (const Row& row : {Row{"7B", "1", "fp32", 16 * 7e9}, Row{"7B", "1", "bf16-moments", 12 * 7e9},
                         Row{"70B", "256", "fp32", 16 * 70e9 / 256},
                         Row{"70B", "256", "bf16-moments", 12 * 70e9 / 256},
                         Row{"175B", "1024", "fp32", 16 * 175e9 / 1024},
                         Row{"175B", "1024", "bf16-moments", 12 * 175e9 / 1024}}) {
    const auto report = json({"--model", row.model, "--ranks", row.ranks, "--zero-stage", "3",
                              "--state-format", row.format});
    const auto& only = report.at("strategies").at(0);
    EXPECT_NEAR(only.at("model_state_bytes").get<double>(), row.bytes, 64) << row.model;
    EXPECT_NEAR(only.at("published_state_bytes").get<double>(), row.bytes, 1) << row.model;
  }
}

TEST_F(CliPlan, AShapeIsPaddedAndHasWhatIsInUse) {
  const auto report = json({"--model", "gpt3-175b", "--ranks", "1024", "--zero-stage", "3"});
  EXPECT_NEAR(report.at("parameters").get<double>(), 174.6e9, 0.01e9);
  const auto& only = report.at("strategies").at(0);
  const double states = only.at("model_state_bytes");
  EXPECT_NEAR(states / only.at("published_state_bytes").get<double>(), 1, 0.02);
  EXPECT_GT(states, only.at("published_state_bytes").get<double>());
  EXPECT_EQ(only.at("node_bytes").at("nvme").get<std::uint64_t>(),
            8 * only.at("rank_bytes").at("nvme").get<std::uint64_t>());
  std::uint64_t nvme = 0;
  for (const auto& item : only.at("items"))
    nvme += item.at("tier") == "nvme" ? item.at("bytes").get<std::uint64_t>() : 0;
  EXPECT_EQ(nvme, only.at("rank_bytes").at("nvme").get<std::uint64_t>());
}

TEST_F(CliPlan, TheHostBudgetDecidesWhatTheHostHolds) {
  const auto host_bytes = [&](const char* budget) {
    const auto report = json({"--model", "4x256x4", "--host-memory", budget});
    return report.at("strategies").at(0).at("rank_bytes").at("host").get<std::uint64_t>();
  };
  // Less than twelve of the largest work items, then records that are kept, then no more to keep.
  EXPECT_LE(host_bytes("16MiB"), 16u << 20);
  EXPECT_GE(host_bytes("16MiB"), 15u << 20);
  EXPECT_GE(host_bytes("32MiB"), 30u << 20);  // the rest is too little for one more record
  EXPECT_EQ(host_bytes("256MiB"), host_bytes("512MiB"));
  EXPECT_THAT(
      shown({"--model", "4x256x4", "--host-memory", "32MiB"}),
      AllOf(HasSubstr("records kept from step to step"), HasSubstr("host_memory is 32 MiB")));
}

// `plan` and `train` are one answer: bytes of each tier, and the words of a refusal.
TEST_F(CliPlan, SaysWhatTrainSays) {
  const Arguments model{"--model", "2x128x2", "--context", "64", "--threads", "2"};
  write_file(folder_ / "text", sample_text());
  for (const Arguments& budgets : {Arguments{"--device-memory", "8MiB", "--host-memory", "10MiB"},
                                   Arguments{"--device-memory", "32MiB", "--host-memory", "64MiB"},
                                   Arguments{"--device-memory", "32MiB", "--host-memory", "64MiB",
                                             "--placement", "all=host"}}) {
    const auto planned = json(model + budgets).at("strategies").at(0).at("rank_bytes");
    const Output trained =
        ziggurat(folder_.path(),
                 Arguments{"train", "--data", folder_ / "text", "--store", folder_ / "store",
                           "--resume", "never", "--steps", "3", "--json", folder_ / "run.json"} +
                     model + budgets);
    ASSERT_EQ(trained.exit_code, 0) << trained.err;
    const auto tiers =
        nlohmann::json::parse(contents(folder_ / "run.json")).at("total").at("tiers");
    for (const char* tier : {"device", "host"}) {
      const double peak = tiers.at(tier).at("peak_bytes");
      EXPECT_NEAR(planned.at(tier).get<double>(), peak, 0.02 * peak) << tier;
    }
  }
  for (const Arguments& budgets :
       {Arguments{"--device-memory", "2MiB"},
        Arguments{"--host-memory", "1MiB", "--device-memory", "32MiB"}}) {
    const Output planned = plan(model + budgets);
    const Output trained = ziggurat(folder_.path(), Arguments{"train", "--data", folder_ / "text",
                                                              "--store", folder_ / "other"} +
                                                        model + budgets);
    EXPECT_EQ(planned.exit_code, 1);
    EXPECT_EQ(trained.exit_code, 1);
    EXPECT_THAT(planned.err, HasSubstr("the smallest that works with these settings is"));
    EXPECT_EQ(planned.err.substr(0, planned.err.find('\n')),
              trained.err.substr(0, trained.err.find('\n')));
  }
}

// The buffers of checkpoints are host memory too: the smallest budget that an error names opens,
// and `plan` names the same.
TEST_F(CliPlan, TheSmallestHostMemoryThatIsNamedOpensARunThatSavesCheckpoints) {
  write_file(folder_ / "text", sample_text());
  for (const char* model : {"2x64x2", "4x256x4"}) {
    for (const char* placement : {"params=host,grads=host,optimizer=nvme", "all=nvme", "all=host",
                                  "params=nvme,grads=host,optimizer=host", "auto"}) {
      SCOPED_TRACE(std::string(model) + ", " + placement);
      const Arguments settings{"--model",         model,     "--context",        "32",
                               "--batch",         "1",       "--accumulate",     "1",
                               "--device-memory", "64MiB",   "--threads",        "2",
                               "--placement",     placement, "--checkpoint-dir", folder_ / "saved"};
      const auto train = [&](const std::string& host_memory) {
        return ziggurat(folder_.path(),
                        Arguments{"train", "--data", folder_ / "text", "--store", folder_ / "run",
                                  "--steps", "1", "--host-memory", host_memory} +
                            settings);
      };
      const Output refused = train("1MiB");
      ASSERT_EQ(refused.exit_code, 1) << refused.out;
      const std::string line = "  --host-memory ";
      const std::size_t at = refused.err.find(line) + line.size();
      ASSERT_NE(at, std::string::npos + line.size()) << refused.err;
      const std::string smallest = refused.err.substr(at, refused.err.find(':', at) - at);
      const Output planned = plan(settings + Arguments{"--host-memory", "1MiB"});
      EXPECT_EQ(planned.err.substr(0, planned.err.find('\n')),
                refused.err.substr(0, refused.err.find('\n')));
      EXPECT_EQ(plan(settings + Arguments{"--host-memory", smallest}).exit_code, 0);
      const Output opened = train(smallest);
      EXPECT_EQ(opened.exit_code, 0) << smallest << ": " << opened.err;
      std::filesystem::remove_all(folder_ / "run");
      std::filesystem::remove_all(folder_ / "saved");
    }
  }
}

// The file of a run, with what a plan has no use for.
TEST_F(CliPlan, TakesTheSettingsFileOfARun) {
  write_file(folder_ / "run.json",
             R"({"model": "4x256x4", "device-memory": "24MiB", "host-memory": "96MiB", "lr": 1e-3,
                 "steps": 7, "placement": "all=host"})");
  const auto by_file = json({"--config", folder_ / "run.json"});
  const auto by_flags = json({"--model", "4x256x4", "--device-memory", "24MiB", "--host-memory",
                              "128MiB", "--placement", "all=host"});
  EXPECT_EQ(json({"--config", folder_ / "run.json", "--host-memory", "128MiB"}), by_flags);
  EXPECT_NE(by_file, by_flags);
}

TEST_F(CliPlan, HybridAndHpzAreTwoThings) {
  const std::string hybrid =
      shown({"--model", "7B", "--ranks", "64", "--strategy", "hybrid", "--shard-group", "8"});
  EXPECT_THAT(hybrid, AllOf(HasSubstr("stage 3 in groups of 8"), HasSubstr("14.000"),
                            Not(HasSubstr("secondary"))));
  const std::string hpz = shown({"--model", "7B", "--ranks", "64", "--hpz", "8"});
  EXPECT_THAT(hpz, AllOf(HasSubstr("stage 3, hpz 8"), HasSubstr("secondary parameters")));
}

TEST_F(CliPlan, TensorParallelRanksShareLayersAndANodeIfTheyCan) {
  const auto whole = json({"--model", "gpt3-6.7b", "--ranks", "1"});
  const auto half = json({"--model", "gpt3-6.7b", "--ranks", "2", "--tp", "2"});
  const double ratio = half.at("strategies").at(0).at("model_state_bytes").get<double>() /
                       whole.at("strategies").at(0).at("model_state_bytes").get<double>();
  EXPECT_NEAR(ratio, 0.5, 0.005);
  EXPECT_THAT(shown({"--model", "7B", "--ranks", "16", "--tp", "16"}),
              HasSubstr("warning: tensor-parallel groups of 16 ranks span nodes of 8"));
}

// For 2 sequences of 256, V = 2 x 256 x 1024 x 2 bytes; a rank of 2 sends V to sum them for both.
TEST_F(CliPlan, ShowsWhatDividedLayersSend) {
  const Arguments two{"--model", "24x1024x16", "--ranks", "2", "--tp", "2", "--accumulate", "1"};
  const auto sent = [&](const Arguments& more, const std::string& exchange) {
    const auto report = json(two + more);
    for (const auto& item : report.at("strategies").at(0).at("sent")) {
      if (item.at("exchange") == exchange) return item.at("same_node_bytes").get<std::uint64_t>();
    }
    return std::uint64_t{0};
  };
  constexpr std::uint64_t kV = 2 * 256 * 1024 * 2;
  EXPECT_EQ(sent({}, "layers' sums, backward"), 49 * kV);
  EXPECT_EQ(sent({}, "layers' sums, forward"), 49 * kV + 12 * 512);
  EXPECT_EQ(sent({}, "layers' sums, made again"), 24 * kV);
  EXPECT_EQ(sent({"--activation-checkpointing", "off"}, "layers' sums, made again"), 0u);
  EXPECT_EQ(sent({"--sp"}, "layers' sums, backward"), 49 * kV);
  EXPECT_EQ(sent({"--sp"}, "layers' sums, made again"), 36 * kV);
  EXPECT_EQ(sent({"--sp"}, "gradients not divided"), (1026 + 24 * 6) * 1024 * 4u);
  EXPECT_THAT(shown(two), HasSubstr("layers' sums, forward"));
  EXPECT_THAT(shown({"--model", "7B", "--ranks", "2", "--tp", "2"}),
              HasSubstr("The sum leaves out what tensor-parallel"));
}

// Two and three times the parameters' bytes, but for the part that a rank does not send itself.
TEST_F(CliPlan, ShowsWhatIsSentInAStep) {
  const std::string out =
      shown({"--model", "8B", "--ranks", "16", "--ranks-per-node", "8", "--accumulate", "4"});
  EXPECT_THAT(out, ::testing::ContainsRegex("\nsum +30\\.000 +30\\.000 +30\\.000 +45\\.000\n"));
  EXPECT_THAT(out, ::testing::ContainsRegex("to other nodes +16\\.000 +16\\.000 +16\\.000 +24"));
  EXPECT_THAT(out, ::testing::ContainsRegex("4 passes[a-z ]+ +30\\.000 .* 135\\.000\n"));
  EXPECT_THAT(shown({"--model", "8B", "--ranks", "16", "--memory"}), Not(HasSubstr("sends")));
  EXPECT_THAT(shown({"--model", "8B", "--ranks", "16", "--traffic"}), Not(HasSubstr("masters")));
}

// Wang et al. 2023, "ZeRO++", table 1: 0.75 of the parameters' bytes leave a node, and scales.
TEST_F(CliPlan, ZeroPlusPlusSendsLessBetweenNodes) {
  const auto report = json({"--model", "8B", "--ranks", "16", "--hpz", "8", "--quantized-weights",
                            "--quantized-gradients", "4"});
  double other_nodes = 0;
  for (const auto& item : report.at("strategies").at(0).at("sent"))
    other_nodes += item.at("other_nodes_bytes").get<double>();
  EXPECT_NEAR(8 * other_nodes / 16e9 / (1 / 2.0), 0.75 + 2 * 4.0 / 256 / 2, 1e-6);
}

TEST_F(CliPlan, AWrongQuestionIsAnsweredWithTheRightOne) {
  EXPECT_THAT(complaint({"--model", "gpt5"}), HasSubstr("a parameter count like 7B"));
  EXPECT_THAT(complaint({"--model", "7"}), HasSubstr("like 7B"));
  EXPECT_THAT(complaint({"--ranks", "6", "--tp", "4"}),
              HasSubstr("tp 4 x pp 1 x cp 1 = 4 does not divide the 6 ranks"));
  EXPECT_THAT(complaint({"--ranks", "8", "--zero-stage", "3", "--strategy", "none"}),
              HasSubstr("--strategy none means --zero-stage 0"));
  EXPECT_THAT(complaint({"--ranks", "8", "--strategy", "hybrid"}), HasSubstr("--shard-group"));
  EXPECT_THAT(complaint({"--ranks", "8", "--quantized-weights"}), HasSubstr("--zero-stage 3"));
  EXPECT_THAT(complaint({"--ranks", "8", "--zero-stage", "3", "--quantized-gradients", "5"}),
              HasSubstr("give 4 or 8"));
  EXPECT_THAT(complaint({"--dtype", "fp32", "--state-format", "split"}), HasSubstr("bf16"));
}

TEST_F(CliPlan, ComparesStrategiesOnAMachine) {
  const std::string out = shown({"--model", "llama-3-8b", "--machine", "h100x8"});
  EXPECT_THAT(out, AllOf(::testing::StartsWith("It fits: llama-3-8b trains on 8 GPUs of h100x8"),
                         HasSubstr("8.03 billion parameters"), HasSubstr("* FSDP2 (ZeRO-3)"),
                         HasSubstr("* is where to begin"), HasSubstr("you do not need offload"),
                         HasSubstr("States alone would fit on 2 GPUs"),
                         HasSubstr("How exact this is"), HasSubstr("docs/choosing.md")));
  EXPECT_THAT(out, HasSubstr("for each GPU (not asked, so the usual: --ranks 8 --batch 1 --context "
                             "4096 --accumulate 4)\n"));
  EXPECT_THAT(shown({"--model", "llama-3-8b", "--machine", "h100x8", "--ranks", "8", "--batch", "1",
                     "--context", "4096", "--accumulate", "4"}),
              HasSubstr("a step is 4 of them for each GPU\n"));
  // What fits says what fills first; what does not, what is too much with which effort.
  EXPECT_THAT(out, ::testing::ContainsRegex(
                       "what fills first\n\\* FSDP2.*% full, the largest part activations\n"));
  EXPECT_THAT(out, ::testing::ContainsRegex("what does not fit.*\n +DDP +[0-9]+ +[0-9.]+ +- +full, "
                                            "chunks, host +GPU memory: [0-9.]+ GB of 85.5 GB, the "
                                            "largest part moments\n"));
  EXPECT_THAT(out, ::testing::ContainsRegex("  moments +[0-9.]+ GB  AdamW's two running averages"));
  EXPECT_THAT(out, ::testing::ContainsRegex("  compute +[0-9.]+ s  the busiest: no schedule"));
  std::ofstream(folder_ / "ds.json")
      << R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})";
  const Arguments judged{"--model", "llama-3-8b", "--machine",
                         "h100x8",  "--config",   folder_ / "ds.json"};
  EXPECT_THAT(shown(judged), HasSubstr("as you asked"));
  EXPECT_THAT(shown(judged + Arguments{"--tp", "8"}), HasSubstr("AutoTP"));
  // The ranks of a plan divide a batch, not those of this process: 32 = 2 x 2 x 8.
  std::ofstream(folder_ / "ds.json")
      << R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2,
             "zero_optimization": {"stage": 3}})";
  EXPECT_THAT(shown(judged), HasSubstr("a step is 2 of them for each GPU"));
  EXPECT_THAT(shown(judged + Arguments{"--ranks", "16"}),
              HasSubstr("a step is 1 of them for each GPU"));
}

// Host memory and drives are shown beside GPU memory, the fullest first, and add up.
TEST_F(CliPlan, ShowsTheMemoryOfEachTierThatIsUsed) {
  const std::string out = shown({"--model", "llama-3-8b", "--machine", "4090"});
  EXPECT_THAT(out, AllOf(HasSubstr("GPU memory of Ziggurat, state on NVMe, at the worst instant"),
                         HasSubstr("\nHost memory of a node, all the time: "),
                         HasSubstr("\nNVMe of a node, all the time: "),
                         HasSubstr("the other slot of masters and moments"),
                         HasSubstr("Of the others that offload, ")));
  // Each flow says what it adds, which a line of the step repeats.
  EXPECT_THAT(out, ::testing::ContainsRegex("copies between host and device +[0-9.]+ s  beneath "
                                            "[0-9.]+ s of both passes +adds nothing: it takes "
                                            "[0-9,]+ tokens a pass, there are 4,096\n"));
  EXPECT_THAT(out, ::testing::ContainsRegex("speed +[0-9.]+ s  beneath [0-9.]+ s of next forward "
                                            "+adds 30.054 s: it takes [0-9,]+ tokens a step, "
                                            "there are 16,384\n"));
  EXPECT_THAT(out, ::testing::ContainsRegex("speed +30.054 s\n"));
  EXPECT_THAT(out, ::testing::ContainsRegex("the busiest: .* this one is 16 % longer\n"));
}

TEST_F(CliPlan, AConfigNamesTheFolderOnNvmeAndWhatItCannotSay) {
  const Arguments question{"--model", "llama-3-8b",     "--machine",
                           "4090",    "--write-config", folder_ / "ds.json"};
  EXPECT_THAT(complaint(question), HasSubstr("give its folder with --nvme-path"));
  const Output output = plan(question + Arguments{"--nvme-path", "/data/nvme"});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  const auto config = nlohmann::json::parse(contents(folder_ / "ds.json"));
  const nlohmann::json& offload = config.at("zero_optimization").at("offload_optimizer");
  EXPECT_EQ(offload.at("nvme_path"), "/data/nvme");
  EXPECT_EQ(config.contains("activation_checkpointing"),
            output.err.find("each layer again in backward") != std::string::npos);
  const Output longer =
      plan(question + Arguments{"--nvme-path", "/data/nvme", "--context", "16384"});
  EXPECT_THAT(longer.err, AllOf(HasSubstr("fits only if the script does what a config cannot say"),
                                HasSubstr("compute each layer again in backward"),
                                HasSubstr("the loss in chunks of 1,024 tokens")));
  EXPECT_EQ(nlohmann::json::parse(contents(folder_ / "ds.json"))
                .at("activation_checkpointing")
                .at("cpu_checkpointing"),
            longer.err.find("inputs of layers in host memory") != std::string::npos);
  EXPECT_THAT(complaint({"--model", "gpt2-xl", "--nvme-path", "/x"}), HasSubstr("needs --machine"));
}

TEST_F(CliPlan, WritesTheRecommendationAsAConfig) {
  const Arguments question{"--model", "llama-3-8b", "--machine", "h100x8"};
  const nlohmann::json report = json(question);
  EXPECT_EQ(report.at("recommended"), "FSDP2 (ZeRO-3)");
  EXPECT_EQ(report.at("parameters"), 8'030'261'248);
  shown(question + Arguments{"--write-config", folder_ / "ds.json"});
  const auto config = nlohmann::json::parse(contents(folder_ / "ds.json"));
  EXPECT_EQ(config.at("zero_optimization").at("stage"), 3);
  shown({"--model", "gpt2-xl", "--machine", "b200x8", "--ranks", "64", "--context", "2048",
         "--accumulate", "1", "--write-config", folder_ / "plus.json"});
  const auto plus = nlohmann::json::parse(contents(folder_ / "plus.json")).at("zero_optimization");
  EXPECT_EQ(plus.at("zero_hpz_partition_size"), 8);
  EXPECT_EQ(plus.at("zero_quantized_weights"), true);
  EXPECT_THAT(complaint({"--model", "no-such-model", "--machine", "h100x8"}),
              HasSubstr("is not a known model"));
  EXPECT_THAT(complaint({"--model", "gpt2", "--machine", "cray"}), HasSubstr("h100x8"));
  EXPECT_THAT(complaint(question + Arguments{"--slots", "1"}),
              HasSubstr("--slots 1 is of our own trainer"));
  EXPECT_THAT(complaint({"--model", "gpt2-xl", "--lora-rank", "8"}), HasSubstr("needs --machine"));
}

}  // namespace cli_plan_test
}  // namespace ziggurat::test

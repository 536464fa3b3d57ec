// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_answer_test.cc: what a comparison says to a person: the first sentence, why, what
// breaks first; and the machine that was measured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "core/plan/machine_profile.h"
#include "core/plan/machines/machine.h"
#include "core/plan/models/named_models.h"
#include "core/plan/strategies/activations.h"
#include "core/plan/strategies/compare.h"
#include "core/plan/strategies/words.h"
#include "tests/core/plan_job.h"

namespace ziggurat {
namespace plan_answer_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const Verdict& named(const Comparison& comparison, std::string_view name) {
  return *std::ranges::find(comparison.verdicts, name, &Verdict::name);
}

TEST(PlanWords, AreGroupedAndRounded) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(131'072), "131,072");
  EXPECT_EQ(grouped(-1'234'567), "-1,234,567");
  EXPECT_EQ(about(53'871), "54,000");
  EXPECT_EQ(about(7.4), "7");
  EXPECT_EQ(about(0), "0");
  EXPECT_EQ(whole_gb(9.94e9), "9.9 GB");
  EXPECT_EQ(whole_gb(85.4e9), "85 GB");
}

TEST(PlanAnswer, SaysFirstWhetherItFitsWithWhatAndHowLongAStepIs) {
  const Job job = job_of("llama-3-8b", "h100x8", 8);
  const Comparison comparison = compare(job);
  const Verdict& best = comparison.verdicts.at(comparison.best.value());
  EXPECT_THAT(answer(job, comparison),
              AllOf(StartsWith("It fits: llama-3-8b trains on 8 GPUs of h100x8 with FSDP2"),
                    HasSubstr("A step of 131,072 tokens takes"),
                    HasSubstr(about(131'072 / best.time.seconds) + " tokens a second")));
}

TEST(PlanAnswer, SaysFirstThatItDoesNotFitWhatIsNearestAndHowManyGpusWork) {
  Job job = job_of("llama-3.1-405b", "h100x8", 8);
  job.machine.drive_bytes = 0;  // with drives it would fit
  const Comparison comparison = compare(job);
  ASSERT_FALSE(comparison.best);
  EXPECT_THAT(answer(job, comparison),
              AllOf(StartsWith("It does not fit: llama-3.1-405b"), HasSubstr("comes nearest ("),
                    HasSubstr("the largest part moments"),
                    HasSubstr("On " + grouped(comparison.fewest) + " such GPUs FSDP2 works")));
}

TEST(PlanAnswer, SaysTheRuleIfAllAreRefused) {
  const Job job = job_of("llama-3-8b", "4090", 2);
  EXPECT_THAT(answer(job, compare(job)),
              HasSubstr("Each is refused: 4090 has 1 GPU and no network"));
}

TEST(PlanAnswer, JudgesFirstWhatIsAsked) {
  const Job job = job_of("llama-3-8b", "h100x8", 8);
  const auto said = [&](const ParallelLayout& layout) {
    const Comparison comparison = compare(job, layout);
    EXPECT_EQ(comparison.asked, 0U);
    return answer(job, comparison) + decision(job, comparison);
  };
  EXPECT_THAT(
      said({.dp = 8, .stage = 0}),
      AllOf(StartsWith("What you ask for does not fit: GPU memory: "),
            HasSubstr("Recommended: llama-3-8b trains"), HasSubstr("FSDP2 is the default")));
  EXPECT_THAT(said({.dp = 1, .tp = 8, .stage = 3}),
              StartsWith("What you ask for is refused: DeepSpeed's AutoTP"));
  EXPECT_THAT(said({.dp = 8, .stage = 3}),
              AllOf(StartsWith("What you ask for fits"), HasSubstr("Nothing better is known here"),
                    HasSubstr("Keep what you ask for")));
}

// What is chosen among those that offload has a reason for each of the others.
TEST(PlanAnswer, SaysOfEachOtherOffloadWhyItIsNotTheOne) {
  const Job job = job_of("llama-3-8b", "4090", 1);
  const Comparison comparison = compare(job);
  const std::string said = decision(job, comparison);
  for (const Verdict& one : comparison.verdicts) {
    if (!one.offloads() || &one == &comparison.verdicts[*comparison.best]) continue;
    EXPECT_THAT(said, HasSubstr(one.name + (one.fits() ? " takes " : " does not fit "))) << said;
  }
  // 70 billion on 8 GPUs: most fit, and differ in their exchanges and updates.
  const Job large = job_of("llama-3-70b", "h100x8", 8);
  EXPECT_THAT(
      decision(large, compare(large)),
      AllOf(HasSubstr("Ziggurat, host memory takes "),
            HasSubstr(
                " times as long, mostly by the line \"exchanges that compute does not hide\"; "),
            HasSubstr(" times as long, mostly by the line \"update, at the drives' speed\"")));
}

// Where adapters fit one GPU with layers computed again, offload that would avoid it stands second.
TEST(PlanAnswer, OffloadIsRecommendedOnlyWhereNothingElseFits) {
  Job job = job_of("llama-3-8b", "4090", 1);
  job.lora.rank = 16;
  const Comparison comparison = compare(job);
  const Verdict& best = comparison.verdicts.at(comparison.best.value());
  EXPECT_EQ(best.name, "one GPU");
  EXPECT_TRUE(std::ranges::any_of(comparison.verdicts, [&](const Verdict& one) {
    return one.fits() && one.offloads() && one.time.seconds * kNearlyAsFast < best.time.seconds;
  }));
  EXPECT_THAT(decision(job, comparison), HasSubstr("measure a step of both"));
  EXPECT_THAT(answer(job, comparison),
              StartsWith("It fits: llama-3-8b trains on one GPU of 4090, without offload"));
}

// The second choice is what the rule of the first would choose without it.
TEST(PlanAnswer, NamesTheSecondChoiceByTheSameRule) {
  const auto second = [](const Job& job) {
    const Comparison comparison = compare(job);
    if (!comparison.second) return std::string("none");
    const std::string name = comparison.verdicts[*comparison.second].name;
    EXPECT_THAT(decision(job, comparison), HasSubstr("The second choice is " + name + "."));
    return name;
  };
  EXPECT_EQ(second(job_of("llama-3-8b", "h100x8", 8)), "ZeRO-1");
  EXPECT_EQ(second(job_of("llama-3.1-70b", "h100x8", 8)), "Ziggurat, host memory");
  EXPECT_EQ(second(job_of("llama-3.1-70b", "h100x8", 64)), "ZeRO++");  // though offload is faster
  const Job only = job_of("llama-3-8b", "4090", 1);
  EXPECT_EQ(second(only), "none");
  EXPECT_THAT(decision(only, compare(only)), HasSubstr("There is no second choice"));
}

TEST(PlanAnswer, TheReasonSinglesOutTheChoice) {
  const auto said = [](const Job& job) { return decision(job, compare(job)); };
  EXPECT_THAT(said(job_of("llama-3-8b", "4090", 1)), HasSubstr("; nothing else fits with it."));
  EXPECT_THAT(said(job_of("mixtral-8x7b", "h200x8", 8)),
              HasSubstr("faster by more than 15 % than FSDP2 (ZeRO-3), the simplest"));
  EXPECT_THAT(said(job_of("gpt2-xl", "4090", 1, 1024)),
              HasSubstr("of what fits with it, this is the simplest and nothing is faster"));
  EXPECT_THAT(said(job_of("deepseek-v3", "h200x8", 256)),
              AllOf(HasSubstr("Begin with FSDP2, experts in the node: plain FSDP2, where each GPU"),
                    HasSubstr("here 8 GPUs of a node share them"),
                    HasSubstr("plain FSDP2 works from 1,024 on")));
}

// A GPU that is fuller than the worst error known leaves room for is not said to fit without more.
TEST(PlanAnswer, WarnsWhereTheErrorIsLargerThanTheRoom) {
  Job job = job_of("llama-3-8b", "4090", 1);
  const auto said = [&] { return answer(job, compare(job)); };
  EXPECT_THAT(said(), AllOf(StartsWith("It fits, but barely: llama-3-8b trains"),
                            HasSubstr("It may run out: GPU memory is 96 % full")));
  const Comparison comparison = compare(job);
  const Verdict& best = comparison.verdicts.at(comparison.best.value());
  const double worst = best.device_bytes + best.memory.device_bytes() * kMemoryWorstError;
  job.machine.device_bytes = worst + 1e6;
  EXPECT_THAT(said(), AllOf(StartsWith("It fits: "), Not(HasSubstr("run out"))));
  job.machine.device_bytes = worst - 1e6;
  EXPECT_THAT(said(), StartsWith("It fits, but barely: "));
}

// Each remedy that is named makes it fit, and one that is called too little does not.
TEST(PlanAnswer, WhereNothingFitsItNamesWhatWouldHelp) {
  Job job = job_of("qwen2.5-7b", "laptop-8gb", 1);
  const std::string said = decision(job, compare(job));
  EXPECT_THAT(said, AllOf(HasSubstr("It would fit with LoRA (of rank 16), or with 1.9 GB more host "
                                    "memory in a node (for Ziggurat, state on NVMe)."),
                          HasSubstr("Not enough by themselves: moments of 8 bits each, shorter "
                                    "sequences."),
                          Not(HasSubstr("more GPUs"))));
  Job adapted = job;
  adapted.lora.rank = 16;
  EXPECT_TRUE(compare(adapted).best);
  job.machine.host_bytes += 1.8e9;
  EXPECT_FALSE(compare(job).best);
  job.machine.host_bytes += 0.2e9;
  EXPECT_TRUE(compare(job).best);
  job.machine.host_bytes /= 8;
  job.sequence = 512;
  EXPECT_THAT(decision(job, compare(job)), Not(HasSubstr("would fit with sequences")));
}

// 512 tokens are the shortest sequences that it proposes.
TEST(PlanAnswer, ProposesTheLongestSequencesThatFit) {
  Job job = job_of("llama-3-8b", "4090", 1, 4096);
  job.micro_batch = 1;
  const auto fits = [&](std::int64_t sequence) {
    Job shorter = job;
    shorter.sequence = sequence;
    return compare(shorter).best.has_value();
  };
  const auto leave_no_room_for = [&](std::int64_t sequence) {
    while (fits(sequence)) job.machine.device_bytes *= 0.99;
  };
  leave_no_room_for(1024);
  ASSERT_TRUE(fits(512));
  EXPECT_THAT(decision(job, compare(job)), HasSubstr("sequences of 512 tokens, one at a time"));
  leave_no_room_for(512);
  ASSERT_TRUE(fits(256));
  EXPECT_THAT(decision(job, compare(job)), HasSubstr("shorter sequences."));
}

TEST(PlanAnswer, SaysTheThresholdsThatItCompares) {
  const Job fits = job_of("llama-3-8b", "h100x8", 8);
  EXPECT_THAT(
      decision(fits, compare(fits)),
      AllOf(HasSubstr("less than 68 GB, 80 % of a GPU: so one GPU can work on a whole layer"),
            HasSubstr("States alone would fit on 2 GPUs")));
  const Job large = job_of("llama-3.1-405b", "laptop-8gb", 1);
  EXPECT_THAT(decision(large, compare(large)),
              HasSubstr("more than 6.9 GB, 80 % of a GPU: divide layers"));
}

// GPU memory and host memory are both too small: what is named is the one that lacks most, and with
// the effort that comes nearest.
TEST(PlanAnswer, WhatDoesNotFitIsShownWithTheEffortThatComesNearest) {
  Job job = job_of("llama-3-8b", "4090", 1);
  const Comparison comparison = compare(job);
  const Verdict& all_in_host = named(comparison, "ZeRO-3, all in host memory");
  ASSERT_FALSE(all_in_host.fits());
  EXPECT_THAT(all_in_host.breaks_first(), StartsWith("host memory: "));
  EXPECT_FALSE(all_in_host.training.offloads_activations);  // that would need more of it
  for (const Verdict& one : comparison.verdicts) {
    for (std::size_t i = 1; i < one.needs.size(); ++i)
      EXPECT_GE(one.needs[i - 1].share(), one.needs[i].share()) << one.name;
  }
  job.machine.host_bytes = 1e15;
  EXPECT_TRUE(named(compare(job), "ZeRO-3, all in host memory").fits());
}

// A Llama block: the layer's input, q, k, v, attention's output, the residual between, and the
// MLP's two inputs stay, with 4 bytes a head for the softmax: 92 of 136 KiB a token.
TEST(PlanSelective, WithFlashKeepsWhatNeedsAProduct) {
  Training training;
  training.model = named_model("llama-3-8b").value();
  const double tokens = static_cast<double>(training.tokens());
  EXPECT_DOUBLE_EQ(saved_bytes(training, false), tokens * (136 * 1024 + 4 * 32));
  training.recompute = Recompute::kSelective;
  EXPECT_DOUBLE_EQ(saved_bytes(training, false), tokens * (92 * 1024 + 4 * 32));
  EXPECT_DOUBLE_EQ(needed_bytes(training, false), tokens * (136 * 1024 + 4 * 32));
}

// It lies between the others in memory and in time, and the layer at work has all.
TEST(PlanSelective, LiesBetweenNothingAndFull) {
  Training training;
  training.model = named_model("llama-3-8b").value();
  training.layout = {.dp = 8, .stage = 3};
  const Machine machine = find_machine("h100x8");
  std::vector<double> seconds, bytes;
  for (const Recompute how : {Recompute::kNothing, Recompute::kSelective, Recompute::kFull}) {
    training.recompute = how;
    seconds.push_back(step_time(training, machine).seconds);
    bytes.push_back(step_memory(training).device_bytes());
  }
  EXPECT_LT(seconds[0], seconds[1]);
  EXPECT_LT(seconds[1], seconds[2] - 0.5 * (seconds[2] - seconds[0]));
  EXPECT_GT(bytes[0], bytes[1]);
  EXPECT_GT(bytes[1], bytes[2]);
  training.recompute = Recompute::kSelective;
  double again = 0;
  const auto memory = step_memory(training);
  for (const MemoryLine& line : memory.instants.at(1).lines)
    again += line.what == "activations of the layer" ? line.bytes : 0;
  EXPECT_DOUBLE_EQ(again, needed_bytes(training, false) - saved_bytes(training, false));
}

TEST(PlanSelective, IsTriedBeforeLayersAreMadeAgain) {
  bool selective = false;
  for (std::int64_t sequence = 1024; sequence <= 65'536; sequence += 1024) {
    const Verdict one = judge(job_of("llama-3-8b", "h100x8", 8, sequence), "", System::kPyTorch,
                              {.dp = 8, .stage = 3});
    selective = selective || (one.fits() && one.training.recompute == Recompute::kSelective);
    if (one.training.recompute == Recompute::kFull) break;
  }
  EXPECT_TRUE(selective);
}

// Each pass brings parameters that rest elsewhere, also where nothing is computed again.
TEST(PlanTime, ParametersElsewhereAreBroughtInBothPasses) {
  Training training;
  training.model = named_model("llama-3-8b").value();
  training.layout.params = training.layout.optimizer = Tier::kHost;
  const Machine machine = find_machine("h100");
  const auto link = [&] {
    for (const TimeLine& line : step_time(training, machine).busy)
      if (line.what == "the link between host and device") return line.seconds;
    return 0.0;
  };
  const double expected = (4 + 2 * 2) * rank_parameters(training).total() / machine.link_bandwidth;
  EXPECT_DOUBLE_EQ(link(), expected);
  training.recompute = Recompute::kFull;
  EXPECT_DOUBLE_EQ(link(), expected);
}

double busy(const Training& training, const Machine& machine, const std::string& what) {
  for (const TimeLine& line : step_time(training, machine).busy)
    if (line.what == what) return line.seconds;
  return 0;
}

// Ranks that meet in host memory bring whole layers over each rank's own link, twice, and take
// whole gradients back.
TEST(PlanTime, StagedExchangesCrossEachLinkWhole) {
  Training training;
  training.model = named_model("llama-3-70b").value();
  training.layout = {.dp = 8, .stage = 3};
  training.layout.params = training.layout.optimizer = Tier::kHost;
  const Machine machine = find_machine("h100x8");
  const double all = 2 * rank_parameters(training).total() / machine.link_bandwidth;
  const char* const kLink = "the link between host and device";
  EXPECT_NEAR(busy(training, machine, kLink), all / 8 * 4, 1e-6);
  training.software.staged = true;
  EXPECT_NEAR(busy(training, machine, kLink), all * 3 + all / 8 * 2, 1e-6);
  training.micro_batches = 4;
  EXPECT_NEAR(busy(training, machine, kLink), all * 12 + all / 8 * 2, 1e-6);
  training.software.vertical = true;
  EXPECT_NEAR(busy(training, machine, kLink), all * 3 + all / 8 * 2, 1e-6);
}

// Each rank sends its part to each of the others: eight GPUs of a node get the same bytes eight
// times over the node's network, which a ring brings once.
TEST(PlanTime, DirectExchangesBringEachRankItsOwn) {
  Training training;
  training.model = named_model("llama-3-70b").value();
  training.layout = {.dp = 4096, .stage = 3};
  const Machine machine = find_machine("h100x8");
  const char* const kExchanges = "exchanges of gradients and parameters";
  const double rings = busy(training, machine, kExchanges);
  training.software.direct = true;
  EXPECT_NEAR(busy(training, machine, kExchanges) / rings, 8, 0.02);
  // Within a node, host memory is read and written once for each byte.
  training.layout.dp = 8;
  const double host = machine.host_bandwidth * machine.reach.host / 8 / 2;
  const double all = 2 * rank_parameters(training).total();
  EXPECT_NEAR(busy(training, machine, kExchanges), 3 * all * 7 / 8 / host, 1e-6);
}

TEST(PlanTime, TheBusiestIsTheBound) {
  const Job job = job_of("llama-3-8b", "4090", 1);
  for (const Verdict& one : compare(job).verdicts) {
    double most = 0;
    for (const TimeLine& line : one.time.busy) most = std::max(most, line.seconds);
    EXPECT_DOUBLE_EQ(most, one.time.bound) << one.name;
  }
}

MachineProfile measured() {
  MachineProfile profile;
  profile.cpu_model = "a CPU";
  profile.host_adam_gb_per_s = 20;
  profile.compute = ComputeProfile{.measured_at = "2026-11-29T08:00:00Z",
                                   .threads = 2,
                                   .layer_gflop_per_s = 200,
                                   .layer_fp32_gflop_per_s = 80,
                                   .unaligned_gflop_per_s = 150,
                                   .weights_gb_per_s = 40,
                                   .attention_gflop_per_s = 100,
                                   .pass_gb_per_s = 25,
                                   .copy_gb_per_s = 10,
                                   .kernels_gb_per_s = 16};
  for (const double rate : {1.0, 3.0}) {
    profile.drives.push_back({});
    profile.drives.back().path = rate > 2 ? "/fast" : "/slow";
    profile.drives.back().sweep_gb_per_s = rate;
  }
  return profile;
}

TEST(PlanThisMachine, IsWhatWasMeasured) {
  const Machine machine =
      machine_of_profile(measured(), {.memory_bytes = 64e9, .drive_bytes = 1e12});
  EXPECT_DOUBLE_EQ(machine.flops, 200e9);
  EXPECT_DOUBLE_EQ(machine.reach.flash, 0.5);
  EXPECT_DOUBLE_EQ(machine.reach.unaligned, 0.75);
  EXPECT_DOUBLE_EQ(machine.drive_bandwidth, 3e9);
  EXPECT_DOUBLE_EQ(machine.kernel_bandwidth, 16e9);
  EXPECT_THAT(machine.figures, AllOf(HasSubstr("2 threads"), HasSubstr("drive of /fast")));
  Training training;
  training.model = ModelShape::gpt(12, 1024, 16, 50'304, 1024);
  training.sequence = 1024;
  const double products = 24.0 * 1024 * 1024 * 1024 / 200e9;
  const double forward = layer_time(training, machine, false).forward;
  EXPECT_GT(forward, products);
  EXPECT_LT(forward, 1.3 * products);
  training.layout.optimizer = Tier::kHost;
  for (const TimeLine& line : step_time(training, machine).busy) {
    if (line.what != "host memory, in the update") continue;
    EXPECT_DOUBLE_EQ(line.seconds, 28 * rank_parameters(training).total() / 20e9);
  }
}

/// The trainer's layer: products, their weights before them, what lies beside at the rate that was
/// measured, and attention's scores in blocks of queries.
TEST(PlanThisMachine, TakesForALayerWhatItsKindsOfWorkTakeTogether) {
  const MachineProfile profile = measured();
  const Machine machine = machine_of_profile(profile, {.memory_bytes = 64e9, .drive_bytes = 1e12});
  Training training;
  training.model = ModelShape::gpt(12, 1024, 16, 50'304, 1024);
  training.sequence = 256;
  training.recompute = Recompute::kFull;
  const LayerTime whole = layer_time(training, machine, false);
  EXPECT_DOUBLE_EQ(whole.again, whole.forward);
  training.software.leaves_out_last = true;
  const LayerTime time = layer_time(training, machine, false);
  const double rows = 256, width = 1024;
  const auto product = [&](double columns, double depth) {
    return 2 * rows * columns * depth / 200e9 + 2 * depth * columns / 40e9;
  };
  EXPECT_NEAR(time.forward - time.again, product(width, 4 * width), 1e-12);
  const double products = product(3 * width, width) + product(width, width) +
                          product(4 * width, width) + product(width, 4 * width);
  const double scores = rows * (256 + 128) / 2;  // of a head
  const double attention = 2 * 2 * scores * width / 100e9;
  const double kernels = rows * 42 * width / 16e9;
  EXPECT_NEAR(time.forward, products + attention + kernels, 1e-12);
  EXPECT_DOUBLE_EQ(kernel_bytes(training.model), 138 * width);
}

/// An older program has measured attention's products without the rest of a block of queries.
TEST(PlanThisMachine, TakesAnOlderProfilesAttentionAsItWasMeasured) {
  MachineProfile older = measured();
  older.compute->kernels_gb_per_s = older.compute->weights_gb_per_s = 0;
  EXPECT_EQ(machine_of_profile(older, {}).attention_block, 0);
  EXPECT_EQ(machine_of_profile(measured(), {}).attention_block, kAttentionBlock);
}

TEST(PlanThisMachine, IsSharedByProcessesAndSlowerInFp32) {
  const Machine machine =
      machine_of_profile(measured(), {.memory_bytes = 64e9, .drive_bytes = 1e12});
  const Machine shared = shared_by(machine, 2);
  EXPECT_EQ(shared.gpus, 2);
  EXPECT_EQ(shared.threads, 1);
  EXPECT_DOUBLE_EQ(shared.flops, 100e9);
  EXPECT_DOUBLE_EQ(shared.kernel_bandwidth, 8e9);
  EXPECT_DOUBLE_EQ(shared.weight_bandwidth, 20e9);
  EXPECT_DOUBLE_EQ(shared.device_bytes, 32e9);
  EXPECT_DOUBLE_EQ(shared.link_bandwidth, 25e9 / 4) << "two copy at once";
  EXPECT_DOUBLE_EQ(shared.host_bandwidth, 20e9) << "of the node";
  EXPECT_DOUBLE_EQ(in_fp32(machine).flops, 80e9);
  EXPECT_DOUBLE_EQ(in_fp32(machine).device_bandwidth, 12.5e9) << "in 16-bit elements";
  EXPECT_THROW(in_fp32(find_machine("4090")), Error);
}

TEST(PlanThisMachine, IsSlowerWithFewerThreadsThanWereMeasured) {
  const Machine machine =
      machine_of_profile(measured(), {.memory_bytes = 64e9, .drive_bytes = 1e12});
  const Machine one = with_threads(machine, 1);
  EXPECT_EQ(one.threads, 1);
  EXPECT_DOUBLE_EQ(one.flops, 100e9);
  EXPECT_DOUBLE_EQ(one.kernel_bandwidth, 8e9);
  EXPECT_DOUBLE_EQ(one.host_bandwidth, machine.host_bandwidth / 2) << "of the update";
  EXPECT_DOUBLE_EQ(one.link_bandwidth, machine.link_bandwidth) << "one thread copies";
  EXPECT_DOUBLE_EQ(with_threads(machine, 16).flops, machine.flops) << "there are no other cores";
}

TEST(PlanThisMachine, IsPlannedAsOneDevice) {
  Job job = job_of("gpt2", "laptop-8gb", 8, 1024);
  job.machine = machine_of_profile(measured(), {.memory_bytes = 20e9, .drive_bytes = 1e12});
  EXPECT_EQ(compare(job).verdicts.at(0).refusal,
            "the cores of this machine are planned as one device: leave ranks out");
}

// The device is the host's cores: what is offloaded to host memory frees nothing.
TEST(PlanThisMachine, HasOneMemory) {
  Job job = job_of("gpt2-xl", "laptop-8gb", 1, 1024);
  job.machine = machine_of_profile(measured(), {.memory_bytes = 20e9, .drive_bytes = 1e12});
  const Comparison comparison = compare(job);
  const Verdict& host = named(comparison, "Ziggurat, host memory");
  ASSERT_EQ(host.needs.size(), 1U);
  EXPECT_EQ(host.needs[0].tier, Tier::kHost);
  EXPECT_DOUBLE_EQ(host.needs[0].bytes, host.device_bytes + host.host_bytes);
  EXPECT_FALSE(host.fits());
  EXPECT_EQ(comparison.verdicts.at(comparison.best.value()).name, "Ziggurat, state on NVMe");
  const std::string said = answer(job, comparison) + decision(job, comparison);
  EXPECT_THAT(said, AllOf(HasSubstr("trains on this machine with"), Not(HasSubstr("GPU"))));
}

TEST(PlanThisMachine, WithoutFiguresIsRefused) {
  MachineProfile profile = measured();
  profile.compute.reset();
  const auto why = [&] {
    try {
      return std::string(machine_of_profile(profile, {}).name);
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_THAT(why(), HasSubstr("`ziggurat profile` says how"));
  profile.compute = ComputeProfile{};
  EXPECT_THAT(why(), HasSubstr("`ziggurat profile` says how"));
}

}  // namespace plan_answer_test
}  // namespace ziggurat

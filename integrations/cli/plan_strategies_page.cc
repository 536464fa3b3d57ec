// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan_strategies_page.cc: what `ziggurat plan --machine` prints: the answer, why,
// the strategies that fit and what fills first, those that do not and what is too much, where the
// recommended one's memory and time go, what compute hides, how exact all this is.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "core/plan/strategies/words.h"
#include "integrations/cli/plan_strategies.h"

namespace ziggurat::cli {
namespace {

std::string gb(double bytes) {
  return bytes <= 0 ? "-" : fmt::format("{:.{}f}", bytes / 1e9, bytes < 99.95e9 ? 1 : 0);
}

std::string effort_word(const Training& training) {
  if (training.recompute == Recompute::kNothing) return "-";
  if (training.recompute == Recompute::kSelective) return "selective";
  if (training.offloads_activations) return "full, chunks, host";
  return training.software.loss_tokens > 0 ? "full, chunks" : "full";
}

void print_facts(const StrategiesCommand& command) {
  const Job& job = command.job;
  const ParameterCount count = count_parameters(job.model);
  fmt::print("{}: {:.4g} billion parameters", job.model.name,
             static_cast<double>(count.total) / 1e9);
  if (count.active != count.total)
    fmt::print(", of which a token passes through {:.4g}", static_cast<double>(count.active) / 1e9);
  if (job.lora.rank > 0)
    fmt::print("; LoRA of rank {} trains {:.4g} million", job.lora.rank,
               static_cast<double>(lora_parameters(job.model, job.lora)) / 1e6);
  if (job.machine.one_memory)
    fmt::print("\nThe cores of {}, with {} GB of memory and {} GB of drives\n", job.machine.name,
               gb(job.machine.host_bytes), gb(job.machine.drive_bytes));
  else
    fmt::print(
        "\n{} GPU{} of {}: {} GB ({:.0f} GiB) each, {} GB of host memory and {} GB of drives a "
        "node\n",
        job.gpus, job.gpus == 1 ? "" : "s", job.machine.name, gb(job.machine.device_bytes),
        job.machine.device_bytes / static_cast<double>(kGiB), gb(job.machine.host_bytes),
        gb(job.machine.drive_bytes));
  fmt::print(
      "Micro-batches of {} sequence{} of {} tokens; a step is {} of them for each GPU{}\n",
      job.micro_batch, job.micro_batch == 1 ? "" : "s", job.sequence, job.micro_batches,
      command.usual.empty() ? "" : fmt::format(" (not asked, so the usual:{})", command.usual));
  fmt::print(
      "Training in 16 bits with AdamW, a parameter's state: {:g} bytes + {:g} of its gradient + "
      "{:g} of its fp32 master and moments{}\n",
      job.recipe.param, job.recipe.gradient, job.recipe.optimizer(),
      command.asks_fp32 ? ", although the config asks for fp32" : "");
}

const char* device_column(const Machine& machine) {
  return machine.one_memory ? "CPU GB" : "GPU GB";
}

void print_row(const Verdict& one, char mark, std::string_view last) {
  fmt::print("{} {:<27}{:>8}{:>9}{:>9}  {:<19}{:>8}  {}\n", mark, one.name, gb(one.device_bytes),
             gb(one.host_bytes), gb(one.drive_bytes), effort_word(one.training),
             one.fits() ? fmt::format("{:.3g}", one.time.seconds) : "", last);
}

void print_fitting(const Machine& machine, const Comparison& comparison) {
  if (std::ranges::none_of(comparison.verdicts, &Verdict::fits)) return;
  fmt::print("\n  {:<27}{:>8}{:>9}{:>9}  {:<19}{:>8}  {}\n", "what fits, simple ones first",
             device_column(machine), "host GB", "NVMe GB", "recomputes", "step s",
             "what fills first");
  for (std::size_t i = 0; i < comparison.verdicts.size(); ++i) {
    const Verdict& one = comparison.verdicts[i];
    const char mark = comparison.best == i ? '*' : comparison.second == i ? '2' : ' ';
    if (one.fits()) print_row(one, mark, one.breaks_first());
  }
  fmt::print(
      "* is where to begin: the first that fits, unless a later one is faster by more than {:.0f} "
      "% (the first takes more than {} times as long); offload only if nothing else fits. 2 is the "
      "second choice, by the same rule without *.\n"
      "Recomputes: the least that fits. Selective: backward makes norms and activation functions "
      "again; full: each layer; chunks: the loss is made in chunks of tokens; host: inputs of "
      "layers go to host memory.\n",
      (kNearlyAsFast - 1) * 100, kNearlyAsFast);
}

/// Returns each tier that has too little room, the one that lacks most first.
std::string too_much(const Verdict& one) {
  std::string said = one.breaks_first();
  for (std::size_t i = 1; i < one.needs.size(); ++i) {
    const TierNeed& need = one.needs[i];
    if (!need.fits())
      said += fmt::format("; also {}: {:.1f} GB of {:.1f} GB", name_of(need.tier), need.bytes / 1e9,
                          need.room / 1e9);
  }
  return said;
}

void print_breaking(const Machine& machine, const Comparison& comparison) {
  const auto breaks = [](const Verdict& one) { return one.refusal.empty() && !one.fits(); };
  if (std::ranges::none_of(comparison.verdicts, breaks)) return;
  fmt::print("\n  {:<27}{:>8}{:>9}{:>9}  {:<19}{:>8}  {}\n", "what does not fit",
             device_column(machine), "host GB", "NVMe GB", "recomputes", "",
             "what is too much, with the recomputing that comes nearest");
  for (const Verdict& one : comparison.verdicts)
    if (breaks(one)) print_row(one, ' ', too_much(one));
}

void print_refused(const Comparison& comparison) {
  if (std::ranges::all_of(comparison.verdicts, &std::string::empty, &Verdict::refusal)) return;
  fmt::print("\n  {:<27}{}\n", "what is refused", "why");
  for (const Verdict& one : comparison.verdicts)
    if (!one.refusal.empty()) fmt::print("  {:<27}{}\n", one.name, one.refusal);
}

void print_columns(const Machine& machine) {
  fmt::print(
      "\n{} is of one {} at the worst instant of a step, with a margin of {:.0f} %{}. ",
      device_column(machine), device_word(machine), kMemoryMargin * 100,
      machine.one_memory ? "; it lies in host memory too" : " and what lies beside the allocator");
  fmt::print("Host and NVMe GB are of a node, whose host memory may be filled to {:.0f} %.\n",
             kHostShare * 100);
}

/// What a line of memory is, in words.
struct Meaning {
  std::string_view what, means;
};
constexpr Meaning kMeanings[] = {
    {"parameters", "16-bit; what this rank keeps of them"},
    {"frozen parameters", "16-bit, not trained"},
    {"second copy of the parameters (hpZ)", "of the node, so that backward gathers within it"},
    {"gradients", "16-bit, reduced"},
    {"master", "the fp32 copy of parameters that AdamW updates"},
    {"moments", "AdamW's two running averages, of gradients and of their squares, in fp32"},
    {"the other slot of masters and moments", "a step writes beside the last one, not over it"},
    {"buckets", "gradients that are collected to be sent together"},
    {"buffers between drive and update", "what is read, updated and written at this moment"},
    {"gathered layers", "parameters of the layers at work, whole"},
    {"gathered head", "the output layer's parameters, whole"},
    {"activations", "what forward keeps for backward"},
    {"inputs of layers", "what forward keeps where layers are computed again"},
    {"activations of the layer", "computed again in backward"},
    {"gradients of its activations", "of the layer at work"},
    {"gradients that are not reduced yet", "of the layer at work and of the head, whole"},
    {"logits and their loss", "the output layer's result, a number for each word and token"},
    {"the head's input and its gradient", "beside the logits"}};

std::string_view meaning_of(std::string_view what) {
  const auto* const found = std::ranges::find(kMeanings, what, &Meaning::what);
  return found == std::end(kMeanings) ? "" : found->means;
}

void print_line(std::string_view what, double bytes, std::string_view means = {}) {
  fmt::print("  {:<38}{:>9.2f} GB{}{}\n", what, bytes / 1e9, means.empty() ? "" : "  ", means);
}

void print_tier(const Job& job, const Verdict& best, const TierNeed& need) {
  const bool device = need.tier == Tier::kDevice;
  const bool both = need.tier == Tier::kHost && job.machine.one_memory;
  const int per_node = std::min(job.machine.gpus, best.training.layout.ranks());
  fmt::print("\n{}: {:.1f} of {:.1f} GB\n",
             device || both
                 ? fmt::format("{} of {}, at the worst instant ({})",
                               both ? "Memory" : "GPU memory", best.name, best.memory.worst().name)
                 : fmt::format("{} of a node, all the time",
                               need.tier == Tier::kHost ? "Host memory" : "NVMe"),
             need.bytes / 1e9, need.room / 1e9);
  if (device || both)
    for (const MemoryLine& line : best.memory.worst().lines)
      print_line(line.what, line.bytes, meaning_of(line.what));
  for (const MemoryLine& line : best.memory.below)
    if (line.tier == need.tier) print_line(line.what, line.bytes * per_node, meaning_of(line.what));
  if (device || both) {
    print_line("margin", best.margin_bytes(), "for the allocator's blocks");
    print_line("beside the allocator", best.beside_bytes(), "a context and communicators");
  }
}

/// Says how far the step is above the bound.
std::string above_bound(const StepTime& time) {
  const double above = time.seconds / time.bound - 1;
  return fmt::format(
      "  the busiest: no schedule makes a step shorter than that, and this one {}",
      above < 0.005 ? "is as short" : fmt::format("is {:.0f} % longer", 100 * above));
}

/// Says what moves in a step, beneath which compute, and what that adds to the step.
void print_flows(const Verdict& best) {
  if (best.time.flows.empty()) return;
  fmt::print(
      "\nWhat moves in that step, beneath which compute, and how many tokens (of a data rank) hide "
      "it:\n");
  const std::int64_t of_pass = best.training.tokens();
  const std::int64_t of_step = of_pass * best.training.micro_batches;
  for (const Flow& flow : best.time.flows) {
    const std::int64_t had = flow.of_pass ? of_pass : of_step;
    const double enough = flow.hidden_from(static_cast<double>(had));
    fmt::print("  {:<38}{:>9.3f} s  {:<35}adds {}{}\n", flow.what, flow.seconds,
               flow.meanwhile.empty()
                   ? "beneath nothing"
                   : fmt::format("beneath {:.3f} s of {}", flow.compute, flow.meanwhile),
               flow.exposed() > 0 ? fmt::format("{:.3f} s", flow.exposed()) : "nothing",
               enough > 0 ? fmt::format(": it takes {} tokens a {}, there are {}", about(enough),
                                        flow.of_pass ? "pass" : "step", grouped(had))
                          : "");
  }
}

void print_time(const Verdict& best) {
  fmt::print("\nA step of {}: {:.3g} s\n", best.name, best.time.seconds);
  for (const TimeLine& line : best.time.lines)
    fmt::print("  {:<38}{:>9.3f} s\n", line.what, line.seconds);
  fmt::print("Meanwhile these work, much of it at the same time:\n");
  for (const TimeLine& line : best.time.busy)
    fmt::print("  {:<38}{:>9.3f} s{}\n", line.what, line.seconds,
               line.what == best.time.binds ? above_bound(best.time) : "");
  print_flows(best);
}

void print_exactness(const Machine& machine) {
  fmt::print(
      "\nHow exact this is: memory is within 2 % (median) and {:.0f} % (worst) of 21 measured "
      "settings of FSDP2 with up to 235 billion parameters, before the margin of {:.0f} %, with "
      "which none takes more. Time is within "
      "6 % on average of 720 steps on one node of A100, and 7 % of 55 on up to 512 of them; its "
      "constants were chosen with these steps in view. Other machines are assumed to reach the "
      "same shares of their figures: 28 runs on A6000, H100 and H200 took 1.02 to 2.9 times the "
      "predicted time (median 1.45). Offload is computed from bytes and links, and was not "
      "compared with runs "
      "(bench/results/oracles_202611.md).\n"
      "Figures of {}: {}.\n"
      "When to choose what, and the pitfalls of each: docs/choosing.md.\n",
      kMemoryWorstError * 100, kMemoryMargin * 100, machine.name, machine.figures);
}

}  // namespace

void print_strategies(const StrategiesCommand& command, const Comparison& comparison) {
  const Job& job = command.job;
  fmt::print("{}\n\n", answer(job, comparison));
  print_facts(command);
  fmt::print("\n{}\n", decision(job, comparison));
  print_fitting(job.machine, comparison);
  print_breaking(job.machine, comparison);
  print_refused(comparison);
  print_columns(job.machine);
  if (comparison.best) {
    const Verdict& best = comparison.verdicts[*comparison.best];
    for (const TierNeed& need : best.needs) print_tier(job, best, need);
    print_time(best);
  }
  print_exactness(job.machine);
}

}  // namespace ziggurat::cli

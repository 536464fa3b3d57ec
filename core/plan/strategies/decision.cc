// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/decision.cc: how the recommendation follows, in words, and what compute
// hides.
#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "core/plan/strategies/activations.h"
#include "core/plan/strategies/compare.h"
#include "core/plan/strategies/reasons.h"
#include "core/plan/strategies/words.h"

namespace ziggurat {
namespace {

constexpr std::int64_t kLongSequence = 32'768;

int nodes_of(const Job& job) { return (job.gpus + job.machine.gpus - 1) / job.machine.gpus; }

/// The share of GPU memory that one thing may take before it is said to leave too little for the
/// rest.
constexpr double kRoomShare = 0.8;

/// Says where the state lies: the first question.
std::string of_state(const Job& job, double state) {
  const Machine& machine = job.machine;
  const double all = machine.device_bytes * job.gpus;
  const std::string_view device = device_word(machine);
  const std::string one = fmt::format("One {} ({})", device, whole_gb(machine.device_bytes));
  std::string said = fmt::format("The state of this training is {}. ", whole_gb(state));
  if (state <= kRoomShare * machine.device_bytes) return said + one + " holds it.";
  if (state <= machine.device_bytes)
    return said + one + " would be nearly full of it, so that little is left for activations.";
  if (state <= kRoomShare * all) {
    return said + fmt::format(
                      "{} does not hold it, but the {} GPUs together do ({}): it is divided among "
                      "them.",
                      one, job.gpus, whole_gb(all));
  }
  if (state <= all) {
    return said + fmt::format(
                      "All {} GPUs would be full of it ({}): a part must lie in host memory or on "
                      "NVMe, unless all is divided and activations are computed again.",
                      job.gpus, whole_gb(all));
  }
  const std::string where = machine.one_memory ? "on NVMe" : "in host memory or on NVMe";
  return said + fmt::format("{} not hold it ({}): a part must lie {}.",
                            job.gpus == 1 ? fmt::format("The {} does", device)
                                          : fmt::format("All {} GPUs do", job.gpus),
                            whole_gb(all), where);
}

/// Says whether a layer fits: where it does not, only dividing layers helps.
std::string of_layer(const Job& job, const Training& training, bool works_whole) {
  const RankParameters params = rank_parameters(training);
  const bool experts = job.model.has_experts(job.model.layers - 1);
  const double need =
      2 * 2 * params.layer + needed_bytes(training, experts) + gradient_bytes(training, experts);
  const double room = kRoomShare * job.machine.device_bytes;
  const std::string beside = fmt::format(
      "A layer at work (its parameters, their gradients and its activations) takes {}, "
      "{} than {}, {:.0f} % of a {}",
      whole_gb(need), need <= room ? "less" : "more", whole_gb(room), 100 * kRoomShare,
      device_word(job.machine));
  if (need <= room)
    return beside + fmt::format(": so one {} can work on a whole layer, without TP.",
                                device_word(job.machine));
  return beside + (works_whole ? ": it fits, but leaves little."
                               : ": divide layers (TP), or shorten the micro-batch.");
}

std::string of_recompute(const Training& training) {
  if (training.recompute == Recompute::kNothing)
    return "Activations fit without computing anything again.";
  if (training.recompute == Recompute::kSelective)
    return "Activations fit when backward computes norms and activation functions again, but no "
           "product (selective recomputation).";
  std::string said = "Activations fit when backward computes each layer again";
  if (training.software.loss_tokens > 0)
    said += fmt::format(", the loss is computed in chunks of {} tokens",
                        grouped(training.software.loss_tokens));
  if (training.offloads_activations) said += ", and the inputs of layers go to host memory";
  return said + ".";
}

/// Says how many GPUs it takes, beside what states alone would suggest.
std::string of_counts(const Job& job, const Comparison& comparison) {
  const bool alone = job.machine.network_bandwidth <= 0;
  const std::string said =
      fmt::format("States alone would fit on {} GPU{}; with all else, plain FSDP2 ",
                  comparison.fewest_by_states, comparison.fewest_by_states == 1 ? "" : "s");
  if (alone && comparison.fewest == 1) return said + "works on one.";
  if (comparison.fewest > 0)
    return said + fmt::format("works from {} on (tried: 1, 2, 4 and so on{}).",
                              grouped(comparison.fewest),
                              alone ? fmt::format(", at most {}", job.machine.gpus) : "");
  if (alone) return said + "does not fit this machine, which has no network to others.";
  return said + "does not fit any number up to 4,096.";
}

}  // namespace

std::string decision(const Job& job, const Comparison& comparison) {
  Training alone;
  alone.model = job.model;
  alone.recipe = job.recipe;
  alone.lora = job.lora;
  alone.sequence = job.sequence;
  alone.micro_batch = job.micro_batch;
  const RankParameters params = rank_parameters(alone);
  const double state = job.lora.rank > 0 ? alone.frozen_param_bytes * params.total() +
                                               job.recipe.total() * params.adapters
                                         : job.recipe.total() * params.total();
  const bool works_whole =
      comparison.best && comparison.verdicts[*comparison.best].training.layout.tp == 1;
  std::string said = of_state(job, state) + " " + of_layer(job, alone, works_whole);
  if (job.gpus > job.machine.gpus && job.machine.network_bandwidth > 0) {
    said +=
        fmt::format(" The ranks lie on {} nodes, between which a ring moves {:.0f} GB/s",
                    nodes_of(job), job.machine.network_bandwidth * job.machine.reach.network / 1e9);
    said += job.machine.gpus > 1
                ? fmt::format(", and within which {:.0f}.", job.machine.peer_bandwidth / 1e9)
                : ".";
  }
  if (job.sequence >= kLongSequence) {
    said += fmt::format(
        " Sequences of {} tokens are long: activations decide, not states, and "
        "dividing rows (sequence parallelism) helps more than dividing states.",
        grouped(job.sequence));
  }
  if (!job.machine.one_memory) said += " " + of_counts(job, comparison);
  const auto refused = [](const Verdict& one) { return !one.refusal.empty(); };
  if (std::ranges::all_of(comparison.verdicts, refused))
    return said + " Every strategy is refused, so none was judged.";
  if (!comparison.best) return said + " " + remedy(job, comparison);
  const Verdict& best = comparison.verdicts[*comparison.best];
  return said + " " + of_recompute(best.training) + " " + reason(job, comparison);
}

namespace {

/// Adds what leaves the GPU for an update elsewhere. With LoRA that is too little to count.
void add_update(const Job& job, double rate, std::vector<Hidden>& all) {
  const Machine& machine = job.machine;
  const double nodes = nodes_of(job);  // each updates its part of the state
  if (!machine.one_memory)
    all.push_back({"gradients to the host, in backward (2 B)",
                   rate * 2 / (4 * machine.link_bandwidth * job.gpus), false});
  all.push_back({"AdamW on the host, in the whole step (28 B)",
                 rate * 28 / (6 * machine.host_bandwidth * machine.reach.host * nodes), false});
  if (machine.drive_bandwidth <= 0) return;
  all.push_back({"masters and moments from and to NVMe, in the whole step (24 B)",
                 rate * 24 / (6 * machine.drive_bandwidth * nodes), false});
}

}  // namespace

std::vector<Hidden> hidden_at(const Job& job) {
  // Ren et al. 2021 and section 6 of ZeRO-Infinity: 2 operations of a weight and token forward, 4
  // backward, 2 more if forward is made again. A flow of c bytes a parameter over a link hides
  // beneath k operations a token from c * F / (k * bandwidth) tokens on.
  const Machine& machine = job.machine;
  const ParameterCount count = count_parameters(job.model);
  const double dense = static_cast<double>(count.active) / static_cast<double>(count.total);
  const double rate = machine.flops * machine.reach.product / dense;
  const double shards = job.gpus;
  std::vector<Hidden> all;
  if (!machine.one_memory)
    all.push_back({"parameters to the GPU, in each pass (2 B)",
                   rate * 2 / (2 * machine.link_bandwidth * shards), true});
  if (job.lora.rank == 0) add_update(job, rate, all);
  if (job.gpus > 1) {
    // One ring of all ranks, as in all_reduce_time().
    const double link = job.gpus > machine.gpus ? machine.network_bandwidth * machine.reach.network
                                                : machine.peer_bandwidth;
    if (link > 0)
      all.push_back(
          {"parameters gathered among ranks, in each pass (2 B)", rate * 2 / (2 * link), true});
  }
  return all;
}

}  // namespace ziggurat

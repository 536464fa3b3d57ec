// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/compare.cc: verdicts, candidates and the recommendation.
#include "core/plan/strategies/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace ziggurat {
namespace {

constexpr std::int64_t kMostGpus = 4096;

/// What a trainer changes one after the other until it fits.
struct Try {
  Recompute recompute = Recompute::kNothing;
  std::int64_t loss_tokens = 0;
  bool offloads = false;
};
constexpr std::int64_t kLossTokens = 1024;  // of a chunk of the loss
constexpr Try kTries[] = {
    {},
    {.recompute = Recompute::kSelective},
    {.recompute = Recompute::kFull},
    {.recompute = Recompute::kFull, .loss_tokens = kLossTokens},
    {.recompute = Recompute::kFull, .loss_tokens = kLossTokens, .offloads = true}};

std::string gigabytes(double bytes) { return fmt::format("{:.1f} GB", bytes / 1e9); }

int communicators(const ParallelLayout& layout) {
  return (layout.dp > 1 ? 1 : 0) + (layout.tp > 1 ? 1 : 0) + (layout.pp > 1 ? 1 : 0) +
         (layout.dp > layout.shards() ? 1 : 0);
}

const MemoryLine* largest(const std::vector<MemoryLine>& lines, std::optional<Tier> tier = {}) {
  const MemoryLine* found = nullptr;
  for (const MemoryLine& line : lines) {
    if (tier && line.tier != *tier) continue;
    if (found == nullptr || line.bytes > found->bytes) found = &line;
  }
  return found;
}

void weigh(Verdict& verdict, const Machine& machine) {
  const int per_node = std::min(machine.gpus, verdict.training.layout.ranks());
  const double beside = (machine.one_memory ? 0 : kContextBytes) +
                        communicators(verdict.training.layout) * kCommunicatorBytes;
  verdict.device_bytes = verdict.memory.device_bytes() * (1 + kMemoryMargin) + beside;
  verdict.host_bytes = verdict.memory.bytes(Tier::kHost) * per_node;
  verdict.drive_bytes = verdict.memory.bytes(Tier::kNvme) * per_node;
  const std::vector<MemoryLine>& below = verdict.memory.below;
  verdict.needs.clear();
  const auto need = [&](Tier tier, double bytes, double room, const MemoryLine* most) {
    if (most == nullptr) return;
    const double of_most = most->bytes * (tier == Tier::kDevice ? 1 : per_node);
    verdict.needs.push_back({tier, bytes, room, most->what, of_most});
  };
  const MemoryLine* const on_device = largest(verdict.memory.worst().lines);
  const MemoryLine* const on_host = largest(below, Tier::kHost);
  const double host_room = machine.host_bytes * kHostShare;
  if (machine.one_memory) {
    const bool host = on_host != nullptr && on_host->bytes > on_device->bytes;
    need(Tier::kHost, verdict.device_bytes * per_node + verdict.host_bytes, host_room,
         host ? on_host : on_device);
  } else {
    need(Tier::kDevice, verdict.device_bytes, machine.device_bytes, on_device);
    need(Tier::kHost, verdict.host_bytes, host_room, on_host);
  }
  need(Tier::kNvme, verdict.drive_bytes, machine.drive_bytes, largest(below, Tier::kNvme));
  std::ranges::stable_sort(verdict.needs, std::ranges::greater{}, &TierNeed::share);
}

struct Candidate {
  const char* name;
  System system;
  ParallelLayout layout;
};

ParallelLayout divided(int dp, int stage, Tier params = Tier::kDevice,
                       Tier optimizer = Tier::kDevice) {
  ParallelLayout layout;
  layout.dp = dp;
  layout.stage = stage;
  layout.params = params;
  layout.optimizer = optimizer;
  return layout;
}

void add_many_ranks(const Job& job, std::vector<Candidate>& all) {
  const int gpus = job.gpus;
  const int in_node = job.machine.gpus;
  all.push_back({"DDP", System::kPyTorch, divided(gpus, 0)});
  all.push_back({"FSDP2 (ZeRO-3)", System::kPyTorch, divided(gpus, 3)});
  all.push_back({"ZeRO-1", System::kDeepSpeed, divided(gpus, 1)});
  all.push_back({"ZeRO-2", System::kDeepSpeed, divided(gpus, 2)});
  ParallelLayout kept = divided(gpus, 3);
  kept.keeps_gathered = true;
  all.push_back({"FSDP, SHARD_GRAD_OP", System::kPyTorch, kept});
  if (gpus > in_node && in_node > 1) {
    ParallelLayout hybrid = divided(gpus, 3);
    hybrid.shard_group = in_node;
    all.push_back({"HSDP, a copy a node", System::kPyTorch, hybrid});
    ParallelLayout plus = divided(gpus, 3);
    plus.hpz = in_node;
    plus.quantized = true;
    all.push_back({"ZeRO++", System::kDeepSpeed, plus});
  }
  if (job.model.experts.count > 0) {
    ParallelLayout experts = divided(gpus, 3);
    experts.ep = std::min(in_node, gpus);
    all.push_back({"FSDP2, experts in the node", System::kPyTorch, experts});
  }
  const int tp = std::min(in_node, gpus);
  if (tp > 1 && gpus % tp == 0) {
    ParallelLayout tensor = divided(gpus / tp, 1);
    tensor.tp = tp;
    tensor.sequence_parallel = true;
    all.push_back({"TP in the node, ZeRO-1", System::kMegatron, tensor});
    const int nodes = gpus / tp;
    if (nodes > 1) {
      ParallelLayout pipeline = tensor;
      pipeline.pp = nodes;
      pipeline.dp = 1;
      all.push_back({"TP in the node, PP across", System::kMegatron, pipeline});
    }
  }
}

std::vector<Candidate> candidates(const Job& job) {
  std::vector<Candidate> all;
  if (job.gpus == 1)
    all.push_back(
        {job.machine.one_memory ? "undivided" : "one GPU", System::kPyTorch, divided(1, 0)});
  else
    add_many_ranks(job, all);
  using enum Tier;
  const int gpus = job.gpus;
  all.push_back({"ZeRO-Offload (stage 2)", System::kDeepSpeed, divided(gpus, 2, kDevice, kHost)});
  all.push_back({"ZeRO-3, all in host memory", System::kDeepSpeed, divided(gpus, 3, kHost, kHost)});
  all.push_back({"ZeRO-Infinity, NVMe", System::kDeepSpeed, divided(gpus, 3, kHost, kNvme)});
  all.push_back({"Ziggurat, host memory", System::kZiggurat, divided(gpus, 3, kHost, kHost)});
  all.push_back({"Ziggurat, state on NVMe", System::kZiggurat, divided(gpus, 3, kHost, kNvme)});
  return all;
}

std::int64_t fewest_that_work(const Job& job) {
  const bool alone = job.machine.network_bandwidth <= 0;
  for (std::int64_t next = 1; next <= kMostGpus; next *= 2) {
    // A machine alone may have 6 GPUs: then these are tried last.
    const std::int64_t gpus = alone ? std::min<std::int64_t>(next, job.machine.gpus) : next;
    if (alone && next >= 2 * std::int64_t{job.machine.gpus}) return 0;
    Job tried = job;
    tried.gpus = static_cast<int>(gpus);
    if (judge(tried, "", System::kPyTorch, divided(tried.gpus, 3)).fits()) return gpus;
  }
  return 0;
}

/// Returns the one to begin with, if `without` were not there.
std::optional<std::size_t> chosen(const std::vector<Verdict>& verdicts,
                                  std::optional<std::size_t> without) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < verdicts.size(); ++i) {
    const Verdict& verdict = verdicts[i];
    if (i == without || !verdict.fits()) continue;
    if (!best) {
      best = i;
      continue;
    }
    // Offload is for what does not fit without: it is more to set up, and its times were not
    // compared with runs.
    if (verdict.offloads() && !verdicts[*best].offloads()) continue;
    if (verdict.time.seconds * kNearlyAsFast < verdicts[*best].time.seconds) best = i;
  }
  return best;
}

}  // namespace

std::string_view name_of(Tier tier) noexcept {
  switch (tier) {
    case Tier::kDevice: return "GPU memory";
    case Tier::kHost: return "host memory";
    case Tier::kNvme: return "the drives";
  }
  return "unknown";
}

std::string_view device_word(const Machine& machine) noexcept {
  return machine.one_memory ? "machine" : "GPU";
}

std::string TierNeed::most_of_it() const {
  return (2 * most_bytes > bytes ? "most of it " : "the largest part ") + most;
}

std::string Verdict::breaks_first() const {
  if (needs.empty()) return "";
  const TierNeed& first = needs.front();
  if (!first.fits() && first.room <= 0)
    return fmt::format("{}: {} of none, {}", name_of(first.tier), gigabytes(first.bytes),
                       first.most_of_it());
  if (!first.fits()) {
    return fmt::format("{}: {} of {}, {}", name_of(first.tier), gigabytes(first.bytes),
                       gigabytes(first.room), first.most_of_it());
  }
  return fmt::format("{}, {:.0f} % full, {}", name_of(first.tier), 100 * first.share(),
                     first.most_of_it());
}

const TierNeed* Verdict::barely_fits() const noexcept {
  const auto device = std::ranges::find(needs, Tier::kDevice, &TierNeed::tier);
  // Where the cores are the device, its memory is the host's.
  const auto found =
      device != needs.end() ? device : std::ranges::find(needs, Tier::kHost, &TierNeed::tier);
  // The margin is the allocator's.
  const double worse = memory.device_bytes() * kMemoryWorstError;
  return fits() && found != needs.end() && found->bytes + worse > found->room ? &*found : nullptr;
}

Training training_of(const Job& job, System system, const ParallelLayout& layout) {
  Training training;
  training.model = job.model;
  training.layout = layout;
  training.recipe = job.recipe;
  training.lora = job.lora;
  training.sequence = job.sequence;
  training.micro_batch = job.micro_batch;
  // All strategies compute the same tokens in a step: fewer data ranks make more micro-batches
  // each.
  training.micro_batches =
      std::max<std::int64_t>(1, job.micro_batches * job.gpus / std::max(1, layout.dp));
  // DeepSpeed's reduce_bucket_size and allgather_bucket_size are 5e8 elements each.
  if (system == System::kDeepSpeed && layout.stage > 0)
    training.software.bucket_bytes = 2 * 2 * 5e8;
  if (system == System::kPyTorch && layout.stage == 0 && layout.dp > 1)
    training.software.bucket_bytes = 25.0 * 1024 * 1024;  // DDP's bucket_cap_mb
  if (system != System::kZiggurat) return training;
  training.software.update_hides = true;
  training.software.unreduced_bytes =
      4;  // a unit's gradient is fp32 on the device, and leaves whole
  training.software.unreduced_head_bytes = 4;
  training.software.two_slots = true;
  training.software.staged = true;
  training.software.swap_parameters = 2e6;  // 12 records of 6 MiB in all (core/plan/host_plan.h)
  return training;
}

Verdict judge(const Job& job, std::string name, System system, const ParallelLayout& layout) {
  Verdict verdict;
  verdict.name = std::move(name);
  verdict.system = system;
  verdict.refusal = refusal_of(system, job.model, layout);
  if (verdict.refusal.empty() && layout.ranks() > job.machine.gpus &&
      job.machine.network_bandwidth <= 0) {
    verdict.refusal =
        job.machine.one_memory
            ? fmt::format("the cores of {} are planned as one device: leave ranks out",
                          job.machine.name)
            : fmt::format("{} has {} GPU{} and no network: give at most so many ranks",
                          job.machine.name, job.machine.gpus, job.machine.gpus == 1 ? "" : "s");
  }
  verdict.training = training_of(job, system, layout);
  if (!verdict.refusal.empty()) return verdict;
  std::optional<Verdict> nearest;
  for (const Try& one : kTries) {
    verdict.training.recompute = one.recompute;
    verdict.training.offloads_activations = one.offloads;
    verdict.training.software.loss_tokens = one.loss_tokens;
    verdict.memory = step_memory(verdict.training);
    weigh(verdict, job.machine);
    if (!nearest || verdict.needs.front().share() < nearest->needs.front().share())
      nearest = verdict;
    if (verdict.fits()) break;
  }
  nearest->time = step_time(nearest->training, job.machine);
  return *std::move(nearest);
}

Comparison compare(const Job& job, const std::optional<ParallelLayout>& asked) {
  Comparison comparison;
  if (asked) {
    comparison.asked = comparison.verdicts.size();
    comparison.verdicts.push_back(judge(job, "as you asked", System::kDeepSpeed, *asked));
  }
  for (const Candidate& candidate : candidates(job))
    comparison.verdicts.push_back(judge(job, candidate.name, candidate.system, candidate.layout));
  comparison.best = chosen(comparison.verdicts, std::nullopt);
  comparison.second = chosen(comparison.verdicts, comparison.best);
  Training alone = training_of(job, System::kPyTorch, {});
  const RankParameters params = rank_parameters(alone);
  const double count = params.total();
  comparison.fewest_by_states =
      job.lora.rank > 0
          ? static_cast<std::int64_t>(std::ceil(
                (alone.frozen_param_bytes * count + job.recipe.total() * params.adapters) /
                job.machine.device_bytes))
          : fewest_devices(count, job.recipe, job.machine.device_bytes, 0);
  comparison.fewest = fewest_that_work(job);
  return comparison;
}

}  // namespace ziggurat

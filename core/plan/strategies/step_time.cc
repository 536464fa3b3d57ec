// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/step_time.cc: puts a step together from layers, exchanges and the update.
#include "core/plan/strategies/step_time.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/plan/strategies/activations.h"
#include "core/plan/strategies/step_memory.h"

namespace ziggurat {
namespace {

constexpr double kUpdateBytes = 28;  // 4 + 4 + 4 + 2 read and as much written (ARCHITECTURE.md)

double sum_bytes(const Training& training) {  // of one tensor-parallel sum
  return 2.0 * static_cast<double>(training.tokens()) * static_cast<double>(training.model.hidden);
}

/// The work of one micro-batch on one pipeline stage.
struct Stage {
  double forward = 0;  ///< of all its layers, with tensor-parallel sums
  double again = 0;    ///< what backward makes again of it
  double backward = 0;
  double sums = 0;     ///< of tensor-parallel ranks, in the above
  double passing = 0;  ///< of activations and gradients to the neighbours
  double middle() const noexcept { return forward + again + backward + passing; }
};

Stage stage_of(const Training& training, const Machine& machine) {
  const ModelShape& model = training.model;
  const ParallelLayout& layout = training.layout;
  const auto all = static_cast<double>(model.layers);
  const double with_experts = model.experts.count == 0
                                  ? 0
                                  : static_cast<double>(std::max<std::int64_t>(
                                        0, model.layers - model.experts.dense_layers));
  const double share = static_cast<double>(layout.layers_of_a_rank(model.layers)) / all;
  Stage stage;
  const auto add = [&](double layers, bool experts) {
    if (layers <= 0) return;
    const LayerTime time = layer_time(training, machine, experts);
    stage.forward += layers * share * time.forward;
    stage.backward += layers * share * time.backward;
    stage.again += layers * share * time.again;
  };
  add(all - with_experts, false);
  add(with_experts, true);
  const double computed = stage.forward;
  const int per_node = std::min(layout.tp, machine.gpus);
  const double sum = all_reduce_time(training, machine, sum_bytes(training), layout.tp, per_node,
                                     std::max(1, machine.gpus / layout.tp));
  const double of_a_pass = 2 * sum * all * share;
  stage.forward += of_a_pass;
  stage.backward += of_a_pass;
  if (layout.ep > 1) {
    // Each token goes to its experts and comes back, in forward and in backward.
    const double sent = 2 * static_cast<double>(model.experts.per_token) * sum_bytes(training);
    const double link = layout.ep <= machine.gpus
                            ? machine.peer_bandwidth
                            : machine.network_bandwidth * machine.reach.network / machine.gpus;
    const double pass = with_experts * share * sent * (layout.ep - 1) / layout.ep / link;
    stage.forward += pass;
    stage.backward += pass;
  }
  // A layer that is made again whole also repeats its exchanges.
  if (training.recompute == Recompute::kFull) stage.again += stage.forward - computed;
  stage.sums = of_a_pass * (2 + (training.recompute == Recompute::kFull ? 1 : 0));
  if (layout.pp > 1) {
    // Each tensor rank sends its part of the rows (Narayanan et al. 2021, section 4.1).
    const bool one_node = layout.ranks() <= machine.gpus;
    const double link = one_node ? machine.peer_bandwidth
                                 : machine.network_bandwidth * machine.reach.network / machine.gpus;
    stage.passing = 2 * sum_bytes(training) / layout.tp / link;
  }
  return stage;
}

/// Returns how long an all-reduce takes if each rank sends every other its part, and then its sum.
/// Within a node a byte is read from host memory and written there.
double direct_time(const Machine& machine, double bytes, int ranks, int per_node) {
  if (ranks <= 1) return 0;
  const double host = machine.host_bandwidth * machine.reach.host / per_node / 2;
  const double near = bytes * (per_node - 1) / ranks / host;
  if (ranks <= per_node) return 2 * near;
  const double far = bytes * (ranks - per_node) / ranks * per_node /
                     (machine.network_bandwidth * machine.reach.network);
  return 2 * std::max(near, far);
}

/// What ranks send of parameters and gradients, and how much of it compute hides.
struct ExchangeTime {
  std::vector<Flow> flows;
  double in_forward = 0;  ///< of what they add to the step
  void add(const char* what, double seconds, double compute, const char* meanwhile) {
    if (seconds > 0) flows.push_back({what, seconds, compute, 0, meanwhile, true});
  }
  double seconds() const noexcept {
    return std::accumulate(flows.begin(), flows.end(), 0.0,
                           [](double sum, const Flow& flow) { return sum + flow.seconds; });
  }
  double exposed() const noexcept {
    return std::accumulate(flows.begin(), flows.end(), 0.0,
                           [](double sum, const Flow& flow) { return sum + flow.exposed(); });
  }
};

ExchangeTime exchange_of(const Training& training, const Machine& machine, const Stage& stage,
                         const RankParameters& params) {
  const ParallelLayout& layout = training.layout;
  const bool adapts = training.lora.rank > 0;
  const double trained = adapts ? params.adapters : params.total();
  const int in_node = std::max(1, machine.gpus / std::max(1, layout.tp));
  const auto whole = [&](double count, int ranks) {
    const int near = std::min(ranks, in_node);
    double seconds = training.software.direct
                         ? direct_time(machine, 2 * count, ranks, near)
                         : all_reduce_time(training, machine, 2 * count, ranks, near,
                                           ranks > in_node ? std::min(machine.gpus, layout.tp) : 1);
    // Twice as a whole: to be summed, and as the sum.
    if (training.software.staged && ranks > 1)
      seconds = std::max(seconds, 2 * 2 * count / machine.link_bandwidth);
    return seconds;
  };
  ExchangeTime exchange;
  const bool overlaps = training.software.overlaps;
  if (layout.stage < 3) {
    exchange.add(
        layout.stage == 0 ? "gradients among ranks" : "gradients and parameters among ranks",
        whole(trained, layout.dp), overlaps ? stage.backward + stage.again : 0,
        overlaps ? "last backward" : "");
    return exchange;
  }
  // A gather is half an all-reduce, and so is a scatter of gradients. ZeRO++ gathers a byte and
  // sends half a byte of each 16-bit value, and gathers a second time within groups (Wang et al.
  // 2023).
  const auto micro = static_cast<double>(training.micro_batches);
  const double passes = training.software.vertical ? 1 : micro;
  const double all = params.total() + params.adapters;
  const double gather = whole(all, layout.shards()) / 2 * (layout.quantized ? 0.5 : 1);
  const double reduce = whole(trained, layout.shards()) / 2 * (layout.quantized ? 0.25 : 1);
  const double replicas = layout.dp > layout.shards()
                              ? whole(trained / layout.shards(), layout.dp / layout.shards())
                              : 0;
  double again = layout.keeps_gathered ? 0 : gather;
  if (layout.hpz > 0) again = whole(all, layout.hpz) / 2;
  exchange.add("parameters gathered among ranks", passes * gather,
               overlaps ? micro * stage.forward : 0, overlaps ? "forward" : "");
  if (overlaps && !exchange.flows.empty()) exchange.in_forward = exchange.exposed();
  exchange.add(
      again > 0 ? "gathered again, and gradients reduced" : "gradients reduced among ranks",
      passes * (again + reduce), overlaps ? micro * (stage.backward + stage.again) : 0,
      overlaps ? "backward" : "");
  exchange.add("gradients among copies of the model", replicas, 0, "");
  return exchange;
}

/// The update, where it runs, and what it moves.
struct Update {
  double device = 0, host = 0, drive = 0;
  double link = 0;
  double gathered = 0;  ///< of `link`, what moves as part of an exchange
};

Update update_of(const Training& training, const Machine& machine, const RankParameters& params) {
  const ParallelLayout& layout = training.layout;
  const double own = params.updated_by_a_rank(layout);
  Update update;
  if (layout.optimizer == Tier::kDevice) {
    update.device = kUpdateBytes * own / (machine.device_bandwidth * machine.reach.stream);
  } else {
    const double node = own * std::min(machine.gpus, layout.ranks());
    update.host = kUpdateBytes * node / (machine.host_bandwidth * machine.reach.host);
    update.link = (2 + 2) * own / machine.link_bandwidth;
    if (layout.optimizer == Tier::kNvme && machine.drive_bandwidth > 0)
      update.drive = 2 * training.recipe.optimizer() * node / machine.drive_bandwidth;
  }
  const double steps = training.software.vertical ? 1 : static_cast<double>(training.micro_batches);
  const double passes = layout.keeps_gathered ? 1 : 2;  // backward brings parameters again
  const int shards = layout.stage == 3 ? layout.shards() : 1;
  if (training.software.staged && shards > 1) {
    // Gradients leave whole too, of adapters alone where there are some.
    const double leave = training.lora.rank > 0 ? params.adapters : params.total();
    const double come = passes * (params.total() + params.adapters);
    update.gathered = steps * 2 * (come + leave) / machine.link_bandwidth;
    update.link += update.gathered;
  } else if (layout.params != Tier::kDevice) {
    update.link += steps * passes * 2 * params.total() / shards / machine.link_bandwidth;
  }
  return update;
}

/// Returns the flows of an update elsewhere. Clipping waits for the last gradient, so an update on
/// the host runs after backward, beneath the next forward at best.
std::vector<Flow> flows_of(const Update& update, const Training& training, const Stage& stage,
                           double waits) {
  const auto micro = static_cast<double>(training.micro_batches);
  std::vector<Flow> flows;
  const double below = std::max(update.host, update.drive);
  Flow updated{update.drive > update.host ? "update, at the drives' speed" : "update on the host",
               below,
               0,
               0,
               "",
               false};
  if (training.software.update_hides) {
    updated.compute = micro * stage.forward;
    updated.waits = waits;
    updated.meanwhile = "next forward";
  }
  if (below > 0) flows.push_back(std::move(updated));
  Flow copied{"copies between host and device", update.link - update.gathered, 0, 0, "",
              !training.software.vertical};
  if (training.layout.params != Tier::kDevice) {
    copied.compute = micro * (stage.forward + stage.again + stage.backward);
    copied.meanwhile = "both passes";
  }
  if (copied.seconds > 0) flows.push_back(std::move(copied));
  return flows;
}

void add(StepTime& time, std::string what, double seconds) {
  if (seconds <= 0) return;
  time.lines.push_back({std::move(what), seconds});
  time.seconds += seconds;
}

void bind(StepTime& time, const char* what, double seconds) {
  if (seconds > 0) time.busy.push_back({what, seconds});
  if (seconds <= time.bound) return;
  time.bound = seconds;
  time.binds = what;
}

}  // namespace

double Flow::exposed() const noexcept { return std::max(0.0, seconds - compute - waits); }

double Flow::hidden_from(double tokens) const noexcept {
  if (compute <= 0) return 0;
  // With more tokens compute waits less, so that what is not hidden yet needs compute alone.
  return tokens * seconds / (exposed() > 0 ? compute : compute + waits);
}

double all_reduce_time(const Training& training, const Machine& machine, double bytes, int ranks,
                       int per_node, int rings) {
  if (ranks <= 1) return 0;
  const double link = ranks <= per_node ? machine.peer_bandwidth
                                        : machine.network_bandwidth * machine.reach.network / rings;
  return training.software.collective_start_s + bytes * 2 * (ranks - 1) / ranks / link;
}

StepTime step_time(const Training& training, const Machine& machine) {
  const ParallelLayout& layout = training.layout;
  const RankParameters params = rank_parameters(training);
  const Stage stage = stage_of(training, machine);
  const ExchangeTime exchange = exchange_of(training, machine, stage, params);
  const Update update = update_of(training, machine, params);
  const auto micro = static_cast<double>(training.micro_batches);
  const double head = head_time(training, machine) + training.software.host_micro_batch_s;
  const bool alone = layout.pp == 1;
  const double last =
      stage.middle() + head - (alone || training.software.last_stage_recomputes ? 0 : stage.again);
  const double slowest = alone ? last : std::max(stage.middle(), last);

  StepTime time;
  add(time, "compute", micro * (slowest - stage.sums - stage.passing));
  add(time, "sums of tensor-parallel ranks", micro * stage.sums);
  add(time, "activations between stages", micro * stage.passing);
  add(time, "pipeline bubble", (layout.pp - 1) * stage.middle());
  add(time, "exchanges that compute does not hide", exchange.exposed());
  add(time, "update on the device", update.device);
  const std::vector<Flow> below = flows_of(update, training, stage, exchange.in_forward);
  for (const Flow& flow : below) add(time, flow.what, flow.exposed());
  time.flows = exchange.flows;
  time.flows.insert(time.flows.end(), below.begin(), below.end());

  bind(time, "compute", micro * (slowest - stage.sums - stage.passing) + update.device);
  bind(time, "exchanges of gradients and parameters", exchange.seconds());
  bind(time, "sums of tensor-parallel ranks", micro * stage.sums);
  bind(time, "host memory, in the update", update.host);
  bind(time, "the drives", update.drive);
  bind(time, "the link between host and device", update.link);
  return time;
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/step_memory.cc: the lines of each instant.
#include "core/plan/strategies/step_memory.h"

#include <algorithm>
#include <cmath>

#include "core/plan/strategies/activations.h"

namespace ziggurat {
namespace {

constexpr double kSwapBuffers = 3;      // one is read, one updated, one written
constexpr int kGatherBufferCopies = 2;  // a table, and the buffer that ranks gather it in

using Lines = std::vector<MemoryLine>;

void add(Lines& lines, std::string what, double bytes, Tier tier = Tier::kDevice) {
  if (bytes > 0) lines.push_back({std::move(what), tier, bytes});
}

bool last_layer_has_experts(const Training& training) {
  return training.model.has_experts(training.model.layers - 1);
}

/// Adds the state that rests on the device, and puts the rest below.
void add_state(const Training& training, const RankParameters& params, Lines& device,
               Lines& below) {
  const ParallelLayout& layout = training.layout;
  const bool adapts = training.lora.rank > 0;
  ParallelLayout of_experts = layout;
  of_experts.dp = std::max(1, layout.dp / layout.ep);
  if (layout.shard_group > 0) of_experts.shard_group = std::max(1, layout.shard_group / layout.ep);
  StateBytes state = state_bytes(adapts ? params.adapters : params.dense, training.recipe, layout);
  if (!adapts) {
    const StateBytes more = state_bytes(params.experts, training.recipe, of_experts);
    state.params += more.params;
    state.second_params += more.second_params;
    state.gradients += more.gradients;
    state.master += more.master;
    state.moments += more.moments;
  } else {
    const StateRecipe frozen{training.frozen_param_bytes, 0, 0, 0};
    const double bytes = state_bytes(params.dense, frozen, layout).params +
                         state_bytes(params.experts, frozen, of_experts).params;
    add(layout.params == Tier::kDevice ? device : below, "frozen parameters", bytes, layout.params);
  }
  add(layout.params == Tier::kDevice ? device : below, "parameters", state.params, layout.params);
  add(device, "second copy of the parameters (hpZ)", state.second_params);
  const bool updates_here = layout.optimizer == Tier::kDevice;
  // An update on the host takes each gradient there as soon as it is reduced.
  add(updates_here ? device : below, "gradients", state.gradients,
      updates_here ? Tier::kDevice : Tier::kHost);
  add(updates_here ? device : below, "master", state.master, layout.optimizer);
  add(updates_here ? device : below, "moments", state.moments, layout.optimizer);
  if (layout.optimizer != Tier::kNvme) return;
  const double swapped =
      std::min(training.software.swap_parameters, params.updated_by_a_rank(layout));
  add(below, "buffers between drive and update",
      kSwapBuffers * training.recipe.optimizer() * swapped, Tier::kHost);
  if (training.software.two_slots)
    add(below, "the other slot of masters and moments", state.master + state.moments, Tier::kNvme);
}

/// Returns the layers that are gathered in 16 bits, where parameters are divided, or cast to them.
Lines gathered(const Training& training, const RankParameters& params, bool at_loss) {
  const ParallelLayout& layout = training.layout;
  const Software& software = training.software;
  Lines lines;
  const bool casts = training.recipe.param > 2 || training.frozen_param_bytes > 2;
  if (layout.stage < 3 && !casts && layout.params == Tier::kDevice) return lines;
  const double units = layout.keeps_gathered
                           ? static_cast<double>(layout.layers_of_a_rank(training.model.layers))
                           : software.gathered_units;
  add(lines, "gathered layers", 2 * units * (params.layer + params.layer_adapters));
  // Among ranks the head stays whole until backward ends. One rank has it only while it is used.
  const double copies = layout.shards() > 1 ? kGatherBufferCopies : (at_loss ? 1 : 0);
  add(lines, "gathered head", 2 * copies * params.head);
  return lines;
}

/// Returns the gradients of gathered parameters that are not reduced yet.
double unreduced_bytes(const Training& training, const RankParameters& params) {
  if (training.layout.stage < 2 && training.layout.params == Tier::kDevice) return 0;
  const Software& software = training.software;
  if (training.lora.rank > 0) return software.unreduced_bytes * params.layer_adapters;
  return software.unreduced_bytes * params.layer + software.unreduced_head_bytes * params.head;
}

/// Returns what forward has kept for backward when a micro-batch's forward ends.
Lines kept(const Training& training) {
  Lines lines;
  const double layers = layers_in_flight(training);
  if (training.recompute == Recompute::kFull) {
    const double on_device =
        training.offloads_activations
            ? std::min(layers, static_cast<double>(training.software.in_flight_layers))
            : layers;
    add(lines, "inputs of layers", on_device * input_bytes(training));
    return lines;
  }
  const ModelShape& model = training.model;
  const auto of = static_cast<double>(model.layers);
  double dense = of;
  if (model.experts.count > 0)
    dense = static_cast<double>(std::min(model.layers, model.experts.dense_layers));
  add(lines, "activations",
      layers * (dense / of * saved_bytes(training, false) +
                (of - dense) / of * saved_bytes(training, true)));
  return lines;
}

Lines joined(Lines lines, const Lines& more) {
  lines.insert(lines.end(), more.begin(), more.end());
  return lines;
}

}  // namespace

double Instant::bytes() const noexcept {
  double sum = 0;
  for (const MemoryLine& line : lines) sum += line.bytes;
  return sum;
}

const Instant& StepMemory::worst() const noexcept {
  return *std::ranges::max_element(instants, {},
                                   [](const Instant& instant) { return instant.bytes(); });
}

double StepMemory::bytes(Tier tier) const noexcept {
  double sum = 0;
  for (const MemoryLine& line : below) sum += line.tier == tier ? line.bytes : 0;
  return sum;
}

double RankParameters::updated_by_a_rank(const ParallelLayout& layout) const noexcept {
  if (adapters > 0) return layout.stage >= 1 ? adapters / layout.shards() : adapters;
  if (layout.stage < 1) return total();
  return dense / layout.shards() + experts * layout.ep / layout.shards();
}

RankParameters rank_parameters(const Training& training) {
  const ModelShape& model = training.model;
  const ParallelLayout& layout = training.layout;
  const ParameterCount count = count_parameters(model);
  RankParameters params;
  const double divided = static_cast<double>(layout.layers_of_a_rank(model.layers)) /
                         (static_cast<double>(model.layers) * layout.tp);
  const std::int64_t with_experts =
      model.experts.count == 0
          ? 0
          : std::max<std::int64_t>(0, model.layers - model.experts.dense_layers);
  const double experts =
      static_cast<double>(with_experts * model.experts.count) * static_cast<double>(count.expert);
  const auto tables = static_cast<double>(count.embedding + count.head);
  params.experts = experts * divided / layout.ep;
  params.head = static_cast<double>(model.vocabulary * model.hidden) / layout.tp;
  params.dense = (static_cast<double>(count.total) - experts - tables) * divided +
                 (layout.pp > 1 ? static_cast<double>(count.embedding) : tables) / layout.tp;
  params.layer = static_cast<double>(count.largest_layer) / layout.tp;
  if (model.experts.count > 0) {
    const double own = static_cast<double>(model.experts.count * count.expert) / layout.tp;
    params.layer -= own - own / layout.ep;
  }
  if (training.lora.rank == 0) return params;
  const auto copies = static_cast<double>(training.lora_copies);
  params.adapters = copies * static_cast<double>(lora_parameters(model, training.lora)) * divided;
  params.layer_adapters =
      params.adapters / static_cast<double>(layout.layers_of_a_rank(model.layers));
  return params;
}

StepMemory step_memory(const Training& training) {
  const RankParameters params = rank_parameters(training);
  StepMemory memory;
  Lines state;
  add_state(training, params, state, memory.below);
  add(state, "buckets", training.software.bucket_bytes);
  const Lines all = kept(training);
  if (training.offloads_activations && training.recompute == Recompute::kFull)
    add(memory.below, "inputs of layers", layers_in_flight(training) * input_bytes(training),
        Tier::kHost);

  Instant loss{"the loss", joined(joined(state, gathered(training, params, true)), all)};
  add(loss.lines, "logits and their loss", loss_bytes(training));
  add(loss.lines, "the head's input and its gradient", 3 * input_bytes(training));
  Instant backward{"backward of the last layer",
                   joined(joined(state, gathered(training, params, false)), all)};
  const bool experts = last_layer_has_experts(training);
  if (training.recompute != Recompute::kNothing) {
    const bool full = training.recompute == Recompute::kFull;
    add(backward.lines, "activations of the layer",
        needed_bytes(training, experts) - (full ? 0 : saved_bytes(training, experts)));
  }
  add(backward.lines, "gradients of its activations", gradient_bytes(training, experts));
  add(backward.lines, "gradients that are not reduced yet", unreduced_bytes(training, params));
  Instant update{"the update", state};
  memory.instants = {std::move(loss), std::move(backward), std::move(update)};
  return memory;
}

}  // namespace ziggurat

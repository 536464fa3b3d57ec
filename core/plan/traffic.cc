// SPDX-License-Identifier: Apache-2.0
// core/plan/traffic.cc: multiplies the bytes of slices by the number of receivers.
#include "core/plan/traffic.h"

#include <algorithm>

#include "collectives/quantize/quantize.h"
#include "core/sharding/shard.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t wide(int value) noexcept { return static_cast<std::uint64_t>(value); }

/// A group of ranks that exchange; `on_node` of them are on rank 0's node.
struct Group {
  int ranks;
  int on_node;
};

/// Counts the bytes when a rank sends `slice_bytes` to every other rank.
SentBytes direct(std::uint64_t slice_bytes, Group group) noexcept {
  return {.same_node = slice_bytes * wide(group.on_node - 1),
          .other_nodes = slice_bytes * wide(group.ranks - group.on_node)};
}

/// Counts the bytes of an exchange by node. A rank sends its slice to one rank of each other node;
/// then it sends the slices that came, one from each node, to all ranks of its own node. A
/// reduction goes the same way backwards.
SentBytes by_node(std::uint64_t slice_bytes, Group group) noexcept {
  const int nodes = group.ranks / group.on_node;
  return {.same_node = slice_bytes * wide(nodes) * wide(group.on_node - 1),
          .other_nodes = slice_bytes * wide(nodes - 1)};
}

/// Returns the elements of one slice of each unit, added up, when units are cut into `slices`; an
/// equal part if only the model's count is known.
std::uint64_t slice_sum(const ModelSize& model, int slices) noexcept {
  if (model.units.empty()) return (model.rank_count() + wide(slices) - 1) / wide(slices);
  std::uint64_t sum = 0;
  for (const std::uint64_t unit : model.units) sum += slice_elements(unit, slices);
  return sum;
}

class Step {
 public:
  explicit Step(const TrafficRequest& request)
      : request_(request),
        strategy_(request.strategy),
        group_(group_of(strategy_.slices())),
        slice_(slice_sum(request.model, strategy_.slices())),
        param_bytes_(slice_ * size_bytes(request.recipe.dtype)),
        grad_bytes_(slice_ * size_bytes(request.recipe.reduce_dtype)) {}

  StepTraffic total() {
    if (strategy_.zero_stage == 3) {
      // A secondary cut lasts as long as the parameters do, so only the first pass gathers from all
      // ranks.
      const int gathers = strategy_.hpz == 0 ? request_.passes : 1;
      add(Exchange::kForwardGather, gather(), gathers);
      add(Exchange::kForwardGather, backward_gather(), request_.passes - gathers);
      if (!strategy_.keeps_params_to_backward)
        add(Exchange::kBackwardGather, backward_gather(), request_.passes);
    }
    add(Exchange::kGradients, gradients(), 1);
    if (strategy_.is_hybrid()) add(Exchange::kReplicas, replicas(), 1);
    // In stage 0 the ranks gather the sums from their owners: this is the other half of the
    // all_reduce.
    if (strategy_.zero_stage < 3) {
      const Exchange exchange =
          strategy_.zero_stage == 0 ? Exchange::kGradients : Exchange::kUpdateGather;
      add(exchange, direct(param_bytes_, group_), 1);
    }
    add(Exchange::kTensorForward, within_tensor(request_.tensor.forward), 1);
    add(Exchange::kTensorAgain, within_tensor(request_.tensor.again), 1);
    add(Exchange::kTensorBackward, within_tensor(request_.tensor.backward), 1);
    add(Exchange::kTensorShared, within_tensor(request_.tensor.shared_gradients), 1);
    return std::move(traffic_);
  }

 private:
  Group group_of(int ranks) const noexcept {
    return {ranks, std::min(ranks, request_.dp_ranks_per_node)};
  }

  void add(Exchange exchange, SentBytes sent, int times) {
    sent.same_node *= wide(times);
    sent.other_nodes *= wide(times);
    if (sent.total() == 0) return;
    if (!traffic_.items.empty() && traffic_.items.back().exchange == exchange)
      traffic_.items.back().sent += sent;
    else
      traffic_.items.push_back({exchange, sent});
  }

  SentBytes gather() const noexcept {
    if (!request_.quantization.weights) return direct(param_bytes_, group_);
    return by_node(quantized_bytes(QuantizedBits::k8, slice_), group_);
  }

  /// Counts a gather for backward, from the secondary cut if there is one.
  SentBytes backward_gather() const noexcept {
    if (strategy_.hpz == 0) return gather();
    const std::uint64_t slice = slice_ * wide(strategy_.shard_group / strategy_.hpz);
    return direct(slice * size_bytes(request_.recipe.dtype), group_of(strategy_.hpz));
  }

  SentBytes gradients() const noexcept {
    const Quantization& quantization = request_.quantization;
    if (!quantization.gradients()) return direct(grad_bytes_, group_);
    const auto bits = static_cast<QuantizedBits>(quantization.gradient_bits);
    return by_node(quantized_bytes(bits, slice_), group_);
  }

  /// Divides `size_bytes` equally among the other ranks that share each layer.
  SentBytes within_tensor(std::uint64_t size_bytes) const noexcept {
    const int others = std::max(1, request_.model.tp - 1);
    const int near = std::min(request_.model.tp, request_.tensor_ranks_per_node) - 1;
    const std::uint64_t same_node = size_bytes / wide(others) * wide(near);
    return {.same_node = same_node, .other_nodes = size_bytes - same_node};
  }

  /// Counts the all_reduce of this rank's slice among the ranks that hold the same slice. There is
  /// one of these ranks in each group.
  SentBytes replicas() const noexcept {
    const int ranks = strategy_.replicas();
    const int on_node = std::max(1, request_.dp_ranks_per_node / strategy_.shard_group);
    const std::uint64_t part = (slice_ + wide(ranks) - 1) / wide(ranks);
    return direct(2 * part * size_bytes(request_.recipe.reduce_dtype),
                  {ranks, std::min(ranks, on_node)});
  }

  const TrafficRequest& request_;
  const Strategy& strategy_;
  Group group_;
  std::uint64_t slice_;        ///< elements of this rank's slices, over all units
  std::uint64_t param_bytes_;  ///< the bytes of these slices
  std::uint64_t grad_bytes_;
  StepTraffic traffic_;
};

}  // namespace

std::string_view to_string(Exchange exchange) noexcept {
  switch (exchange) {
    case Exchange::kForwardGather: return "parameters for forward";
    case Exchange::kBackwardGather: return "parameters for backward";
    case Exchange::kGradients: return "gradients";
    case Exchange::kReplicas: return "gradients across groups";
    case Exchange::kUpdateGather: return "new parameters";
    case Exchange::kTensorForward: return "layers' sums, forward";
    case Exchange::kTensorAgain: return "layers' sums, made again";
    case Exchange::kTensorBackward: return "layers' sums, backward";
    case Exchange::kTensorShared: return "gradients not divided";
  }
  return "?";
}

SentBytes& SentBytes::operator+=(const SentBytes& more) noexcept {
  same_node += more.same_node;
  other_nodes += more.other_nodes;
  return *this;
}

SentBytes StepTraffic::sent(Exchange exchange) const noexcept {
  SentBytes sum;
  for (const TrafficItem& item : items) {
    if (item.exchange == exchange) sum += item.sent;
  }
  return sum;
}

SentBytes StepTraffic::sent() const noexcept {
  SentBytes sum;
  for (const TrafficItem& item : items) sum += item.sent;
  return sum;
}

StepTraffic step_traffic(const TrafficRequest& request) {
  require_quantizable(request.quantization, request.strategy, request.dp_ranks_per_node);
  return Step(request).total();
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/plan/traffic.h: predicts the bytes that one rank sends to others in a step, before anything
// runs.
//
// To exchange V bytes in all among n ranks, each rank sends (Thakur et al. 2005, sections 4.1 and
// 4.2; a direct exchange and a ring send the same):
//
//   all_gather, reduce_scatter    V (n-1)/n
//   all_reduce                  2 V (n-1)/n
//
// In a step, with Psi bytes of parameters including padding, a rank sends about:
//
//   stage 0        all_reduce of gradients                                   2 Psi
//   stages 1, 2    reduce_scatter, all_gather of new parameters              2 Psi
//   grad-op        all_gather for forward, reduce_scatter              (K + 1) Psi
//   stage 3        all_gather for forward and backward, reduce_scatter (2K + 1) Psi
//   hybrid         the same within a group, all_reduce of the shard across groups
//
// K is 1 if all micro-batches run through one unit before the next unit, and the number of
// micro-batches if each runs through the whole model. Gradients are accumulated first, and sent
// once a step. With hpZ only the first pass gathers from all ranks.
//
// A direct exchange sends a slice to every rank of every other node: V (n-p)/n bytes leave the
// node, with p ranks on a node. An exchange by node sends a slice to one rank of each other node,
// which passes it on: V (1/p - 1/n) bytes leave the node, and the total is the same. ZeRO++'s
// exchanges (Wang et al. 2023) go by node. They have parameters in int8 (qwZ, section 4.1) and
// gradients in 8 or 4 bits (qgZ, section 4.3), in the blocks of collectives/quantize/quantize.h.
// With hpZ, backward gathers within a node. So Psi / 2 + Psi / 4 bytes go between nodes in place of
// 3 Psi.
//
// Frames around payloads, norms and agreements (8 bytes per tile of 16,384 elements) are not
// counted. How much tensor-parallel ranks exchange depends on the trainer, so
// the caller says it (TrafficRequest::tensor). Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/plan/memory.h"
#include "core/sharding/quantization.h"
#include "core/sharding/strategy.h"

namespace ziggurat {

/// The bytes that a rank sends in a step to the ranks with which it divides every layer.
struct TensorBytes {
  std::uint64_t forward = 0;
  std::uint64_t again = 0;  ///< sent for forward work that backward repeats
  std::uint64_t backward = 0;
  std::uint64_t shared_gradients = 0;  ///< gradients of parameters that are not divided
};

struct TrafficRequest {
  ModelSize model;
  Recipe recipe;
  Strategy strategy;
  Quantization quantization{};
  int dp_ranks_per_node = 1;  ///< data-parallel ranks that share a node
  int passes = 1;             ///< K above
  TensorBytes tensor{};
  int tensor_ranks_per_node = 1;  ///< ranks on one node among those that divide a layer
};

enum class Exchange : std::uint8_t {
  kForwardGather,
  kBackwardGather,
  kGradients,
  kReplicas,       ///< gradients of a hybrid, across its groups
  kUpdateGather,   ///< new parameters, where every rank keeps all of them
  kTensorForward,  ///< activations of divided layers
  kTensorAgain,
  kTensorBackward,  ///< gradients of these activations
  kTensorShared,    ///< gradients of parameters that are not divided
};
std::string_view to_string(Exchange exchange) noexcept;

struct SentBytes {
  std::uint64_t same_node = 0;
  std::uint64_t other_nodes = 0;
  std::uint64_t total() const noexcept { return same_node + other_nodes; }
  SentBytes& operator+=(const SentBytes& more) noexcept;
};

struct TrafficItem {
  Exchange exchange;
  SentBytes sent;
};

struct StepTraffic {
  std::vector<TrafficItem> items;  ///< in the order of Exchange, without items of 0 bytes
  SentBytes sent(Exchange exchange) const noexcept;
  SentBytes sent() const noexcept;
};

/// Computes what rank 0 sends in a step. Errors: require_quantizable()'s.
StepTraffic step_traffic(const TrafficRequest& request);

}  // namespace ziggurat

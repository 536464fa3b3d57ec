// SPDX-License-Identifier: Apache-2.0
// core/plan/traffic.h: the bytes that one rank sends to others in a step, before anything runs.
//
// Over n ranks, of V bytes whole, a rank sends (Thakur et al. 2005, sections 4.1 and 4.2; a direct
// exchange as much as a ring):
//
//   all_gather, reduce_scatter    V (n-1)/n
//   all_reduce                  2 V (n-1)/n
//
// and a step, of the parameters, padding included, Psi bytes:
//
//   stage 0        all_reduce of gradients                                   2 Psi
//   stages 1, 2    reduce_scatter, all_gather of new parameters              2 Psi
//   grad-op        all_gather for forward, reduce_scatter              (K + 1) Psi
//   stage 3        all_gather for forward and backward, reduce_scatter (2K + 1) Psi
//   hybrid         the same within a group, all_reduce of the shard across groups
//
// K is 1 where all micro-batches of a unit run before the next unit, and the number of
// micro-batches where each runs through the whole model. Gradients are accumulated first, and sent
// once a step. With hpZ only the first pass gathers from all ranks.
//
// A direct exchange sends a slice to every rank of another node: V (n-p)/n for p ranks on a node.
// By node, it crosses to one rank of each other node, which passes it on: V (1/p - 1/n), and the
// sum is the same. ZeRO++'s exchanges (Wang et al. 2023) go by node: int8 parameters (qwZ,
// section 4.1), gradients of 8 or 4 bits (qgZ, section 4.3), in the blocks of
// collectives/quantize/quantize.h; and with hpZ backward gathers within a node: Psi / 2 + Psi / 4
// between nodes in place of 3 Psi.
//
// Pure functions; any thread. Not counted: frames around payloads, norms and agreements (8 bytes a
// tile of 16,384 elements). What tensor-parallel ranks exchange depends on the trainer: it says how
// much (TrafficRequest::tensor).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/plan/memory.h"
#include "core/sharding/quantization.h"
#include "core/sharding/strategy.h"

namespace ziggurat {

/// Bytes that a rank sends to those with which it divides every layer, in a step.
struct TensorBytes {
  std::uint64_t forward = 0;
  std::uint64_t again = 0;  ///< what backward makes again
  std::uint64_t backward = 0;
  std::uint64_t shared_gradients = 0;  ///< of parameters that are not divided
};

struct TrafficRequest {
  ModelSize model;
  Recipe recipe;
  Strategy strategy;
  Quantization quantization{};
  int dp_ranks_per_node = 1;  ///< data-parallel neighbours that share a node
  int passes = 1;             ///< K above
  TensorBytes tensor{};
  int tensor_ranks_per_node = 1;  ///< of those that divide a layer
};

enum class Exchange : std::uint8_t {
  kForwardGather,
  kBackwardGather,
  kGradients,
  kReplicas,       ///< a hybrid's gradients across groups
  kUpdateGather,   ///< of new parameters, where every rank keeps all of them
  kTensorForward,  ///< activations of divided layers
  kTensorAgain,
  kTensorBackward,  ///< and their gradients
  kTensorShared,    ///< gradients of what is not divided
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
  std::vector<TrafficItem> items;  ///< in the order of Exchange; none of 0 bytes
  SentBytes sent(Exchange exchange) const noexcept;
  SentBytes sent() const noexcept;
};

/// Of rank 0. Errors: require_quantizable()'s.
StepTraffic step_traffic(const TrafficRequest& request);

}  // namespace ziggurat

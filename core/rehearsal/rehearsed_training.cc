// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsed_training.cc: shares of a node's figures, and times of units.
#include "core/rehearsal/rehearsed_training.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "core/plan/strategies/activations.h"
#include "core/plan/strategies/step_time.h"

namespace ziggurat {
namespace {

void require_rehearsable(const Machine& machine, const RankOfMachine& rank) {
  if (machine.drive_bandwidth <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has no drives, but the engine keeps every step on one: give "
                            "drive_bytes and drive_bandwidth",
                            machine.name));
  }
  if (rank.ranks > machine.gpus && machine.network_bandwidth <= 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has {} GPUs and no network, so {} ranks do not fit: give at most "
                            "{}, or network_bandwidth",
                            machine.name, machine.gpus, rank.ranks, machine.gpus));
  }
}

std::size_t workers_of(const Machine& machine, const RankOfMachine& rank) {
  if (rank.threads > 0) return static_cast<std::size_t>(rank.threads);
  return static_cast<std::size_t>(machine.threads > 0 ? machine.threads : kWorkersOfARank);
}

}  // namespace

RehearsedMachine rehearsed_machine(const Machine& machine, const RankOfMachine& rank) {
  require_rehearsable(machine, rank);
  const int in_node = std::min(machine.gpus, rank.ranks);
  const double host = machine.host_bandwidth * machine.reach.host / in_node;
  const CostedLink link{.bytes_per_second = machine.link_bandwidth, .latency = kCopyLatency};
  RehearsedMachine its;
  its.workers = {
      .threads = workers_of(machine, rank), .bytes_per_second = host, .latency = kJobLatency};
  its.device = {.memory_bytes = rank.device_bytes,
                .host_accessible = machine.one_memory,
                .to_device = link,
                .to_host = link,
                .own_memory = {.bytes_per_second = machine.device_bandwidth * machine.reach.stream,
                               .latency = Nanoseconds(0)}};
  its.workers_compute = machine.one_memory;
  its.drive.read_bytes_per_second = its.drive.write_bytes_per_second = machine.drive_bandwidth;
  its.drive.latency = kDriveLatency;
  its.drive.node_bytes = static_cast<std::uint64_t>(machine.drive_bytes);
  its.network.ranks = rank.ranks;
  its.network.ranks_per_node = in_node;
  // Through host memory each byte is read and written once.
  const double near = rank.nccl ? machine.peer_bandwidth : host / 2;
  its.network.within_node = {.bytes_per_s = in_node > 1 ? near : 1e9, .latency = kMessageLatency};
  const double far = machine.network_bandwidth * machine.reach.network;
  its.network.between_nodes = {.bytes_per_s = far > 0 ? far : 1e9, .latency = kMessageLatency};
  its.network.route = rank.nccl ? Route::kRing : Route::kDirect;
  return its;
}

std::vector<UnitCost> unit_costs(const Training& training, const Machine& machine) {
  const ModelShape& model = training.model;
  const auto micro = static_cast<double>(training.micro_batches);
  const LayerTime dense = layer_time(training, machine, false);
  const LayerTime experts = model.experts.count > 0 ? layer_time(training, machine, true) : dense;
  std::vector<UnitCost> costs(1);  // of the embedding, whose lookups take next to nothing
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    const LayerTime& its = model.has_experts(layer) ? experts : dense;
    costs.push_back(
        {.forward_s = micro * its.forward, .backward_s = micro * (its.backward + its.again)});
  }
  // Forward has one of the head's three products.
  const double head = micro * head_time(training, machine);
  if (model.tied) {
    costs.push_back({});
    costs.front().between_s = head;
  } else {
    costs.push_back({.forward_s = head / 3, .backward_s = head * 2 / 3});
  }
  return costs;
}

std::uint64_t trainer_bytes(const Training& training) {
  const bool experts = training.model.has_experts(training.model.layers - 1);
  const bool again = training.recompute == Recompute::kFull;
  const double saved = saved_bytes(training, experts);
  const double kept = static_cast<double>(training.micro_batches) *
                      static_cast<double>(training.model.layers) *
                      (again ? input_bytes(training) : saved);
  const double loss = loss_bytes(training) + 3 * input_bytes(training);
  const double backward = (again ? saved : 0) + gradient_bytes(training, experts);
  return static_cast<std::uint64_t>(kept + std::max(loss, backward));
}

std::vector<UnitId> held_units(const ModelShape& model) {
  return model.tied ? std::vector<UnitId>{0} : std::vector<UnitId>();
}

}  // namespace ziggurat

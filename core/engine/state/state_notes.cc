// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_notes.cc: describes what was chosen at open, in the lines that begin a
// run.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/bytes.h"
#include "collectives/quantize/quantize.h"
#include "core/engine/state/training_state.h"

namespace ziggurat {
namespace {

/// Describes how large the errors of quantized values are.
std::string error_in(QuantizedBits bits) {
  return fmt::format("each value is within {:.2f} % of the largest in its block of {}",
                     std::ceil(1e4 * quantization_error(bits)) / 1e2, kQuantizedBlock);
}

}  // namespace

void TrainingState::describe() {
  for (const auto& drive : storage_->drives)
    notes_.push_back(fmt::format("files are read and written through {}", drive->description()));
  if (storage_->store && storage_->store->stripe_count() > 1) {
    for (const StripedStore::Share& share : storage_->store->shares())
      notes_.push_back(fmt::format("{} of records are in {}", format_bytes(share.record_bytes),
                                   share.directory));
  }
  notes_.push_back(
      fmt::format("the model has {} units and {} chunks, whose records have at most {}; host "
                  "memory is in {}; {} chunks fit beside all gradients",
                  table_->unit_count(), table_->chunks().size(),
                  format_bytes(table_->largest_record_bytes()), pool_->page_kind(), plan_.items));
  describe_nodes();
  describe_ranks();
  const bool swept = config_.placement.optimizer == Tier::kNvme;
  const StateTraffic traffic = state_traffic(table_->state(), params_->in_memory(0));
  notes_.push_back(fmt::format(
      "optimizer state is {} and takes {:.4g} bytes per parameter{}", to_string(table_->state()),
      traffic.written,
      swept ? fmt::format("; a step reads {:.4g} of these and writes all", traffic.read) : ""));
  notes_.push_back(durability());
  describe_records();
}

/// Describes, if records are divided among tiers, how many stay on which tier, and what a step
/// moves.
void TrainingState::describe_records() {
  const std::size_t on_device = records_->device_count();
  const std::size_t on_host = records_->host_count();
  const std::size_t all = table_->stored_chunks().size();
  const bool divided = on_device > 0 && on_host > 0;
  if (!divided && (!records_->through_store() || on_device + on_host == 0)) return;
  std::uint64_t read_bytes = 0;
  for (ChunkId id = 0; id < all; ++id) {
    const Chunk& chunk = table_->chunk(id);
    if (records_->stays(id) || chunk.constant) continue;
    read_bytes += chunk.record_bytes() -
                  OptimizerSweep::not_read_bytes(*table_, chunk, params_->in_memory(chunk.unit));
  }
  std::string line = fmt::format("{} of {} records stay", on_device + on_host, all);
  if (!divided) line += on_device > 0 ? " on the device" : " in host memory";
  if (divided) line += fmt::format(": {} on the device, {} in host memory", on_device, on_host);
  if (records_->through_store()) {
    line += fmt::format("; a step{} writes {} of records and reads {}",
                        config_.durable_every_steps > 1 ? " that becomes durable" : "",
                        format_bytes(table_->total_record_bytes()), format_bytes(read_bytes));
  }
  notes_.push_back(std::move(line));
}

/// Describes where memory, workers and drives are; nothing on a machine with one node.
void TrainingState::describe_nodes() {
  if (!runtime_.topology.has_several_nodes()) return;
  if (!node_plan_.why_not.empty()) {
    notes_.push_back(
        fmt::format("nothing is placed on NUMA nodes, because {}", node_plan_.why_not));
    return;
  }
  std::string chunks;
  for (const PoolNode& node : node_plan_.pool) {
    chunks += fmt::format(
        "{}{} of {} chunks and {} of {} workers are on NUMA node {}", chunks.empty() ? "" : ", ",
        std::ranges::count(node_plan_.chunk_nodes, node.numa_node), node_plan_.chunk_nodes.size(),
        std::ranges::count(runtime_.worker_nodes, node.numa_node), runtime_.jobs().threads(),
        node.numa_node);
  }
  notes_.push_back(fmt::format("host memory: {}", pool_->placement()));
  notes_.push_back(chunks);
  for (const auto& [directory, node] : storage_->drive_nodes) {
    notes_.push_back(node < 0
                         ? fmt::format("the NUMA node of the drive of {} is unknown", directory)
                         : fmt::format("the drive of {} is on NUMA node {}", directory, node));
  }
}

/// Describes which steps a kill loses, and what this durability costs.
std::string TrainingState::durability() const {
  if (!storage_->store)
    return "there is no store: nothing is durable, and the state is lost when the process ends";
  const bool one_slot = storage_->store->state().slots == 1;
  if (config_.placement.optimizer == Tier::kNvme) {
    if (config_.durable_every_steps > 1) {
      return fmt::format(
          "one step in {} (durable_every_steps) becomes durable; a kill loses the steps after the "
          "last durable one",
          config_.durable_every_steps);
    }
    return one_slot ? "with slots 1 the store takes half the space, but a kill while a sweep "
                      "writes loses the run"
                    : "every finished step becomes durable without any additional writes";
  }
  const std::string where = std::string(to_string(config_.placement.optimizer));
  if (config_.durable_every_s == 0) {
    return fmt::format(
        "optimizer state is on {}, and durable_every is 0, so the state becomes durable only when "
        "the run ends or is interrupted; a kill loses all steps before that",
        where);
  }
  return fmt::format(
      "optimizer state is on {}: every {:g} s of training (durable_every) a checkpoint of {} is "
      "written during the next step; a kill loses the steps after the last checkpoint{}",
      where, config_.durable_every_s, format_bytes(table_->total_record_bytes()),
      one_slot ? ", and a kill while one is written loses the run, because slots is 1" : "");
}

void TrainingState::describe_quantized_params() {
  notes_.push_back(
      fmt::format("parameters travel between ranks in 8 bits: {}, and is the same on every rank",
                  error_in(QuantizedBits::k8)));
}

/// Describes which values travel in fewer bits.
void TrainingState::describe_quantization() {
  const Quantization& quantization = config_.quantization;
  if (quantization.weights) describe_quantized_params();
  if (!quantization.gradients()) return;
  const NodeGrid nodes = table_->sharding().nodes();
  const std::string way = nodes.within > 1 && nodes.nodes > 1
                              ? fmt::format(
                                    "they are rounded between the {} ranks of a node, and their "
                                    "sums are rounded again between {} nodes",
                                    nodes.within, nodes.nodes)
                              : "they are rounded once";
  notes_.push_back(
      fmt::format("gradients travel between ranks in {} bits: {}; {}", quantization.gradient_bits,
                  error_in(static_cast<QuantizedBits>(quantization.gradient_bits)), way));
}

/// Returns the types of the gradients that ranks send.
std::string TrainingState::sent_types() const {
  if (config_.reduce_dtype) return std::string(to_string(*config_.reduce_dtype));
  std::vector<std::string_view> types;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (UnitId u = 0; u < table_->unit_count(); ++u) {
      if (table_->dtype(u) != dtype) continue;
      types.push_back(to_string(dtype));
      break;
    }
  }
  return fmt::format("{}", fmt::join(types, " and "));
}

/// Describes among how many ranks the state is divided, and how much of it is padding.
void TrainingState::describe_ranks() {
  if (of_pieces() && runtime_.ranks->world_size() > 1) {
    notes_.push_back(
        fmt::format("rank {} of {} has {:.1f} M elements of its own; all ranks make each step "
                    "together, and it becomes durable on all of them",
                    runtime_.ranks->rank(), runtime_.ranks->world_size(),
                    static_cast<double>(model_.count()) * 1e-6));
  }
  const Sharding& ranks = table_->sharding();
  if (ranks.ranks() == 1) return;
  std::uint64_t updated = 0;
  for (const Chunk& chunk : table_->chunks()) updated += chunk.count;
  const auto padding = static_cast<double>(table_->padded_count() - model_.count());
  const TensorPart part = ranks.tensor;
  notes_.push_back(fmt::format(
      "rank {} of {}{} uses ZeRO stage {}{} and updates {:.1f} M of {:.1f} M elements, of which "
      "{:.2f} % are padding{}",
      runtime_.ranks->rank(), ranks.ranks(),
      part.ranks > 1 ? fmt::format(" (part {} of {} of every layer)", part.rank, part.ranks) : "",
      ranks.stage,
      ranks.replicas > 1 ? fmt::format(" in {} groups of {}", ranks.replicas, ranks.world_size)
                         : "",
      static_cast<double>(updated) * 1e-6, static_cast<double>(table_->padded_count()) * 1e-6,
      100 * padding / static_cast<double>(table_->padded_count()),
      config_.quantization.gradients() ? ""
                                       : "; gradients travel between ranks in " + sent_types()));
  if (reduction().staged) {
    notes_.push_back(fmt::format(
        "ranks exchange data on GPUs through host memory: {} are set aside for gradients{}",
        format_bytes(plan_.bucket_bytes),
        plan_.staged_bytes > 0
            ? fmt::format(", {} for gathered parameters", format_bytes(plan_.staged_bytes))
            : ""));
  }
  describe_quantization();
}

}  // namespace ziggurat

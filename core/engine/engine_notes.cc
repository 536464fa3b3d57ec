// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_notes.cc: what was chosen at open, in the lines that begin a run.
#include <fmt/format.h>

#include "base/bytes.h"
#include "core/engine/engine_impl.h"

namespace ziggurat {

void EngineImpl::describe() {
  for (const auto& drive : storage_->drives)
    notes_.push_back(fmt::format("files through {}", drive->description()));
  if (storage_->store->stripe_count() > 1) {
    for (const StripedStore::Share& share : storage_->store->shares())
      notes_.push_back(
          fmt::format("{} of records in {}", format_bytes(share.record_bytes), share.directory));
  }
  notes_.push_back(fmt::format(
      "{} units, {} chunks of at most {} of record; host memory in {}; {} chunks fit beside all "
      "gradients",
      table_->unit_count(), table_->chunks().size(), format_bytes(table_->largest_record_bytes()),
      pool_->page_kind(), plan_.items));
  describe_ranks();
  const bool swept = config_.placement.optimizer == Tier::kNvme;
  const StateTraffic traffic = state_traffic(table_->state(), params_->in_memory());
  notes_.push_back(fmt::format(
      "optimizer state: {}, {:.4g} bytes a parameter{}", to_string(table_->state()),
      traffic.written,
      swept ? fmt::format("; a step reads {:.4g} and writes them anew", traffic.read) : ""));
  if (!swept) {
    notes_.push_back(fmt::format(
        "optimizer state is on {}: durable when the run ends or is interrupted, not at every step",
        to_string(config_.placement.optimizer)));
  } else if (storage_->store->state().slots == 1) {
    notes_.push_back("--slots 1: half the space; a kill while a sweep writes loses the run");
  } else {
    notes_.push_back("every finished step becomes durable, at no extra written bytes");
  }
  if (kept_->kept_chunks() > 0) {
    std::uint64_t read_bytes = 0;
    for (const Chunk& chunk : table_->chunks().subspan(kept_->kept_chunks()))
      read_bytes +=
          chunk.record_bytes() - OptimizerSweep::not_read_bytes(*context_, *params_, chunk);
    notes_.push_back(
        fmt::format("{} of {} records stay in host memory: a step writes {} of them and reads {}",
                    kept_->kept_chunks(), table_->chunks().size(),
                    format_bytes(table_->total_record_bytes()), format_bytes(read_bytes)));
  }
}

/// Among how many ranks the state is divided, and what making slices equal costs.
void EngineImpl::describe_ranks() {
  const Sharding& ranks = table_->sharding();
  if (ranks.ranks() == 1) return;
  std::uint64_t updated = 0;
  for (const Chunk& chunk : table_->chunks()) updated += chunk.count;
  const auto padding = static_cast<double>(table_->padded_count() - model_.count());
  const TensorPart part = ranks.tensor;
  notes_.push_back(fmt::format(
      "rank {} of {}{}, ZeRO stage {}{}: updates {:.1f} M of {:.1f} M elements, {:.2f} % of these "
      "padding; gradients between ranks in {}",
      runtime_.ranks->rank(), ranks.ranks(),
      part.ranks > 1 ? fmt::format(" (part {} of {} of every layer)", part.rank, part.ranks) : "",
      ranks.stage,
      ranks.replicas > 1 ? fmt::format(" in {} groups of {}", ranks.replicas, ranks.world_size)
                         : "",
      static_cast<double>(updated) * 1e-6, static_cast<double>(table_->padded_count()) * 1e-6,
      100 * padding / static_cast<double>(table_->padded_count()), to_string(reduction().dtype)));
}

}  // namespace ziggurat

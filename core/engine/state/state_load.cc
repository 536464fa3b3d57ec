// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_load.cc: makes the state in memory from a store. Every record is read and
// verified. A damaged record is repaired from another rank's copy. If there is no copy, all ranks
// go back to the previous generation and read that.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "base/runtime/for_each.h"
#include "core/engine/state/training_state.h"
#include "core/schedule/stored_record.h"

namespace ziggurat {
namespace {

/// How often a record is read before it counts as damaged. A transfer may fail although the drive
/// holds the right bytes, and losing a record can cost a generation.
constexpr int kReads = 2;

}  // namespace

void TrainingState::read_blob(const StoreState& state) {
  const std::optional<UnwrappedBlob> its = unwrap_blob(state.blob);
  if (!its) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("store {}: the blob of generation {} was not written by this engine, "
                            "so the store cannot be resumed",
                            storage_->paths(), state.generation));
  }
  generation_ = its->generation;
  line_record_ = its->line;
  last_blob_ = state.blob;
  resumed_blob_.assign(its->blob.begin(), its->blob.end());
}

/// Loads the newest generation that can be loaded. Each candidate is read again completely,
/// including its blob, and overwrites what the previous one left in memory.
Task<> TrainingState::load_state() {
  StripedStore& store = *storage_->store;
  std::vector<RecordCopies::Repair> repairs;
  for (bool stands = false; !stands;) {
    read_blob(store.state());
    read_counts();
    opened_bytes_ = 0;
    std::vector<RecordDamage> damaged;
    const std::function<Task<>(std::size_t)> load = [&](std::size_t id) {
      return load_chunk(static_cast<ChunkId>(id), damaged);
    };
    co_await for_each_index(runtime_.reactor, table_->stored_chunks().size(), chunks_at_once(),
                            load);
    std::ranges::sort(damaged, {}, &RecordDamage::chunk);
    Task<std::vector<RecordCopies::Repair>> planning = plan_repairs(damaged);
    repairs = co_await std::move(planning);
    Task<> settling = unless_lost(settle(std::move(damaged), stands));
    co_await std::move(settling);
  }
  co_await repair_records(repairs);
  // No rank continues if another one could not be repaired.
  if (copies_) co_await storage_->quorum.barrier();
  const StoreState& state = store.state();
  notes_.insert(notes_.end(), state.notes.begin(), state.notes.end());
  make_sweep();
}

Task<> TrainingState::settle(std::vector<RecordDamage> damaged, bool& stands) {
  Task<bool> settling = storage_->store->settle(std::move(damaged));
  stands = co_await std::move(settling);
}

Task<> TrainingState::load_chunk(ChunkId id, std::vector<RecordDamage>& damaged) {
  records_->forget(id);
  const ItemMemory memory = co_await item_of(id);
  RecordDamage damage{.chunk = id, .fault = {}};
  const bool whole = co_await look_at_record(memory.work.record, damage);
  report_progress(id, "reading the store");
  if (whole) {
    co_await take_record(id, memory.work);
  } else {
    damaged.push_back(std::move(damage));
  }
}

Task<bool> TrainingState::look_at_record(std::span<std::byte> record, RecordDamage& damage) {
  bool whole = false;
  for (int look = 0; look < kReads && !whole; ++look) whole = co_await load_record(record, damage);
  co_return whole;
}

/// Reads and verifies a record of the store's generation. If it is damaged, returns false and says
/// in `damage` what is wrong.
Task<bool> TrainingState::load_record(std::span<std::byte> record, RecordDamage& damage) {
  const StripedStore& store = *storage_->store;
  const std::uint64_t stored = store.durable_generation();
  try {
    co_await storage_->store->read(damage.chunk, stored, record);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDataLoss) throw;
    damage.fault = error.what();
    damage.native = error.native();
    co_return false;
  }
  damage.fault = "wrong checksum";
  damage.native = 0;
  co_return co_await is_record_of(*context_, store, damage.chunk, stored, record);
}

}  // namespace ziggurat

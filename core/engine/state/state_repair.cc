// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_repair.cc: repairs a damaged record with the copy of it on another rank.
// Nothing is written before the ranks have agreed on a generation. After a crash during a repair
// the record is still damaged and the copy undamaged, and the next open repairs it again.
#include <fmt/format.h>

#include "base/error.h"
#include "base/log.h"
#include "core/engine/state/training_state.h"
#include "core/schedule/stored_record.h"

namespace ziggurat {

/// Returns the ranks that have the same records as this one, in order, including this one.
std::vector<int> TrainingState::ranks_with_copies() const {
  return in_runs_of(strategy_->update_shards(), place_.rank, place_.data_group).outer;
}

/// Names the other ranks that have these records, for messages: "ranks 1, 3"; empty if there are
/// none.
std::string TrainingState::copies_elsewhere() const {
  std::string numbers;
  int others = 0;
  for (const int rank : ranks_with_copies()) {
    if (rank == runtime_.ranks->rank()) continue;
    numbers += fmt::format("{}{}", numbers.empty() ? "" : ", ", rank);
    ++others;
  }
  if (others == 0) return {};
  return fmt::format("rank{} {}", others == 1 ? "" : "s", numbers);
}

/// Plans repairs, and removes from `damaged` the records that another rank can restore. Every rank
/// calls this. The ranks first find out whether any of them has damage; without any, nothing is
/// compared.
Task<std::vector<RecordCopies::Repair>> TrainingState::plan_repairs(
    std::vector<RecordDamage>& damaged) {
  std::vector<int> members = ranks_with_copies();
  if (members.size() == 1) co_return std::vector<RecordCopies::Repair>{};
  const bool anywhere = co_await storage_->quorum.max(damaged.empty() ? 0 : 1) != 0;
  if (!anywhere) co_return std::vector<RecordCopies::Repair>{};
  if (!copies_) copies_ = std::make_unique<RecordCopies>(*runtime_.ranks, std::move(members));
  Task<std::vector<RecordCopies::Repair>> planning = copies_->plan(*storage_->store, damaged);
  co_return co_await std::move(planning);
}

/// Makes the repairs one after another. All ranks that have these records make them in the same
/// order.
Task<> TrainingState::repair_records(const std::vector<RecordCopies::Repair>& repairs) {
  for (const RecordCopies::Repair& repair : repairs) {
    if (repair.from == copies_->ranks().rank()) co_await give_copy(repair);
    if (repair.to == copies_->ranks().rank()) co_await take_copy(repair);
  }
}

/// Sends a record, which was undamaged when it was read. If it is damaged now, the receiver finds
/// that out.
Task<> TrainingState::give_copy(const RecordCopies::Repair& repair) {
  const ChunkId id = repair.damage.chunk;
  const bool in_memory = records_->holds(id, generation_) && !records_->updated_on_device(id);
  const ItemMemory memory = co_await item_of(id);
  if (!in_memory) {
    RecordDamage damage{.chunk = id, .fault = {}};
    co_await look_at_record(memory.work.record, damage);
  }
  co_await copies_->ranks().send(memory.work.record, repair.to);
}

Task<> TrainingState::take_copy(const RecordCopies::Repair& repair) {
  const ChunkId id = repair.damage.chunk;
  StripedStore& store = *storage_->store;
  const ItemMemory memory = co_await item_of(id);
  const int giver = copies_->number(repair.from);
  co_await copies_->ranks().recv(memory.work.record, repair.from);
  const bool right =
      co_await is_record_of(*context_, store, id, store.durable_generation(), memory.work.record);
  if (!right) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} is damaged ({}), and the copy from rank {} is damaged too, "
                            "although that rank had read it without error before. Check the drives "
                            "of both ranks (smartctl, dmesg) and start again",
                            store.place_of(id), repair.damage.fault, giver));
  }
  co_await store.repair(id, memory.work.record);
  co_await take_record(id, memory.work);
  notes_.push_back(fmt::format("{} was damaged ({}) and was repaired from the copy on rank {}",
                               store.place_of(id), repair.damage.fault, giver));
  log().warn("{}", notes_.back());
}

}  // namespace ziggurat

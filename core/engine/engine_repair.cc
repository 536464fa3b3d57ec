// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_repair.cc: a damaged record is written anew from the copy of it on another
// rank, once a generation stands: until then nothing is written. A crash in between leaves the
// record damaged, the copy whole, and the next open at the same place.
#include <fmt/format.h>

#include "base/error.h"
#include "base/log.h"
#include "core/engine/engine_impl.h"
#include "core/schedule/stored_record.h"

namespace ziggurat {

/// In order, this one among them.
std::vector<int> EngineImpl::ranks_with_copies() const {
  return in_runs_of(strategy_->update_shards(), place_.rank, place_.data_group).outer;
}

/// For messages: "ranks 1, 3"; empty if no other rank has these records.
std::string EngineImpl::copies_elsewhere() const {
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

/// Takes from `damaged` what another rank can give back. All ranks call, and learn of each other's
/// damage first: without any, nothing is compared.
Task<std::vector<RecordCopies::Repair>> EngineImpl::plan_repairs(
    std::vector<RecordDamage>& damaged) {
  std::vector<int> members = ranks_with_copies();
  if (members.size() == 1) co_return std::vector<RecordCopies::Repair>{};
  const bool anywhere = co_await storage_->quorum.max(damaged.empty() ? 0 : 1) != 0;
  if (!anywhere) co_return std::vector<RecordCopies::Repair>{};
  if (!copies_) copies_ = std::make_unique<RecordCopies>(*runtime_.ranks, std::move(members));
  Task<std::vector<RecordCopies::Repair>> planning = copies_->plan(*storage_->store, damaged);
  co_return co_await std::move(planning);
}

/// One after the other, in the order that all ranks with these records have alike.
Task<> EngineImpl::repair_records(const std::vector<RecordCopies::Repair>& repairs) {
  for (const RecordCopies::Repair& repair : repairs) {
    if (repair.from == copies_->ranks().rank()) co_await give_copy(repair);
    if (repair.to == copies_->ranks().rank()) co_await take_copy(repair);
  }
}

/// The record was whole when it was read. If it is not any more, who gets it finds that out.
Task<> EngineImpl::give_copy(const RecordCopies::Repair& repair) {
  const ChunkId id = repair.damage.chunk;
  const bool in_memory = records_->holds(id, generation_) && !records_->updated_on_device(id);
  const ItemMemory memory = co_await item_of(id);
  if (!in_memory) {
    RecordDamage damage{.chunk = id, .fault = {}};
    co_await look_at_record(memory.work.record, damage);
  }
  co_await copies_->ranks().send(memory.work.record, repair.to);
}

Task<> EngineImpl::take_copy(const RecordCopies::Repair& repair) {
  const ChunkId id = repair.damage.chunk;
  StripedStore& store = *storage_->store;
  const ItemMemory memory = co_await item_of(id);
  const int giver = copies_->number(repair.from);
  co_await copies_->ranks().recv(memory.work.record, repair.from);
  const bool right =
      co_await is_record_of(*context_, store, id, store.durable_generation(), memory.work.record);
  if (!right) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} is damaged ({}), and the copy that rank {} gave of it is not what "
                            "was written, although it was when that rank read it. Check the drives "
                            "of both ranks (smartctl, dmesg) and start again",
                            store.place_of(id), repair.damage.fault, giver));
  }
  co_await store.repair(id, memory.work.record);
  co_await take_record(id, memory.work);
  notes_.push_back(fmt::format("{} was damaged ({}); repaired from the copy on rank {}",
                               store.place_of(id), repair.damage.fault, giver));
  log().warn("{}", notes_.back());
}

}  // namespace ziggurat

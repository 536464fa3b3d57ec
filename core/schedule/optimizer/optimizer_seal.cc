// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_seal.cc: makes generations durable. A generation is sealed when
// its last record is written, or by a checkpoint, which writes the records that are only in memory.
#include <fmt/format.h>

#include "base/check.h"
#include "base/error.h"
#include "base/runtime/for_each.h"
#include "core/schedule/optimizer/optimizer_pass.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/schedule/stored_record.h"

namespace ziggurat {
namespace {

/// The number of records that a checkpoint writes at once.
constexpr std::size_t kCheckpointAtOnce = 8;

}  // namespace

/// Makes the written records durable, on every rank before this returns. Only then may a record of
/// the next generation be written, because it goes into a slot of the previous generation. The
/// ranks make one agreement for each generation, in the order of generations, independent of other
/// exchanges.
Task<> OptimizerSweep::commit(std::uint64_t generation, std::uint64_t stored,
                              std::span<const std::byte> blob) {
  const std::function<void()> before_seal = [&] {
    if (settings_.before_seal) settings_.before_seal(generation);
  };
  co_await parts_.store->commit(stored, blob, before_seal);
  const std::uint64_t everywhere = co_await parts_.ranks.min(stored);
  if (everywhere != stored) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("rank {} has sealed the store's generation {}, but another rank has "
                            "sealed {}: every rank must make the same calls",
                            parts_.ranks.rank(), stored, everywhere));
  }
  parts_.store->set_durable_everywhere(stored);
  durable_generation_ = generation;
}

/// Ends a pass of which every record is made, and written if necessary. If the generation seals,
/// makes it durable once step() has given the blob.
Task<> OptimizerSweep::seal(PassPtr pass) {
  co_await pass->ended.wait();
  // A rank may have no record to write, so the wait in write() may not have happened.
  if (const PassPtr previous = pass->previous) co_await previous->done.wait();
  if (pass->seals) {
    co_await pass->blob_given.wait();
    co_await commit(pass->generation, pass->stored, pass->blob);
  }
  pass->previous.reset();
  pass->done.set();
}

Task<> OptimizerSweep::settled() {
  context_.cancel.check();
  PassPtr pass = current_;
  if (step_open()) pass = pass->previous;  // waits for the steps that were finished before
  if (pass) co_await pass->done.wait();
}

Task<> OptimizerSweep::record_written(ChunkId id, std::uint64_t generation) {
  while (written_generation_[id] < generation) {
    written_[id].reset();
    co_await written_[id].wait();
  }
}

Task<> OptimizerSweep::checkpoint(std::uint64_t generation, std::span<const std::byte> blob) {
  if (generation == durable_generation_) co_return;
  ZIGGURAT_CHECK(!step_open() || !current_->guesses, "a checkpoint of records that are guessed");
  const std::uint64_t stored = next_stored_;
  const std::function<Task<>(std::size_t)> write_one = [&](std::size_t id) {
    return checkpoint_chunk(static_cast<ChunkId>(id), generation, stored);
  };
  // Either all ranks seal the generation, or none does. If none does, its number is used again
  // later: then the records that were written now are overwritten. Until then they do not verify as
  // part of any sealed generation.
  Task<> written = together(parts_.ranks,
                            for_each_index(context_.reactor, context_.table.chunks().size(),
                                           kCheckpointAtOnce, write_one),
                            "write its records");
  co_await std::move(written);
  Task<> sealed = sealed_or_ended(commit(generation, stored, blob));
  co_await std::move(sealed);
  next_stored_ = stored + 1;
  fresh_ = true;
}

Task<> OptimizerSweep::make_all() {
  const std::function<Task<>(std::size_t)> make = [&](std::size_t id) {
    return write_unmade(static_cast<ChunkId>(id), next_stored_);
  };
  co_await for_each_index(context_.reactor, context_.table.stored_chunks().size(),
                          kCheckpointAtOnce, make);
}

Task<> OptimizerSweep::write_unmade(ChunkId id, std::uint64_t stored) {
  if (!is_unmade(id)) co_return;
  const LeaseRequest wanted{.purpose = Purpose::kOptimizer,
                            .size_bytes = WorkMemory::lease_bytes(parts_.homes, context_.table, id),
                            .need = {.generation = durable_generation_, .position = id},
                            .holder = "first record",
                            .numa_node = context_.node_of(id)};
  Lease lease;  // none for a record with memory of its own
  if (wanted.size_bytes > 0) lease = co_await context_.pool.acquire(wanted);
  const WorkMemory memory = WorkMemory::of(parts_.homes, context_.table, id, lease.bytes());
  co_await make_from_params(id, memory);
  const std::uint64_t hash =
      co_await hash_record(context_, id, memory.record, parts_.store->write_seed(id, stored));
  co_await parts_.store->write(id, stored, memory.record, hash, IoPriority::kWriteBack);
  stored_in_[id] = stored;
  parts_.homes.records.set_holds(id, written_generation_[id]);
}

/// Ends the run if the commit fails and there are other ranks: each of them may have sealed the
/// generation that this rank has not, and would wait for this rank.
Task<> OptimizerSweep::sealed_or_ended(Task<> committing) {
  std::exception_ptr error;
  try {
    co_await std::move(committing);
  } catch (...) {
    error = std::current_exception();
  }
  if (!error) co_return;
  if (parts_.ranks.world_size() > 1) context_.fail(error);
  std::rethrow_exception(error);
}

/// Writes one record. If the CPU cannot reach it, it is first copied to a work item.
Task<> OptimizerSweep::checkpoint_chunk(ChunkId id, std::uint64_t generation,
                                        std::uint64_t stored) {
  const RecordHome& records = parts_.homes.records;
  if (!records.stays(id)) co_return;  // constant, or each step writes it
  ZIGGURAT_CHECK(records.holds(id, generation), "chunk {}: what is in memory is not generation {}",
                 id, generation);
  Lease lease;
  std::span<const std::byte> record;
  if (records.updated_on_device(id)) {
    const LeaseRequest wanted{.purpose = Purpose::kOptimizer,
                              .size_bytes = context_.table.chunk(id).record_bytes(),
                              .need = {.generation = generation, .position = id},
                              .holder = "checkpoint",
                              .numa_node = context_.node_of(id)};
    lease = co_await context_.pool.acquire(wanted);
    co_await records.fetch(id, lease.bytes());
    record = lease.bytes();
  } else {
    record = records.memory(id).first(context_.table.chunk(id).record_bytes());
  }
  const std::uint64_t hash =
      co_await hash_record(context_, id, record, parts_.store->write_seed(id, stored));
  co_await parts_.store->write(id, stored, record, hash, IoPriority::kWriteBack);
  stored_in_[id] = stored;
}

}  // namespace ziggurat

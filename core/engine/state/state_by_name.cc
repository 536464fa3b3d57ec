// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_by_name.cc: how the state of a parameter is read and written by name, and
// the masters of a unit read.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "core/engine/state/training_state.h"
#include "core/schedule/stored_record.h"
#include "optimizer/state_values.h"
#include "tiers/store/tile_size.h"

namespace ziggurat {
std::size_t TrainingState::state_index(const char* call, std::string_view piece,
                                       std::string_view name) const {
  const OptimizerKind kind = table_->state().optimizer;
  if (const std::optional<std::size_t> index = find_state(kind, name)) return *index;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}('{}', '{}'): there is no such array: the state of {} consists of {}", call,
                  piece, name, to_string(kind), fmt::join(ziggurat::state_names(kind), ", ")));
}

Task<> TrainingState::read_state(ParamId param, std::size_t index, std::span<float> values) {
  cancel_.check();
  for (const ChunkRun& its : lent_runs(param))
    co_await read_run(its.chunk, index, its.run, values.subspan(its.run.first, its.run.count));
}

/// Returns the chunk's newest record from wherever it is. The record need not be durable, because
/// the blob of its step may come later. A record that stays in memory was verified when it was read
/// or made.
Task<TrainingState::NewestRecord> TrainingState::newest_record(ChunkId id) {
  co_await sweep_->record_written(id, generation_);
  NewestRecord its;
  if (last_read_ && last_read_->chunk == id && last_read_->generation == generation_) {
    its.read = last_read_->record;
    its.bytes = *its.read;
    co_return std::move(its);
  }
  const std::uint64_t generation = generation_;
  if (sweep_->is_unmade(id)) {
    // In memory of its own, because several ranks may read it at once; and it is made again,
    // because the trainer may write the parameters until the first step.
    its.made = std::make_shared<const AlignedBytes>(table_->chunk(id).record_bytes());
    its.bytes = its.made->span();
    // A GPU copies parameters only to memory of the pool.
    const Lease param = co_await state_lease(id, params_->item_bytes(table_->chunk(id)));
    co_await sweep_->make_from_params(id, {.record = its.made->span(), .param = param.bytes()});
    co_return std::move(its);
  }
  its.memory = co_await item_of(id);
  its.bytes = its.memory.work.record;
  if (records_->holds(id, generation)) co_return std::move(its);
  ZIGGURAT_CHECK(!records_->stays(id), "chunk {}: the record that stays is of another generation",
                 id);
  co_await read_record(*context_, *storage_->store, id, sweep_->stored_in(id),
                       its.memory.work.record);
  if (!table_->is_packed(table_->chunk(id).unit)) co_return std::move(its);
  its.read = std::make_shared<const std::vector<std::byte>>(its.bytes.begin(), its.bytes.end());
  last_read_ = {.chunk = id, .generation = generation, .record = its.read};
  co_return std::move(its);
}

/// Reads what the trainer has written since the step, rounded in the store's format; or else the
/// newest record. A streamed parameter that was written before the first step is its master.
Task<> TrainingState::read_run(ChunkId id, std::size_t index, ParamRun run,
                               std::span<float> values) {
  co_await sweep_->record_written(id, generation_);
  const std::shared_ptr<const StateWrites::Arrays> writes = writes_->of(id);
  std::shared_ptr<const std::vector<float>> written;
  if (writes != nullptr) {
    const auto found = writes->find({.index = index, .begin = run.begin});
    if (found != writes->end()) written = found->second;
  }
  if (index == StateWrites::kMaster && generation_ == 0 && given_.contains(run.lent))
    written = std::make_shared<const std::vector<float>>(co_await values_at_home(id, run));
  if (written != nullptr) {
    const std::function<void()> job = [&] {
      const RecordFormat format = record_format(table_->state());
      const std::size_t tiles = (run.count + kTileElements - 1) / kTileElements;
      std::vector<std::byte> alone(format.record_bytes(tiles));
      write_state_values(table_->state(), index, 0, *written, alone);
      read_state_values(table_->state(), index, alone, values);
    };
    co_await context_->run_near(id, {"round state", 2 * values.size_bytes(), true}, job);
    co_return;
  }
  Task<NewestRecord> finding = newest_record(id);
  const NewestRecord record = co_await std::move(finding);
  const std::function<void()> job = [&] {
    read_state_values(table_->state(id), index, record.bytes, run.begin, values);
  };
  co_await context_->run_near(id, {"read state", 2 * values.size_bytes(), true}, job);
}

Task<> TrainingState::write_state(ParamId param, std::size_t index, std::span<const float> values) {
  cancel_.check();
  at_rest_ = false;
  const UnitUses::Use writes = co_await writing(param);
  if (index == StateWrites::kMaster) given_.erase(param);  // the later one counts
  for (const ChunkRun& its : lent_runs(param)) {
    // State that was written before the newest step belongs to that step's record. This waits for
    // that record, so that the new values go into the next one.
    co_await sweep_->record_written(its.chunk, generation_);
    const std::span<const float> run = values.subspan(its.run.first, its.run.count);
    writes_->put(its.chunk, {.index = index, .begin = its.run.begin}, {run.begin(), run.end()});
  }
}

Task<std::vector<float>> TrainingState::read_master(ChunkId id) {
  co_await sweep_->settled();
  std::vector<float> values;
  const Chunk& chunk = table_->chunk(id);
  // If the newest generation is durable, the record in memory may be, or may become, a guess at the
  // next one.
  const bool sealed = records_->through_store() && durable_generation() == generation_;
  const bool stored = sealed || !records_->holds(id, generation_);
  const bool fetched = !stored && records_->updated_on_device(id);
  Lease lease;
  if (stored && !storage_->store) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("read_master(unit {}): the unit is frozen, and an engine without "
                            "`store` keeps no masters of frozen units",
                            chunk.unit));
  }
  if (stored || fetched) lease = co_await state_lease(id, chunk.record_bytes());
  if (stored) {
    const std::uint64_t generation =
        chunk.constant ? storage_->store->durable_generation() : sweep_->stored_in(id);
    co_await read_record(*context_, *storage_->store, id, generation, lease.bytes());
  } else if (fetched) {
    co_await records_->fetch(id, lease.bytes());
  }
  const std::span<const std::byte> record =
      lease ? std::span<const std::byte>(lease.bytes()) : records_->memory(id);
  const std::function<void()> job = [&] {
    values.resize(chunk.count);
    read_masters(table_->state_format(id), record, values);
  };
  const Work work{.name = "read masters", .bytes = 2 * record.size(), .decides = true};
  co_await runtime_.jobs().run(runtime_.reactor, work, job);
  values.resize(table_->real_count(id));
  co_return values;
}

}  // namespace ziggurat

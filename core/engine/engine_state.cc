// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_state.cc: the state of a unit by name, read and written by a trainer that
// lends its parameters.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "core/engine/engine_impl.h"
#include "core/schedule/stored_record.h"
#include "optimizer/state_values.h"

namespace ziggurat {

std::vector<std::string> EngineImpl::state_names() const {
  return ziggurat::state_names(table_->state().optimizer);
}

void EngineImpl::require_updated(const char* call, UnitId unit) const {
  if (table_->unit(unit).updated_count == table_->unit(unit).chunk_count) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}('{}'): some of it is frozen, and has no state", call,
                          model_.units[unit].name));
}

/// The place of `name` among state_names().
std::size_t EngineImpl::state_index(const char* call, std::string_view piece,
                                    std::string_view name) const {
  const OptimizerKind kind = table_->state().optimizer;
  if (const std::optional<std::size_t> index = find_state(kind, name)) return *index;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}('{}', '{}'): the state of {} is {}", call, piece, name,
                          to_string(kind), fmt::join(ziggurat::state_names(kind), ", ")));
}

std::size_t EngineImpl::require_state(const char* call, UnitId unit, std::string_view name,
                                      std::uint64_t count) const {
  require_lent(unit, call, count);
  require_updated(call, unit);
  return state_index(call, model_.units[unit].name, name);
}

void EngineImpl::read_state(UnitId unit, std::string_view name, std::span<float> values) {
  const Turn turn(turn_);
  const std::size_t index = require_state("read_state", unit, name, values.size());
  runtime_.reactor.block_on(
      [](EngineImpl& self, UnitId of, std::size_t array, std::span<float> wanted) -> Task<> {
        self.cancel_.check();
        const UnitChunks& chunks = self.table_->unit(of);
        for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
          const std::span<float> its =
              wanted.subspan(self.table_->chunk(id).begin, self.table_->real_count(id));
          co_await self.read_state_chunk(id, array, its);
        }
      }(*this, unit, index, values));
}

/// From the record where it is: it need not be durable, since a step's blob may come later. A kept
/// one was looked at when it was read or made.
Task<> EngineImpl::read_state_chunk(ChunkId id, std::size_t index, std::span<float> values) {
  co_await sweep_->record_written(id, generation_);
  const ItemMemory memory = co_await item_of(id);
  if (!records_->holds(id, generation_)) {
    ZIGGURAT_CHECK(!records_->stays(id), "chunk {}: the record that stays is of another generation",
                   id);
    co_await read_record(*context_, *storage_->store, id, sweep_->stored_in(id),
                         memory.work.record);
  }
  const StateWrites::Arrays* const writes = writes_->of(id);
  const std::function<void()> job = [&] {
    if (writes == nullptr)
      return read_state_values(table_->state(), index, memory.work.record, values);
    std::vector<std::byte> written(memory.work.record.begin(), memory.work.record.end());
    writes_->apply(*writes, written);
    read_state_values(table_->state(), index, written, values);
  };
  co_await context_->run_near(id, "read state", job);
}

void EngineImpl::write_state(UnitId unit, std::string_view name, std::span<const float> values) {
  const Turn turn(turn_);
  const std::size_t index = require_state("write_state", unit, name, values.size());
  runtime_.reactor.block_on(
      [](EngineImpl& self, UnitId of, std::size_t array, std::span<const float> given) -> Task<> {
        self.cancel_.check();
        self.at_rest_ = false;
        const UnitChunks& chunks = self.table_->unit(of);
        for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
          // What was written before the newest step goes into that step's record, and this does
          // not.
          co_await self.sweep_->record_written(id, self.generation_);
          const std::span<const float> its =
              given.subspan(self.table_->chunk(id).begin, self.table_->real_count(id));
          if (!its.empty()) self.writes_->put(id, array, {its.begin(), its.end()});
        }
      }(*this, unit, index, values));
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_state.cc: how a trainer that lends its parameters reads and writes the state
// of a unit by name.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "aio/aligned_bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/runtime/for_each.h"
#include "core/engine/engine_impl.h"
#include "core/schedule/stored_record.h"
#include "optimizer/state_arrays.h"
#include "optimizer/state_values.h"

namespace ziggurat {
namespace {

/// The number of records that copy_state() has in memory: one is read while another is taken.
constexpr std::size_t kCopiedAtOnce = 2;

}  // namespace

std::vector<std::string> EngineImpl::state_names() const {
  return ziggurat::state_names(table_->state().optimizer);
}

void EngineImpl::require_updated(const char* call, UnitId unit) const {
  if (table_->unit(unit).updated_count == table_->unit(unit).chunk_count) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}('{}'): a part of the unit is frozen, so that part has no state", call,
                          model_.units[unit].name));
}

/// Returns the index of `name` in state_names().
std::size_t EngineImpl::state_index(const char* call, std::string_view piece,
                                    std::string_view name) const {
  const OptimizerKind kind = table_->state().optimizer;
  if (const std::optional<std::size_t> index = find_state(kind, name)) return *index;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}('{}', '{}'): there is no such array: the state of {} consists of {}", call,
                  piece, name, to_string(kind), fmt::join(ziggurat::state_names(kind), ", ")));
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
  run_lent([](EngineImpl& self, UnitId of, std::size_t array, std::span<float> wanted) -> Task<> {
    self.cancel_.check();
    const UnitChunks& chunks = self.table_->unit(of);
    for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
      const std::span<float> its =
          wanted.subspan(self.table_->chunk(id).begin, self.table_->real_count(id));
      co_await self.read_state_chunk(id, array, its);
    }
  }(*this, unit, index, values));
}

/// Returns the chunk's newest record from wherever it is; `memory` is taken for it. The record need
/// not be durable, because the blob of its step may come later. A record that stays in memory was
/// verified when it was read or made. If the trainer has written state since, the record is in
/// `written` and includes it.
Task<std::span<const std::byte>> EngineImpl::newest_record(ChunkId id, ItemMemory& memory,
                                                           std::vector<std::byte>& written) {
  co_await sweep_->record_written(id, generation_);
  memory = co_await item_of(id);
  if (!records_->holds(id, generation_)) {
    ZIGGURAT_CHECK(!records_->stays(id), "chunk {}: the record that stays is of another generation",
                   id);
    co_await read_record(*context_, *storage_->store, id, sweep_->stored_in(id),
                         memory.work.record);
  }
  const std::shared_ptr<const StateWrites::Arrays> writes = writes_->of(id);
  if (writes == nullptr) co_return memory.work.record;
  const std::function<void()> job = [&] {
    written.assign(memory.work.record.begin(), memory.work.record.end());
    writes_->apply(*writes, written);
  };
  co_await context_->run_near(id, "apply writes", job);
  co_return written;
}

Task<> EngineImpl::read_state_chunk(ChunkId id, std::size_t index, std::span<float> values) {
  ItemMemory memory;
  std::vector<std::byte> written;
  Task<std::span<const std::byte>> finding = newest_record(id, memory, written);
  const std::span<const std::byte> record = co_await std::move(finding);
  const std::function<void()> job = [&] {
    read_state_values(table_->state(), index, record, values);
  };
  co_await context_->run_near(id, "read state", job);
}

StateKind EngineImpl::copied_state(bool widen_codes) const {
  StateKind kind = table_->state();
  if (widen_codes && kind.format == StateFormat::k8Bit) kind.format = StateFormat::kFp32;
  return kind;
}

void EngineImpl::copy_state(bool widen_codes, const TakeArray& take) {
  const Turn turn(turn_);
  run_lent([](EngineImpl& self, bool widen, const TakeArray& give) -> Task<> {
    self.cancel_.check();
    const std::function<Task<>(std::size_t)> copy = [&](std::size_t id) {
      return self.copy_chunk(static_cast<ChunkId>(id), widen, give);
    };
    co_await for_each_index(self.runtime_.reactor, self.table_->chunks().size(), kCopiedAtOnce,
                            copy);
  }(*this, widen_codes, take));
}

Task<> EngineImpl::copy_chunk(ChunkId id, bool widen_codes, const TakeArray& take) {
  const std::uint64_t count = table_->real_count(id);
  if (count == 0) co_return;
  ItemMemory memory;
  std::vector<std::byte> written;
  Task<std::span<const std::byte>> finding = newest_record(id, memory, written);
  const std::span<const std::byte> record = co_await std::move(finding);
  const StateKind kind = copied_state(widen_codes);
  const bool same = kind == table_->state();
  const std::vector<StateArray> arrays = state_arrays(kind);
  const Chunk& chunk = table_->chunk(id);
  for (std::size_t a = 0; a < arrays.size(); ++a) {
    const StateArray& array = arrays[a];
    const AlignedBytes taken((count + array.block - 1) / array.block * array.element_bytes());
    const std::span<std::byte> values = taken.span();
    const std::function<void()> job = [&] {
      if (same) return read_state_array(kind, a, record, 0, values);
      std::vector<float> wide(count);
      read_state_values(table_->state(), a, record, wide);
      std::memcpy(values.data(), wide.data(), values.size());
    };
    co_await context_->run_near(id, "copy state", job);
    Task<> taking = take(chunk.unit, a, chunk.begin / array.block, values);
    co_await std::move(taking);
  }
}

void EngineImpl::write_state(UnitId unit, std::string_view name, std::span<const float> values) {
  const Turn turn(turn_);
  const std::size_t index = require_state("write_state", unit, name, values.size());
  run_lent(
      [](EngineImpl& self, UnitId of, std::size_t array, std::span<const float> given) -> Task<> {
        self.cancel_.check();
        self.at_rest_ = false;
        const UnitChunks& chunks = self.table_->unit(of);
        for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
          // State that was written before the newest step belongs to that step's record. This waits
          // for that record, so that the new values go into the next one.
          co_await self.sweep_->record_written(id, self.generation_);
          const std::span<const float> its =
              given.subspan(self.table_->chunk(id).begin, self.table_->real_count(id));
          if (!its.empty()) self.writes_->put(id, array, {its.begin(), its.end()});
        }
      }(*this, unit, index, values));
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/engine/state/piece_copy.cc: gives the arrays of copied records to whoever takes them.
#include "core/engine/state/piece_copy.h"

#include <cstring>
#include <utility>
#include <vector>

#include "base/runtime/for_each.h"
#include "optimizer/state_arrays.h"
#include "optimizer/state_values.h"

namespace ziggurat {
namespace {

/// How many arrays of a record are on their way to the taker at once: all of a large parameter's.
constexpr std::size_t kPartsAtOnce = 4;

std::exception_ptr closed() {
  return std::make_exception_ptr(
      Error(ErrorCode::kCancelled,
            "the engine was closed before its state was saved: wait for the save first"));
}

}  // namespace

PieceCopy::PieceCopy(const Parts& parts, std::uint64_t generation, std::uint64_t stored,
                     Written written, const CopyOptions& options)
    : parts_(parts), written_(std::move(written)), widens_(options.widen_codes) {
  const auto buffers = std::make_shared<const AlignedBytes>(
      RecordCopier::kLanes * parts.context.table.largest_record_bytes());
  parts_->copier.begin(
      {.generation = generation,
       .stored = stored,
       .buffers = buffers->span(),
       .keeps_buffers = buffers,
       .spare_bytes = options.spare_bytes,
       .stall_max_s = options.stall_max_s,
       .bandwidth_bytes_per_s = options.bandwidth_bytes_per_s},
      [stored = parts.context.table.stored_chunks().size()](ChunkId id) { return id < stored; });
}

Task<> PieceCopy::run(Take take, Lead lead) {
  if (!parts_) std::rethrow_exception(failure_ ? failure_ : closed());
  Signal ended(parts_->context.reactor);
  parts_->tasks.spawn(copy(std::make_shared<const Take>(std::move(take)), lead, ended));
  co_await ended.wait();
  if (failure_) std::rethrow_exception(failure_);
}

/// A task of the engine, so that it has ended before the engine's memory goes.
Task<> PieceCopy::copy(TakePtr take, const Lead& lead, Signal& ended) {
  const RecordCopier::Save give = [&](ChunkId id, std::span<std::byte> record) {
    return save(id, record, take, lead);
  };
  RecordCopier& copier = parts_->copier;
  try {
    co_await copier.copy_all(give);
    failure_ = copier.failure();
  } catch (...) {
    failure_ = std::current_exception();
  }
  if (parts_->context.cancel.cancelled()) failure_ = parts_->context.cancel.error();
  end();
  ended.set();
}

Task<> PieceCopy::save(ChunkId id, std::span<std::byte> record, TakePtr take, const Lead& lead) {
  Context& context = parts_->context;
  if (const auto its = written_.find(id); its != written_.end()) {
    const std::function<void()> job = [&] {
      StateWrites::apply(context.table.state(id), *its->second, record);
    };
    co_await context.run_near(id, {"apply writes", record.size()}, job, Workers::Turn::kSoon);
  }
  const std::size_t arrays = state_arrays(copied_kind(context.table.state(), widens_)).size();
  std::vector<Part> parts;
  for (const ParamRun& run : context.table.param_runs(id)) {
    for (std::size_t a = 0; a < arrays; ++a) parts.push_back({run, a});
  }
  const std::function<Task<>(std::size_t)> save_one = [&](std::size_t i) {
    return save_part(id, parts[i], record, take, lead);
  };
  co_await for_each_index(context.reactor, parts.size(), kPartsAtOnce, save_one);
}

Task<> PieceCopy::save_part(ChunkId id, const Part& part, std::span<const std::byte> record,
                            TakePtr take, const Lead& lead) {
  const StateKind kept = parts_->context.table.state(id);
  const StateKind kind = copied_kind(kept, widens_);
  const StateArray array = state_arrays(kind)[part.array];
  const ParamRun& run = part.run;
  const std::uint64_t first = run.first / array.block;
  const auto taken = std::make_shared<const AlignedBytes>(memory_.take(
      array.values_of(run.count) * array.element_bytes(), lead(run.lent, part.array, first)));
  const std::span<std::byte> values = taken->span();
  const std::function<void()> job = [&] {
    if (kind == kept) return read_state_array(kind, part.array, record, run.begin, values);
    std::vector<float> wide(run.count);
    read_state_values(kept, part.array, record, run.begin, wide);
    std::memcpy(values.data(), wide.data(), values.size());
  };
  co_await parts_->context.run_near(id, {"copy state", 2 * values.size()}, job);
  const auto ended = std::make_shared<Signal>(parts_->context.cancel);
  parts_->context.reactor.spawn(give(take, run.lent, part.array, first, taken, ended),
                                [](std::exception_ptr) {});
  co_await ended->wait();
}

/// Gives values to the taker. If that never ends, an engine that is closed does not wait for it.
Task<> PieceCopy::give(TakePtr take, ParamId param, std::size_t array, std::uint64_t first,
                       std::shared_ptr<const AlignedBytes> values, std::shared_ptr<Signal> taken) {
  std::exception_ptr failure;
  try {
    Task<> taking = (*take)(param, array, first, std::move(values));
    co_await std::move(taking);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    taken->fail(failure);
  } else {
    taken->set();
  }
}

void PieceCopy::give_up(std::exception_ptr why) {
  if (parts_) parts_->copier.give_up(std::move(why));
}

void PieceCopy::end() {
  if (!parts_) return;
  parts_->copier.end();
  parts_.reset();
  written_.clear();
}

void PieceCopy::engine_closed() {
  if (!parts_) return;
  failure_ = closed();
  end();
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grad_sums.cc: reads and adds, and writes in the background.
#include "core/schedule/homes/grad_sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "base/runtime/for_each.h"
#include "core/schedule/homes/checked_items.h"
#include "optimizer/gradient.h"
#include "tiers/store/tile_size.h"

namespace ziggurat {
namespace {

/// How many chunks of a parameter are added to at once.
constexpr std::size_t kChunksAtOnce = 4;

void put_first(TypedSpan<const std::byte> values, float scale, std::span<float> sums) {
  widen(values, sums);
  if (scale == 1) return;
  for (float& sum : sums) sum *= scale;
}

/// Writes zeros before and behind a parameter's elements.
void fill_around(std::span<std::byte> item, DType dtype, const ParamRun& own) {
  const std::uint64_t begin = own.begin * size_bytes(dtype);
  std::ranges::fill(item.first(begin), std::byte{0});
  std::ranges::fill(item.subspan(begin + own.count * size_bytes(dtype)), std::byte{0});
}

/// Widens values of 16 bits, which are in the upper half of the memory of `wide`, tile by tile from
/// the front: no tile is written over before it is read.
void widen_upper_half(DType dtype, std::span<float> wide) {
  const TypedSpan<const std::byte> half{dtype, std::as_bytes(wide).subspan(wide.size_bytes() / 2)};
  std::vector<std::byte> tile(kTileElements * size_bytes(dtype));
  for (std::size_t begin = 0; begin < wide.size(); begin += kTileElements) {
    const std::size_t count = std::min<std::size_t>(kTileElements, wide.size() - begin);
    const std::span<const std::byte> from = half.subspan(begin, count).bytes;
    copy_bytes(from, tile);
    widen({dtype, std::span(tile).first(from.size())}, wide.subspan(begin, count));
  }
}

}  // namespace

GradSums::GradSums(Context& context, std::vector<StripePlace> places, std::size_t params)
    : context_(context),
      coming_(params),
      taken_(params),
      types_(context.table.chunks().size(), DType::kFloat32) {
  std::vector<std::uint64_t> sizes;
  for (const Chunk& chunk : context.table.chunks())
    sizes.push_back(chunk.constant ? 0 : chunk.count * sizeof(float));
  file_ = SwapFile::create(context.reactor, std::move(places), std::move(sizes));
}

void GradSums::take() {
  taken_ = coming_;
  coming_.assign(coming_.size(), false);
}

Task<Lease> GradSums::lease(ChunkId id) {
  const LeaseRequest request{.purpose = Purpose::kGradients,
                             .size_bytes = context_.table.chunk(id).count * sizeof(float),
                             .need = {.generation = 0, .position = 0},  // the trainer waits
                             .holder = "gradient sum",
                             .numa_node = context_.node_of(id)};
  co_return co_await context_.pool.acquire(request);
}

Task<> GradSums::add(ParamId param, std::span<const ChunkRun> runs,
                     TypedSpan<const std::byte> values, float scale, bool instead_of_zeros) {
  if (has(param)) require_complete(param);
  const std::function<Task<>(std::size_t)> add = [&](std::size_t i) {
    const auto& [chunk, run] = runs[i];
    return add_run(param, chunk, run, values.subspan(run.first, run.count), scale,
                   instead_of_zeros);
  };
  std::exception_ptr failure;
  try {
    co_await for_each_index(context_.reactor, runs.size(), kChunksAtOnce, add);
  } catch (...) {
    failure = std::current_exception();
  }
  // Some chunks may have the summand and others not. Without a first one the parameter has a sum
  // all the same: a step that left it out would take it for one without a gradient.
  coming_[param] = true;
  if (failure) incomplete_[param] = failure;
  if (failure) std::rethrow_exception(failure);
}

/// Throws an error with the code of the failure that left the sum without a part of a summand.
void GradSums::require_complete(ParamId param) const {
  const auto found = incomplete_.find(param);
  if (found == incomplete_.end()) return;
  try {
    std::rethrow_exception(found->second);
  } catch (const Error& error) {
    throw Error(error.code(),
                fmt::format("the sum of gradients of parameter {} lacks a part of what was added "
                            "({}): discard its gradient",
                            param, error.what()),
                error.native());
  }
}

Task<> GradSums::add_run(ParamId param, ChunkId id, ParamRun run, TypedSpan<const std::byte> values,
                         float scale, bool instead_of_zeros) {
  Lease memory = co_await lease(id);
  const std::span<float> sums(reinterpret_cast<float*>(memory.bytes().data()),
                              context_.table.chunk(id).count);
  const std::vector<ParamRun> all = context_.table.param_runs(id);
  // What an incomplete sum has in the chunk is of no use, and may never have been written.
  const bool others = std::ranges::any_of(all, [&](const ParamRun& other) {
    return other.lent != param && coming_[other.lent] && !incomplete_.contains(other.lent);
  });
  const bool begun = coming_[param];
  const bool had_none = !begun && !others;
  if (!had_none) {
    co_await fetch_wide(id, sums);
  } else {
    // What the chunk had is of no meaning, and so is whether it could be written.
    try {
      co_await written(id);
    } catch (const Error&) {
      context_.cancel.check();
      writes_.erase(id);
    }
  }
  const bool packed = context_.table.is_packed(context_.table.chunk(id).unit);
  const bool as_it_is = !begun && instead_of_zeros && scale == 1 && !packed;
  types_[id] = as_it_is ? values.dtype : DType::kFloat32;
  const std::span<std::byte> item = stored(id, memory.bytes());
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] {
    if (had_none) fill_around(item, types_[id], run);
    const std::span<float> own = sums.subspan(run.begin, run.count);
    if (as_it_is) {
      copy_bytes(values.bytes,
                 TypedSpan<std::byte>{values.dtype, item}.subspan(run.begin, run.count).bytes);
    } else if (!begun && instead_of_zeros) {
      put_first(values, scale, own);
    } else {
      if (!begun) std::ranges::fill(own, 0.0F);
      accumulate_gradient(values, scale, own);
    }
    hash = hash64(item, id);
  };
  {
    const LentMemory::Use its(context_.lent);
    co_await context_.run_near(id, {"add gradient", 2 * item.size()}, job);
  }
  const auto done = std::make_shared<Signal>(context_.cancel);
  writes_[id] = done;
  context_.spawn_local(write(id, std::move(memory), hash, done));
}

/// Writes a chunk while backward goes on. Its memory is a lease, so that a drive that is slower
/// than backward makes the next sum wait.
Task<> GradSums::write(ChunkId id, Lease sums, std::uint64_t hash, std::shared_ptr<Signal> done) {
  std::exception_ptr failure;
  try {
    co_await file_->write(id, stored(id, sums.bytes()), hash, IoPriority::kDemand);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    lose(id, failure);
    done->fail(failure);
    co_return;
  }
  writes_.erase(id);
  done->set();
}

/// Notes that all sums for the step to come in a chunk are of no use.
void GradSums::lose(ChunkId id, const std::exception_ptr& failure) {
  for (const ParamRun& run : context_.table.param_runs(id))
    if (coming_[run.lent]) incomplete_.try_emplace(run.lent, failure);
}

Task<> GradSums::written(ChunkId id) {
  const auto found = writes_.find(id);
  if (found == writes_.end()) co_return;
  const std::shared_ptr<Signal> done = found->second;
  co_await done->wait();
}

Task<> GradSums::settle() {
  const std::map<ChunkId, std::shared_ptr<Signal>> all = writes_;
  for (const auto& [id, done] : all) {
    std::exception_ptr failure;
    try {
      co_await done->wait();
    } catch (...) {
      failure = std::current_exception();
    }
    context_.cancel.check();
    if (failure) lose(id, failure);  // a first sum may have come to the chunk since
  }
  if (!incomplete_.empty()) require_complete(incomplete_.begin()->first);
}

/// Returns the part of `item` that a chunk takes in its type.
std::span<std::byte> GradSums::stored(ChunkId id, std::span<std::byte> item) const {
  return item.first(context_.table.chunk(id).count * size_bytes(types_[id]));
}

Task<TypedSpan<const std::byte>> GradSums::fetch(ChunkId id, std::span<std::byte> item) {
  co_await written(id);
  const std::span<std::byte> its = stored(id, item);
  co_await read_verified(context_, *file_, id, its, IoPriority::kDemand, context_.node_of(id));
  co_return TypedSpan<const std::byte>{types_[id], its};
}

Task<> GradSums::fetch_wide(ChunkId id, std::span<float> sums) {
  const std::span<std::byte> all = std::as_writable_bytes(sums);
  if (types_[id] == DType::kFloat32) {
    co_await fetch(id, all);
    co_return;
  }
  const TypedSpan<const std::byte> its = co_await fetch(id, all.subspan(all.size() / 2));
  const std::function<void()> job = [&] { widen_upper_half(its.dtype, sums); };
  co_await context_.run_near(id, {"widen gradient", all.size()}, job);
}

Task<> GradSums::read(ParamId param, std::span<const ChunkRun> runs, std::uint64_t first,
                      std::span<float> values) {
  require_complete(param);
  for (const auto& [id, run] : runs) {
    const std::uint64_t begin = std::max(first, run.first);
    const std::uint64_t end = std::min(first + values.size(), run.first + run.count);
    if (begin >= end) continue;
    const Lease memory = co_await lease(id);
    const std::span<float> sums(reinterpret_cast<float*>(memory.bytes().data()),
                                context_.table.chunk(id).count);
    co_await fetch_wide(id, sums);
    const std::span<float> part = sums.subspan(run.begin + (begin - run.first), end - begin);
    std::copy(part.begin(), part.end(), &values[begin - first]);
  }
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradient_reducer.cc: round, exchange, take in; bucket by bucket.
#include "core/schedule/gradient_reducer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/float16.h"
#include "optimizer/gradient.h"
#include "tiers/record_hash.h"

namespace ziggurat {
namespace {

using Tile = std::array<float, kTileElements>;

void widen(TypedSpan<const std::byte> values, std::span<float> out) {
  switch (values.dtype) {
    case DType::kBFloat16:
      std::ranges::transform(values.as<bf16>(), out.begin(), bf16_to_float);
      return;
    case DType::kFloat16:
      std::ranges::transform(values.as<fp16>(), out.begin(), fp16_to_float);
      return;
    case DType::kFloat32: std::memcpy(out.data(), values.bytes.data(), values.bytes.size());
  }
}

/// Largest of the two types: a bucket's memory holds either.
std::size_t widest(const ChunkTable& table, const ReductionSettings& settings) {
  return std::max(size_bytes(table.dtype()), size_bytes(settings.dtype));
}

}  // namespace

std::uint64_t GradientReducer::bucket_count(const ChunkTable& table,
                                            const ReductionSettings& settings) {
  const std::uint64_t wanted =
      settings.bucket_elements / static_cast<std::uint64_t>(table.sharding().world_size);
  const std::uint64_t tiles = std::max<std::uint64_t>(1, wanted / kTileElements);
  return std::min(tiles * kTileElements, table.largest_chunk_count());
}

std::uint64_t GradientReducer::bucket_bytes(const ChunkTable& table,
                                            const ReductionSettings& settings) {
  const auto runs = static_cast<std::uint64_t>(table.sharding().world_size);
  const std::uint64_t count = bucket_count(table, settings);
  return count * (runs * widest(table, settings) + size_bytes(settings.dtype));
}

GradientReducer::GradientReducer(Context& context, const ReductionSettings& settings,
                                 GradientNorm& norm)
    : context_(context),
      settings_(settings),
      norm_(norm),
      bucket_count_(bucket_count(context.table, settings)),
      buffer_returned_(context.reactor),
      turn_changed_(context.reactor) {
  const std::uint64_t bytes = bucket_bytes(context.table, settings);
  const std::uint64_t sum_bytes = bucket_count_ * size_bytes(settings.dtype);
  memory_ = context.permanent_lease(Purpose::kStaging, kReduceBuckets * bytes, "gradient buckets");
  for (std::size_t i = 0; i < kReduceBuckets; ++i) {
    const std::span<std::byte> memory = memory_.bytes().subspan(i * bytes, bytes);
    free_.push_back({.runs = memory.first(bytes - sum_bytes), .sum = memory.last(sum_bytes)});
  }
}

std::shared_ptr<GradientReducer::Reduction> GradientReducer::reduce(UnitId unit,
                                                                    std::byte* accumulator) {
  auto reduction = std::make_shared<Reduction>(Reduction{.unit = unit, .accumulator = accumulator});
  for (const Chunk& chunk : context_.table.slice_chunks(unit)) {
    reduction->reduced.emplace_back(context_.reactor);
    reduction->missing.push_back(chunk.count);
  }
  reduction->chunks_left = reduction->missing.size();
  under_way_.push_back(reduction);
  queue_.push_back(reduction);
  if (!std::exchange(draining_, true)) context_.spawn(drain());
  return reduction;
}

/// The only place where a reduction begins.
Task<> GradientReducer::drain() {
  while (!queue_.empty()) {
    const std::shared_ptr<Reduction> next = std::move(queue_.front());
    queue_.pop_front();
    const std::span<const Chunk> chunks = context_.table.slice_chunks(next->unit);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      for (std::uint64_t first = 0; first < chunks[i].count; first += bucket_count_) {
        Bucket bucket{.of = next,
                      .chunk = i,
                      .first = first,
                      .count = std::min(bucket_count_, chunks[i].count - first),
                      .number = next_number_++};
        bucket.buffer = co_await free_buffer();
        co_await round(bucket);
        const auto ranks = static_cast<std::uint64_t>(context_.table.sharding().world_size);
        const std::uint64_t run_bytes = bucket.count * size_bytes(settings_.dtype);
        Task<> sum = context_.ranks.grads->reduce_scatter(
            bucket.buffer.runs.first(ranks * run_bytes), bucket.buffer.sum.first(run_bytes),
            settings_.dtype);
        context_.spawn(take_in(std::move(bucket), std::move(sum)));
      }
    }
  }
  draining_ = false;
}

Task<GradientReducer::Buffer> GradientReducer::free_buffer() {
  while (free_.empty()) {
    if (error_) std::rethrow_exception(error_);
    buffer_returned_.reset();
    co_await buffer_returned_.wait();
  }
  const Buffer buffer = free_.back();
  free_.pop_back();
  co_return buffer;
}

/// Where the bucket's chunk begins in slice `slice` of the accumulator.
std::byte* GradientReducer::place(const Bucket& bucket, int slice) const {
  const std::span<const Chunk> chunks = context_.table.slice_chunks(bucket.of->unit);
  const std::uint64_t in_slice = chunks[bucket.chunk].begin - chunks[0].begin;
  const std::uint64_t slice_count = context_.table.unit(bucket.of->unit).slice_count;
  return bucket.of->accumulator +
         (static_cast<std::uint64_t>(slice) * slice_count + in_slice) * sizeof(float);
}

/// Every slice's run of the accumulator, rounded, side by side; a job a slice.
Task<> GradientReducer::round(const Bucket& bucket) {
  WorkGroup jobs(context_.reactor);
  for (int slice = 0; slice < context_.table.sharding().world_size; ++slice) {
    const float* values = reinterpret_cast<const float*>(place(bucket, slice)) + bucket.first;
    const TypedSpan<std::byte> out{
        settings_.dtype, bucket.buffer.runs.subspan(static_cast<std::uint64_t>(slice) *
                                                        bucket.count * size_bytes(settings_.dtype),
                                                    bucket.count * size_bytes(settings_.dtype))};
    const std::function<void()> job = [values, out] {
      for (std::size_t begin = 0; begin < out.count(); begin += kTileElements)
        round_gradient({values + begin, kTileElements}, out.subspan(begin, kTileElements));
    };
    jobs.spawn([](Context& context, std::function<void()> one) -> Task<> {
      co_await context.workers.run(context.reactor, "round gradient", one);
    }(context_, job));
  }
  co_await jobs.wait_idle();
}

Task<> GradientReducer::take_in(Bucket bucket, Task<> sum) {
  co_await std::move(sum);
  if (context_.ranks.replicas) {
    co_await turn_of(bucket);
    Task<> copies = context_.ranks.replicas->all_reduce(
        bucket.buffer.sum.first(bucket.count * size_bytes(settings_.dtype)), settings_.dtype);
    next_turn();
    co_await std::move(copies);
  }
  co_await convert(bucket);
  if (context_.table.slices_held() > 1) co_await gather(bucket);
  if (error_) co_return;
  free_.push_back(bucket.buffer);
  buffer_returned_.set();
  Reduction& of = *bucket.of;
  of.missing[bucket.chunk] -= bucket.count;
  if (of.missing[bucket.chunk] > 0) co_return;
  of.reduced[bucket.chunk].set();
  if (--of.chunks_left == 0) std::erase(under_way_, bucket.of);
}

/// The sum in the model's type, its squares added tile by tile: in its chunk's place, or, where all
/// slices are wanted, in its place among the runs.
///
/// In the chunk's place it overwrites fp32 values of this bucket and of those before it, which
/// were rounded already: element i of a chunk ends at most where its fp32 value ended.
Task<> GradientReducer::convert(const Bucket& bucket) {
  const ChunkTable& table = context_.table;
  const int own = table.sharding().rank;
  const std::size_t element_bytes = size_bytes(table.dtype());
  std::byte* const to = table.slices_held() > 1
                            ? bucket.buffer.runs.data() +
                                  static_cast<std::uint64_t>(own) * bucket.count * element_bytes
                            : place(bucket, own) + bucket.first * element_bytes;
  const auto chunk_begin =
      static_cast<std::uint64_t>(place(bucket, own) - bucket.of->accumulator) / sizeof(float);
  const TypedSpan<const std::byte> sum{
      settings_.dtype, bucket.buffer.sum.first(bucket.count * size_bytes(settings_.dtype))};
  const std::function<void()> job = [&] {
    Tile values;
    for (std::uint64_t begin = 0; begin < bucket.count; begin += kTileElements) {
      widen(sum.subspan(begin, kTileElements), values);
      norm_.round(bucket.of->unit, chunk_begin + bucket.first + begin, values,
                  {table.dtype(), {to + begin * element_bytes, kTileElements * element_bytes}});
    }
  };
  co_await context_.workers.run(context_.reactor, "take in gradient", job);
}

/// A bucket's second exchange, of sums, comes in the order of buckets: they may have been summed in
/// another.
Task<> GradientReducer::turn_of(const Bucket& bucket) {
  while (turn_ != bucket.number) {
    if (error_) std::rethrow_exception(error_);
    turn_changed_.reset();
    co_await turn_changed_.wait();
  }
}

void GradientReducer::next_turn() {
  ++turn_;
  if (!error_) turn_changed_.set();
}

/// Stage 0: every owner's sums, to where each chunk of this rank is.
Task<> GradientReducer::gather(const Bucket& bucket) {
  co_await turn_of(bucket);
  const ChunkTable& table = context_.table;
  const std::size_t element_bytes = size_bytes(table.dtype());
  const std::uint64_t run_bytes = bucket.count * element_bytes;
  const int ranks = table.sharding().world_size;
  const auto run = [&](int slice) {
    return bucket.buffer.runs.subspan(static_cast<std::uint64_t>(slice) * run_bytes, run_bytes);
  };
  Task<> gathering = context_.ranks.params->all_gather(
      run(table.sharding().rank),
      bucket.buffer.runs.first(static_cast<std::uint64_t>(ranks) * run_bytes));
  next_turn();
  co_await std::move(gathering);
  const std::function<void()> job = [&] {
    for (int slice = 0; slice < ranks; ++slice) {
      std::memcpy(place(bucket, slice) + bucket.first * element_bytes, run(slice).data(),
                  run_bytes);
    }
  };
  co_await context_.workers.run(context_.reactor, "take in gradient", job);
}

void GradientReducer::fail(std::exception_ptr error) {
  error_ = error;
  for (const auto& reduction : under_way_) {
    for (Signal& signal : reduction->reduced) signal.fail(error);
  }
  buffer_returned_.fail(error);
  turn_changed_.fail(error);
}

}  // namespace ziggurat

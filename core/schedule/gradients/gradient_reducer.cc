// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_reducer.cc: rounds, exchanges and sums gradients, bucket by
// bucket.
#include "core/schedule/gradients/gradient_reducer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "collectives/quantize/quantize.h"
#include "optimizer/gradient.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

using Tile = std::array<float, kTileElements>;

/// Returns the type of the values that ranks send of a unit.
DType type_sent(const ChunkTable& table, const ReductionSettings& settings, UnitId unit) {
  return settings.dtype.value_or(table.dtype(unit));
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
  if (const Quantization& quantization = table.sharding().quantization; quantization.gradients()) {
    const auto bits = static_cast<QuantizedBits>(quantization.gradient_bits);
    std::size_t widest = 0;
    for (UnitId u = 0; u < table.unit_count(); ++u)
      widest = std::max(widest, table.element_bytes(u));
    return 2 * runs * quantized_bytes(bits, count) + (settings.staged ? count * widest : 0);
  }
  std::uint64_t largest = 0;  // of an element
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    const std::size_t sent = size_bytes(type_sent(table, settings, u));
    // The memory of a run holds values of either type.
    largest = std::max(largest, runs * std::max(sent, table.element_bytes(u)) + sent);
  }
  return count * largest;
}

GradientReducer::GradientReducer(Context& context, const ReductionSettings& settings,
                                 GradientNorm& norm)
    : context_(context),
      settings_(settings),
      norm_(norm),
      bucket_count_(bucket_count(context.table, settings)),
      quantized_(context.table.sharding().quantization.gradients()),
      buffers_(context, kReduceBuckets, bucket_bytes(context.table, settings), "gradient buckets"),
      turns_(context.cancel) {}

std::shared_ptr<GradientReducer::Reduction> GradientReducer::reduce(UnitId unit,
                                                                    DeviceSpan<float> accumulator) {
  auto reduction = std::make_shared<Reduction>(Reduction{.unit = unit, .accumulator = accumulator});
  const std::span<const Chunk> chunks = context_.table.slice_chunks(unit);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    reduction->reduced.emplace_back(context_.cancel);
    reduction->missing.push_back(chunks[i].count);
  }
  queue_.push_back(reduction);
  if (!std::exchange(draining_, true)) context_.spawn(drain());
  return reduction;
}

/// Begins all reductions, in the order of the queue. No other function begins one.
Task<> GradientReducer::drain() {
  while (!queue_.empty()) {
    const std::shared_ptr<Reduction> next = std::move(queue_.front());
    queue_.pop_front();
    const std::span<const Chunk> chunks = context_.table.slice_chunks(next->unit);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      if (context_.table.constant_everywhere(next->unit, i)) continue;
      for (std::uint64_t first = 0; first < chunks[i].count; first += bucket_count_) {
        Bucket bucket{.of = next,
                      .chunk = i,
                      .first = first,
                      .count = std::min(bucket_count_, chunks[i].count - first),
                      .number = next_number_++};
        bucket.buffer = co_await buffers_.take();
        if (quantized_)
          co_await encode(bucket);
        else
          co_await round(bucket);
        Task<> sent = send(bucket);
        context_.spawn(take_in(std::move(bucket), std::move(sent)));
      }
    }
  }
  draining_ = false;
}

DType GradientReducer::sent_type(const Bucket& bucket) const {
  return type_sent(context_.table, settings_, bucket.of->unit);
}

/// Begins the first exchange of a bucket; await the result for its end.
Task<> GradientReducer::send(const Bucket& bucket) {
  if (quantized_) return send_codes(bucket);
  const Buffer buffer = parts(bucket);
  return context_.ranks.grads->reduce_scatter(buffer.runs, buffer.sum, sent_type(bucket));
}

/// Returns the element of the unit with which the bucket's chunk begins in slice `slice`.
std::uint64_t GradientReducer::chunk_begin(const Bucket& bucket, int slice) const {
  const std::span<const Chunk> chunks = context_.table.slice_chunks(bucket.of->unit);
  const std::uint64_t slice_count = context_.table.unit(bucket.of->unit).slice_count;
  return static_cast<std::uint64_t>(slice) * slice_count + chunks[bucket.chunk].begin -
         chunks[0].begin;
}

/// Returns the bucket's elements of slice `slice` in the accumulator, as the trainer summed them.
DeviceSpan<float> GradientReducer::values(const Bucket& bucket, int slice) const {
  return bucket.of->accumulator.subspan(chunk_begin(bucket, slice) + bucket.first, bucket.count);
}

/// Returns where the sum of slice `slice` over the ranks is stored, in the model's type. It
/// overwrites fp32 values of this bucket and of earlier ones, which were rounded already: element i
/// of a chunk ends at most where its fp32 value ended.
DeviceSpan<std::byte> GradientReducer::place(const Bucket& bucket, int slice) const {
  const std::size_t element_bytes = context_.table.element_bytes(bucket.of->unit);
  const DeviceSpan<float> chunk =
      bucket.of->accumulator.subspan(chunk_begin(bucket, slice), bucket.first + bucket.count);
  return chunk.as<std::byte>().subspan(bucket.first * element_bytes, bucket.count * element_bytes);
}

/// Returns the ranges of all slices that are as `first` is of slice 0.
Context::DeviceRows GradientReducer::rows(const Bucket& bucket, DeviceSpan<std::byte> first) const {
  const ChunkTable& table = context_.table;
  return {.first = first,
          .count = static_cast<std::uint64_t>(table.sharding().world_size),
          .stride_bytes = table.unit(bucket.of->unit).slice_count * sizeof(float)};
}

/// Returns where the CPU writes the sum of this rank's slice. That is its place, unless all slices
/// are needed or the CPU cannot reach the place: then it is memory of the bucket that the exchange
/// no longer needs.
std::span<std::byte> GradientReducer::result_room(const Bucket& bucket) const {
  const ChunkTable& table = context_.table;
  const int own = table.sharding().rank;
  const std::uint64_t run_bytes = bucket.count * table.element_bytes(bucket.of->unit);
  if (table.slices_held() > 1)
    return bucket.buffer.subspan(static_cast<std::uint64_t>(own) * run_bytes, run_bytes);
  if (!settings_.staged) return context_.compute->host_view(place(bucket, own));
  return quantized_ ? bucket.buffer.last(run_bytes) : bucket.buffer.first(run_bytes);
}

/// Copies `result` to the device, unless it was written there.
Task<> GradientReducer::bring(std::span<const std::byte> result, DeviceSpan<std::byte> to) {
  if (!settings_.staged) co_return;
  co_await context_.copy_to_device(to, result);
}

/// Rounds a tile of this rank's sum, beginning with element `first` of the bucket, to the model's
/// type in `out`, and gives its squares to the norm. Runs on a worker.
void GradientReducer::put_tile(const Bucket& bucket, std::uint64_t first,
                               std::span<const float> values, TypedSpan<std::byte> out) {
  const std::uint64_t chunk = chunk_begin(bucket, context_.table.sharding().rank);
  norm_.round(bucket.of->unit, chunk + bucket.first + first, values, out);
}

/// Returns the parts of a bucket's buffer if nothing is quantized: room for every slice's range in
/// either type, and then for the sum.
GradientReducer::Buffer GradientReducer::parts(const Bucket& bucket) const {
  const auto ranks = static_cast<std::uint64_t>(context_.table.sharding().world_size);
  const std::uint64_t run_bytes = bucket.count * size_bytes(sent_type(bucket));
  return {.runs = bucket.buffer.first(ranks * run_bytes), .sum = bucket.buffer.last(run_bytes)};
}

/// Returns the part of the buffer that is sent to the owner of slice `slice`.
std::span<std::byte> GradientReducer::run_sent(const Bucket& bucket, int slice) const {
  const std::uint64_t run_bytes = bucket.count * size_bytes(sent_type(bucket));
  return bucket.buffer.subspan(static_cast<std::uint64_t>(slice) * run_bytes, run_bytes);
}

/// Rounds every slice's range of the accumulator into the buffer, side by side, with one job per
/// slice.
Task<> GradientReducer::round(const Bucket& bucket) {
  const int slices = context_.table.sharding().world_size;
  if (settings_.staged) {
    co_await round_on_device(bucket);
    co_return;
  }
  std::vector<std::function<void()>> jobs;
  for (int slice = 0; slice < slices; ++slice) {
    const std::span<const std::byte> run =
        context_.compute->host_view(values(bucket, slice).as<std::byte>());
    const auto* const from = reinterpret_cast<const float*>(run.data());
    const TypedSpan<std::byte> out{sent_type(bucket), run_sent(bucket, slice)};
    jobs.emplace_back([from, out] {
      for (std::size_t begin = 0; begin < out.count(); begin += kTileElements)
        round_gradient({from + begin, kTileElements}, out.subspan(begin, kTileElements));
    });
  }
  const std::uint64_t element_bytes = sizeof(float) + size_bytes(sent_type(bucket));
  const std::uint64_t bytes = static_cast<std::uint64_t>(slices) * bucket.count * element_bytes;
  co_await context_.run_all({"round gradient", bytes}, jobs);
}

/// Rounds every slice's range on the device, in the place of its fp32 values. So it takes no other
/// memory of the device and crosses the link in the type that is sent between ranks.
Task<> GradientReducer::round_on_device(const Bucket& bucket) {
  const DeviceSpan<float> run = values(bucket, 0);
  const Context::DeviceRows rounded =
      rows(bucket, run.as<std::byte>().first(run_sent(bucket, 0).size()));
  const Compute::Rounding rounding{.values = run,
                                   .out = {sent_type(bucket), rounded.first},
                                   .squares = {},
                                   .rows = rounded.count,
                                   .stride_bytes = rounded.stride_bytes};
  co_await context_.compute->round(rounding);
  co_await context_.copy_rows_to_host(bucket.buffer.first(rounded.count * rounded.first.size()),
                                      rounded);
}

Task<> GradientReducer::take_in(Bucket bucket, Task<> sent) {
  co_await std::move(sent);
  if (quantized_)
    co_await take_in_codes(bucket);
  else
    co_await take_in_sum(bucket);
  buffers_.give_back(bucket.buffer);
  Reduction& of = *bucket.of;
  of.missing[bucket.chunk] -= bucket.count;
  if (of.missing[bucket.chunk] == 0) of.reduced[bucket.chunk].set();
}

Task<> GradientReducer::take_in_sum(const Bucket& bucket) {
  if (context_.ranks.replicas) {
    co_await turns_.wait(bucket.number);
    Task<> copies = context_.ranks.replicas->all_reduce(parts(bucket).sum, sent_type(bucket));
    turns_.next();
    co_await std::move(copies);
  }
  co_await convert(bucket);
  if (context_.table.slices_held() > 1) co_await gather(bucket);
}

/// Converts the sum to the model's type and adds up its squares tile by tile.
Task<> GradientReducer::convert(const Bucket& bucket) {
  const ChunkTable& table = context_.table;
  const TypedSpan<std::byte> out{table.dtype(bucket.of->unit), result_room(bucket)};
  const TypedSpan<const std::byte> sum{sent_type(bucket), parts(bucket).sum};
  const std::function<void()> job = [&] {
    Tile values;
    for (std::uint64_t begin = 0; begin < bucket.count; begin += kTileElements) {
      widen(sum.subspan(begin, kTileElements), values);
      put_tile(bucket, begin, values, out.subspan(begin, kTileElements));
    }
  };
  const Work work{.name = "take in gradient",
                  .bytes = sum.bytes.size() + out.bytes.size(),
                  .read = sum.bytes,
                  .written = out.bytes};
  co_await context_.workers.run(context_.reactor, work, job);
  if (table.slices_held() == 1) co_await bring(out.bytes, place(bucket, table.sharding().rank));
}

/// In stage 0: gathers every owner's sums and puts them where this rank keeps each chunk.
Task<> GradientReducer::gather(const Bucket& bucket) {
  co_await turns_.wait(bucket.number);
  const ChunkTable& table = context_.table;
  const std::uint64_t run_bytes = bucket.count * table.element_bytes(bucket.of->unit);
  const int ranks = table.sharding().world_size;
  const auto run = [&](int slice) {
    return bucket.buffer.subspan(static_cast<std::uint64_t>(slice) * run_bytes, run_bytes);
  };
  Task<> gathering = context_.ranks.params->all_gather(
      run(table.sharding().rank),
      bucket.buffer.first(static_cast<std::uint64_t>(ranks) * run_bytes));
  turns_.next();
  co_await std::move(gathering);
  if (settings_.staged) {
    const Context::DeviceRows places = rows(bucket, place(bucket, 0));
    co_await context_.copy_rows_to_device(places, bucket.buffer.first(places.count * run_bytes));
    co_return;
  }
  const std::function<void()> job = [&] {
    for (int slice = 0; slice < ranks; ++slice) {
      std::memcpy(context_.compute->host_view(place(bucket, slice)).data(), run(slice).data(),
                  run_bytes);
    }
  };
  const std::uint64_t bytes = 2 * static_cast<std::uint64_t>(ranks) * run_bytes;
  co_await context_.workers.run(context_.reactor, {"take in gradient", bytes}, job);
}

}  // namespace ziggurat

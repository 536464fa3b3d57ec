// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/quantized_reduction.cc: reduces a bucket of gradients in 8 or 4 bits (qgZ
// of ZeRO++, Wang et al. 2023, section 4.3). Every slice's range is encoded; then the values of the
// node's ranks are summed; these sums are encoded again; then the values of the nodes are summed.
// Sums are made in fp32, in the order of ranks and of nodes.
//
// Half of a bucket's buffer is for what is sent and half for what is received. Each half has the
// ranges of all slices in this order: first those of the first rank of every node, then those of
// the second rank of every node, and so on. With ranks 0 and 1 on one node, 2 and 3 on another, the
// order is 0 2 | 1 3. So the part for a rank of the same node is one piece, and the n-th range of
// what this rank sums goes to node n.
#include <algorithm>
#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "collectives/quantize/quantize.h"
#include "core/schedule/gradients/gradient_reducer.h"
#include "core/schedule/quantized_jobs.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

using Tile = std::array<float, kTileElements>;

/// Ranges of codes, `count` elements each, one after another.
struct Runs {
  QuantizedBits bits;
  std::uint64_t count;
  std::span<std::byte> memory;

  std::uint64_t each_bytes() const noexcept { return quantized_bytes(bits, count); }
  /// Returns elements [first, first + elements) of range `run`; `first` is where a block begins.
  std::span<std::byte> part(std::size_t run, std::uint64_t first, std::uint64_t elements) const {
    return memory.subspan(run * each_bytes() + quantized_bytes(bits, first),
                          quantized_bytes(bits, elements));
  }
  std::span<std::byte> first_of(int runs) const {
    return memory.first(static_cast<std::size_t>(runs) * each_bytes());
  }
};

/// Sums one tile over `addends` ranges, each `stride` after the previous one, in their order.
void sum_tile(const Runs& runs, std::size_t run, std::size_t stride, int addends,
              std::uint64_t first, Tile& sum) {
  sum.fill(0);
  for (int i = 0; i < addends; ++i, run += stride)
    add_dequantized(runs.bits, runs.part(run, first, kTileElements), sum);
}

}  // namespace

/// The two halves of a bucket's buffer: what is sent and what is received.
struct GradientReducer::Codes {
  Runs sent;
  Runs came;

  Codes(const Bucket& bucket, const Sharding& sharding)
      : sent{.bits = static_cast<QuantizedBits>(sharding.quantization.gradient_bits),
             .count = bucket.count,
             .memory = {}},
        came(sent) {
    const std::size_t half = static_cast<std::size_t>(sharding.world_size) * sent.each_bytes();
    sent.memory = bucket.buffer.first(half);
    came.memory = bucket.buffer.subspan(half, half);
  }
};

/// Encodes every slice's range of the accumulator. Blocks begin where tiles do, so the size of
/// buckets does not change any bit.
Task<> GradientReducer::encode(const Bucket& bucket) {
  const Sharding& sharding = context_.table.sharding();
  const NodeGrid nodes = sharding.nodes();
  const Runs sent = Codes(bucket, sharding).sent;
  const auto run_of = [&](int slice) {
    return static_cast<std::size_t>(slice % nodes.within * nodes.nodes + slice / nodes.within);
  };
  if (settings_.staged) {
    WorkGroup runs(context_.reactor);
    for (int slice = 0; slice < sharding.world_size; ++slice)
      runs.spawn(
          encode_on_device(values(bucket, slice), sent.part(run_of(slice), 0, bucket.count)));
    co_await runs.wait_idle();
    co_return;
  }
  std::vector<std::function<void()>> jobs;
  for (int slice = 0; slice < sharding.world_size; ++slice) {
    const std::size_t run = run_of(slice);
    const std::span<const std::byte> here =
        context_.compute->host_view(values(bucket, slice).as<std::byte>());
    const auto* const run_begin = reinterpret_cast<const float*>(here.data());
    each_quantized_job(bucket.count, [&](std::uint64_t begin, std::uint64_t count) {
      jobs.emplace_back([=] {
        quantize(sent.bits, as_typed(std::span(run_begin + begin, count)),
                 sent.part(run, begin, count));
      });
    });
  }
  const auto slices = static_cast<std::uint64_t>(sharding.world_size);
  const std::uint64_t bytes = slices * (bucket.count * sizeof(float) + sent.each_bytes());
  co_await context_.run_all({"quantize gradient", bytes}, jobs);
}

/// Encodes on the device, so that codes and not values cross the link.
Task<> GradientReducer::encode_on_device(DeviceSpan<const float> run, std::span<std::byte> codes) {
  const int bits = context_.table.sharding().quantization.gradient_bits;
  const Compute::Quantizing quantizing{
      .values = run, .bits = static_cast<QuantizedBits>(bits), .codes = codes};
  co_await context_.compute->quantize(quantizing);
}

/// Begins the first exchange; await the result for its end.
Task<> GradientReducer::send_codes(const Bucket& bucket) {
  const Sharding& sharding = context_.table.sharding();
  const RankChannels::ByNode& ranks = context_.ranks.quantized_grads;
  const Codes codes(bucket, sharding);
  Communicator& first = ranks.within ? *ranks.within : *ranks.across;
  return first.all_to_all(codes.sent.first_of(sharding.world_size),
                          codes.came.first_of(sharding.world_size));
}

/// Quantizes the sums of this node's ranks again and sends each to the rank that adds up the sums
/// of the nodes.
Task<> GradientReducer::send_node_sums(const Bucket& bucket) {
  const NodeGrid nodes = context_.table.sharding().nodes();
  const Codes codes(bucket, context_.table.sharding());
  std::vector<std::function<void()>> jobs;
  for (int node = 0; node < nodes.nodes; ++node) {
    each_quantized_job(bucket.count, [&](std::uint64_t begin, std::uint64_t count) {
      const std::uint64_t end = begin + count;
      jobs.emplace_back([=, run = static_cast<std::size_t>(node),
                         stride = static_cast<std::size_t>(nodes.nodes)] {
        Tile sum;
        for (std::uint64_t first = begin; first < end; first += kTileElements) {
          sum_tile(codes.came, run, stride, nodes.within, first, sum);
          quantize(codes.sent.bits, as_typed(std::span<const float>(sum)),
                   codes.sent.part(run, first, kTileElements));
        }
      });
    });
  }
  const auto sums = static_cast<std::uint64_t>(nodes.nodes);
  const auto addends = static_cast<std::uint64_t>(nodes.within);
  const std::uint64_t bytes = sums * (addends + 1) * codes.sent.each_bytes();
  co_await context_.run_all({"sum gradient in node", bytes}, jobs);
  co_await turns_.wait(bucket.number);
  Task<> between = context_.ranks.quantized_grads.across->all_to_all(
      codes.sent.first_of(nodes.nodes), codes.came.first_of(nodes.nodes));
  turns_.next();
  co_await std::move(between);
}

/// Continues after the first exchange. At the end this rank's slice of the sum is in its place.
Task<> GradientReducer::take_in_codes(const Bucket& bucket) {
  const ChunkTable& table = context_.table;
  const NodeGrid nodes = table.sharding().nodes();
  const bool twice = nodes.within > 1 && nodes.nodes > 1;
  if (twice) co_await send_node_sums(bucket);
  const int addends = twice ? nodes.nodes : table.sharding().world_size;
  const Runs came = Codes(bucket, table.sharding()).came;
  const TypedSpan<std::byte> out{table.dtype(bucket.of->unit), result_room(bucket)};
  std::vector<std::function<void()>> jobs;
  each_quantized_job(bucket.count, [&](std::uint64_t begin, std::uint64_t count) {
    const std::uint64_t end = begin + count;
    jobs.emplace_back([=, this, &bucket] {
      Tile sum;
      for (std::uint64_t first = begin; first < end; first += kTileElements) {
        sum_tile(came, 0, 1, addends, first, sum);
        put_tile(bucket, first, sum, out.subspan(first, kTileElements));
      }
    });
  });
  const std::uint64_t bytes =
      static_cast<std::uint64_t>(addends) * came.each_bytes() + out.bytes.size();
  co_await context_.run_all({"take in gradient", bytes}, jobs);
  co_await bring(out.bytes, place(bucket, table.sharding().rank));
}

}  // namespace ziggurat

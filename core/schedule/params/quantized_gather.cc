// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/quantized_gather.cc: encodes, sends between nodes, sends within a node, and
// decodes.
#include "core/schedule/params/quantized_gather.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "collectives/quantize/quantize.h"
#include "core/schedule/quantized_jobs.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

constexpr auto kBits = QuantizedBits::k8;
std::uint64_t slice_bytes(const ChunkTable& table, UnitId unit) {
  return quantized_bytes(kBits, table.unit(unit).slice_count);
}

}  // namespace

std::uint64_t QuantizedGather::buffer_bytes(const ChunkTable& table) {
  std::uint64_t largest_bytes = 0;
  for (UnitId u = 0; u < table.unit_count(); ++u)
    largest_bytes = std::max(largest_bytes, slice_bytes(table, u));
  return largest_bytes * static_cast<std::uint64_t>(table.sharding().world_size);
}

QuantizedGather::QuantizedGather(Context& context)
    : context_(context),
      buffers_(context, kQuantizedGathers, buffer_bytes(context.table), "quantized parameters"),
      turns_(context.cancel) {}

/// Returns where the codes of `slices` consecutive slices are in the buffer, beginning with the
/// slice of `rank`.
std::span<std::byte> QuantizedGather::codes_of(const Codes& codes, int rank, int slices) const {
  const NodeGrid nodes = context_.table.sharding().nodes();
  const int place = rank % nodes.within * nodes.nodes + rank / nodes.within;
  const std::uint64_t each = slice_bytes(context_.table, codes.unit);
  return codes.buffer.subspan(static_cast<std::uint64_t>(place) * each,
                              static_cast<std::uint64_t>(slices) * each);
}

Task<QuantizedGather::Codes> QuantizedGather::encode(UnitId unit,
                                                     std::span<const std::byte> slice) {
  Codes codes{.unit = unit, .number = next_number_++};
  codes.buffer = co_await buffers_.take();
  const ChunkTable& table = context_.table;
  const std::size_t element_bytes = table.element_bytes(unit);
  const std::span<std::byte> own = codes_of(codes, table.sharding().rank, 1);
  std::vector<std::function<void()>> jobs;
  each_quantized_job(table.unit(unit).slice_count, [&](std::uint64_t first, std::uint64_t count) {
    jobs.emplace_back([=, dtype = table.dtype(unit)] {
      quantize(kBits, {dtype, slice.subspan(first * element_bytes, count * element_bytes)},
               own.subspan(quantized_bytes(kBits, first), quantized_bytes(kBits, count)));
    });
  });
  co_await context_.run_all({"quantize params", slice.size() + own.size()}, jobs);
  co_return codes;
}

Task<> QuantizedGather::begin(const Codes& codes) {
  const RankChannels::ByNode& ranks = context_.ranks.quantized_params;
  const NodeGrid nodes = context_.table.sharding().nodes();
  const int own = context_.table.sharding().rank;
  if (ranks.across) {
    return ranks.across->all_gather(codes_of(codes, own, 1),
                                    codes_of(codes, own % nodes.within, nodes.nodes));
  }
  return ranks.within->all_gather(codes_of(codes, own, 1), codes_of(codes, 0, nodes.within));
}

Task<> QuantizedGather::finish(Codes codes) {
  const Sharding& sharding = context_.table.sharding();
  const NodeGrid nodes = sharding.nodes();
  if (nodes.within == 1 || nodes.nodes == 1) co_return;
  co_await turns_.wait(codes.number);
  Task<> gathering = context_.ranks.quantized_params.within->all_gather(
      codes_of(codes, sharding.rank % nodes.within, nodes.nodes),
      codes_of(codes, 0, sharding.world_size));
  turns_.next();
  co_await std::move(gathering);
}

Task<> QuantizedGather::decode(Codes codes, Run run, std::span<std::byte> out) {
  const DType dtype = context_.table.dtype(codes.unit);
  const int ranks = context_.table.sharding().world_size;
  std::vector<std::function<void()>> jobs;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::span<const std::byte> from =
        codes_of(codes, rank, 1).subspan(quantized_bytes(kBits, run.first));
    const TypedSpan<std::byte> to = TypedSpan<std::byte>{dtype, out}.subspan(
        static_cast<std::uint64_t>(rank) * run.count, run.count);
    each_quantized_job(run.count, [&](std::uint64_t first, std::uint64_t count) {
      jobs.emplace_back([=] {
        dequantize(kBits,
                   from.subspan(quantized_bytes(kBits, first), quantized_bytes(kBits, count)),
                   to.subspan(first, count));
      });
    });
  }
  const std::uint64_t coded = quantized_bytes(kBits, run.count) * static_cast<std::uint64_t>(ranks);
  co_await context_.run_all({"dequantize params", coded + out.size()}, jobs);
}

}  // namespace ziggurat

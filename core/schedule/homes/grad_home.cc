// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grad_home.cc: gradients on the three tiers and in lent memory.
#include "core/schedule/homes/grad_home.h"

#include <algorithm>
#include <utility>

#include "base/numerics/typed_value.h"
#include "core/schedule/homes/checked_items.h"

namespace ziggurat {
namespace {

class HostGradHome final : public UnitGradHome {
 public:
  explicit HostGradHome(Context& context)
      : UnitGradHome(context), chunks_(context.table.chunks().size()) {}

  Task<> accept(ChunkId id, DeviceSpan<const std::byte> gradient, Need need) override {
    chunks_[id] = co_await copied(id, gradient, need);
  }
  Task<TypedSpan<const std::byte>> fetch(ChunkId id, std::span<std::byte>) override {
    co_return TypedSpan<const std::byte>{context_.table.chunk_dtype(id), chunks_[id].bytes()};
  }
  void drop(ChunkId id) noexcept override { chunks_[id] = {}; }

 private:
  std::vector<Lease> chunks_;
};

class DeviceGradHome final : public UnitGradHome {
 public:
  DeviceGradHome(Context& context, AllocateDevice allocate)
      : UnitGradHome(context),
        reachable_(context.device->host_accessible()),
        allocate_(std::move(allocate)),
        chunks_(context.table.chunks().size()) {}

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    return reachable_ || chunk.constant ? 0 : chunk.param_bytes();
  }
  Task<> accept(ChunkId id, DeviceSpan<const std::byte> gradient, Need) override {
    chunks_[id] = co_await allocate_(gradient.size(), Purpose::kGradients);
    const Stream::Copy request{.destination = chunks_[id].data(),
                               .source = reinterpret_cast<const std::byte*>(gradient.address()),
                               .size_bytes = gradient.size(),
                               .direction = Stream::Direction::kOnDevice};
    co_await copy(context_.reactor, *context_.to_host, request);
  }
  Task<TypedSpan<const std::byte>> fetch(ChunkId id, std::span<std::byte> item) override {
    TypedSpan<const std::byte> grad{context_.table.chunk_dtype(id), item};
    if (reachable_) {
      grad.bytes = {chunks_[id].data(), chunks_[id].size_bytes()};
    } else {
      co_await context_.copy_to_host(item, device_span(chunks_[id]));
    }
    co_return grad;
  }
  Task<TypedDeviceSpan<const std::byte>> fetch_to_device(ChunkId id, std::span<std::byte>,
                                                         DeviceSpan<std::byte>) override {
    co_return TypedDeviceSpan<const std::byte>{context_.table.chunk_dtype(id),
                                               device_span(chunks_[id])};
  }
  void drop(ChunkId id) noexcept override { chunks_[id] = {}; }

 private:
  bool reachable_;  // the CPU can read the device's memory
  AllocateDevice allocate_;
  std::vector<DeviceBuffer> chunks_;
};

class NvmeGradHome final : public UnitGradHome {
 public:
  NvmeGradHome(Context& context, std::vector<StripePlace> places) : UnitGradHome(context) {
    std::vector<std::uint64_t> sizes;
    for (const Chunk& chunk : context.table.chunks())
      sizes.push_back(chunk.constant ? 0 : chunk.param_bytes());
    file_ = SwapFile::create(context.reactor, std::move(places), std::move(sizes));
  }

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    return chunk.constant ? 0 : chunk.param_bytes();
  }
  Task<> accept(ChunkId id, DeviceSpan<const std::byte> gradient, Need need) override {
    const Lease lease = co_await copied(id, gradient, need);
    co_await write_hashed(context_, *file_, id, lease.bytes(), IoPriority::kWriteBack,
                          context_.node_of(id));
  }
  Task<TypedSpan<const std::byte>> fetch(ChunkId id, std::span<std::byte> item) override {
    co_await read_verified(context_, *file_, id, item, IoPriority::kPrefetch, context_.node_of(id));
    co_return TypedSpan<const std::byte>{context_.table.chunk_dtype(id), item};
  }

 private:
  std::unique_ptr<SwapFile> file_;  // an item for each chunk
};

}  // namespace

GradHome::GradHome(Context& context) : context_(context) {
  for (std::size_t i = 0; i < context.table.chunks().size(); ++i)
    arrived_.emplace_back(context.cancel);
}

Task<TypedDeviceSpan<const std::byte>> GradHome::fetch_to_device(ChunkId id,
                                                                 std::span<std::byte> item,
                                                                 DeviceSpan<std::byte> staging) {
  Task<TypedSpan<const std::byte>> fetching = fetch(id, item);
  const TypedSpan<const std::byte> host = co_await std::move(fetching);
  const DeviceSpan<std::byte> there = staging.first(host.bytes.size());
  co_await context_.copy_to_device(there, host.bytes);
  co_return TypedDeviceSpan<const std::byte>{context_.table.chunk_dtype(id), there};
}

std::unique_ptr<UnitGradHome> UnitGradHome::create(Context& context,
                                                   std::vector<StripePlace> places,
                                                   AllocateDevice allocate) {
  switch (context.placement.grads) {
    case Tier::kHost: return std::make_unique<HostGradHome>(context);
    case Tier::kNvme: return std::make_unique<NvmeGradHome>(context, std::move(places));
    default: return std::make_unique<DeviceGradHome>(context, std::move(allocate));
  }
}

Task<Lease> UnitGradHome::copied(ChunkId id, DeviceSpan<const std::byte> source, Need need) {
  const LeaseRequest request{.purpose = Purpose::kGradients,
                             .size_bytes = source.size(),
                             .need = need,
                             .holder = "gradient",
                             .numa_node = context_.node_of(id)};
  Lease lease = co_await context_.pool.acquire(request);
  co_await context_.copy_to_host(lease.bytes(), source);
  co_return lease;
}

bool LentGradHome::absent(ChunkId id) const {
  return std::ranges::all_of(context_.table.param_runs(id),
                             [&](const ParamRun& run) { return absent(run); });
}

Task<TypedSpan<const std::byte>> LentGradHome::fetch(ChunkId id, std::span<std::byte> item) {
  const std::vector<ParamRun> runs = context_.table.param_runs(id);
  const bool some_summed =
      std::ranges::any_of(runs, [&](const ParamRun& run) { return summed(run); });
  const bool packed = context_.table.is_packed(context_.table.chunk(id).unit);
  if (!packed && !some_summed)
    co_return lent_[runs.front().lent].subspan(runs.front().first, runs.front().count);
  const TypedSpan<std::byte> all{DType::kFloat32, item};
  if (some_summed) co_await sums_->fetch(id, all.as<float>());
  if (!packed) co_return all.subspan(0, runs.front().count);
  const std::function<void()> job = [&] {
    for (const ParamRun& run : runs) {
      if (absent(run) || summed(run)) continue;
      const TypedSpan<const std::byte> lent = lent_[run.lent].subspan(run.first, run.count);
      const std::span<float> to = all.as<float>().subspan(run.begin, run.count);
      for (std::size_t i = 0; i < to.size(); ++i)
        to[i] = value_at(lent.dtype, lent.bytes.data(), i);
    }
  };
  {
    const LentMemory::Use its(context_.lent);
    co_await context_.run_near(id, "gather gradients", job);
  }
  co_return all;
}

}  // namespace ziggurat

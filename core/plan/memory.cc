// SPDX-License-Identifier: Apache-2.0
// core/plan/memory.cc: counts the elements of each class and multiplies them by their bytes.
#include "core/plan/memory.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "collectives/quantize/quantize.h"
#include "core/sharding/shard.h"
#include "tiers/store/record_format.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) noexcept {
  return (value + by - 1) / by;
}

/// Elements of a class on one rank.
struct Share {
  std::uint64_t exact;   ///< an equal part of the parameters, without padding
  std::uint64_t padded;  ///< with padding, as it is kept
};

/// Returns one rank's share of a class that is cut over `shards` ranks.
Share share_of(const ModelSize& model, int slices, int shards) noexcept {
  const std::uint64_t exact = ceil_div(model.rank_count(), static_cast<std::uint64_t>(shards));
  if (model.units.empty()) return {exact, exact};
  std::uint64_t slice = 0;
  for (const std::uint64_t unit : model.units) slice += slice_elements(unit, slices);
  return {exact, slice * static_cast<std::uint64_t>(slices / shards)};
}

/// The chunks of a slice, cut as core/sharding/chunk_table.h does: evenly, so that there are only
/// two sizes.
struct Cut {
  std::uint64_t chunks, tiles, larger;  ///< `larger` of the chunks have one tile more

  Cut(std::uint64_t slice_count, std::uint64_t tiles_max)
      : chunks(ceil_div(slice_count / kTileElements, tiles_max)),
        tiles(slice_count / kTileElements / chunks),
        larger(slice_count / kTileElements % chunks) {}
  std::uint64_t largest() const noexcept { return (tiles + (larger > 0 ? 1 : 0)) * kTileElements; }
};

/// Returns the bytes of all records of a rank.
std::uint64_t record_bytes(const MemoryRequest& request, const RecordFormat& format) {
  const ModelSize& model = request.model;
  const int slices = request.strategy.slices();
  const int shards = request.strategy.update_shards();
  if (model.units.empty())
    return share_of(model, slices, shards).padded * format.tile_bytes() / kTileElements;
  std::uint64_t slice_bytes = 0;
  for (const std::uint64_t unit : model.units) {
    const Cut cut(slice_elements(unit, slices), request.chunk_tiles_max);
    slice_bytes += cut.larger * format.record_bytes(cut.tiles + 1) +
                   (cut.chunks - cut.larger) * format.record_bytes(cut.tiles);
  }
  return slice_bytes * static_cast<std::uint64_t>(slices / shards);
}

std::uint64_t master_bytes(const StateKind& state) noexcept {
  return rounds_masters(state.format) ? sizeof(bf16) : sizeof(float);
}

/// Adds up the items of a request.
class Sum {
 public:
  explicit Sum(const MemoryRequest& request) : request_(request) {}

  RankMemory total() {
    const Strategy& strategy = request_.strategy;
    const Placement& placement = request_.placement;
    add_cut(StateClass::kParams, placement.params, strategy.param_shards());
    if (strategy.hpz > 0) add_cut(StateClass::kSecondaryParams, Tier::kHost, strategy.hpz);
    add_cut(StateClass::kGradients, placement.grads, strategy.update_shards());
    add_records(placement);
    return std::move(memory_);
  }

 private:
  void add(StateClass kind, Tier tier, std::uint64_t size_bytes) {
    memory_.add(kind, tier, size_bytes);
  }
  void add_cut(StateClass kind, Tier tier, int shards) {
    const std::uint64_t element = size_bytes(request_.recipe.dtype);
    const Share share = share_of(request_.model, request_.strategy.slices(), shards);
    add(kind, tier, share.padded * element);
    memory_.padding_bytes += (share.padded - share.exact) * element;
  }

  void add_records(const Placement& placement) {
    const Tier tier = placement.optimizer;
    const StateKind& state = request_.recipe.state;
    const RecordFormat format = record_format(state);
    const Share share =
        share_of(request_.model, request_.strategy.slices(), request_.strategy.update_shards());
    const std::uint64_t records = record_bytes(request_, format);
    const std::uint64_t masters = share.padded * master_bytes(state);
    const std::uint64_t padding = records - share.exact * format.tile_bytes() / kTileElements;
    const std::uint64_t first = std::min(records, placement.device_record_bytes);
    // NVMe has all records, also those that stay on the device.
    const std::uint64_t moved = tier == Tier::kNvme ? 0 : first;
    const std::uint64_t moved_masters = masters * moved / std::max<std::uint64_t>(records, 1);
    if (moved > 0) {
      add(StateClass::kMasters, Tier::kDevice, moved_masters);
      add(StateClass::kMoments, Tier::kDevice, moved - moved_masters);
    } else if (first > 0) {
      add(StateClass::kKeptRecords, Tier::kDevice, first);
    }
    add(StateClass::kMasters, tier, masters - moved_masters);
    add(StateClass::kMoments, tier, records - masters - (moved - moved_masters));
    memory_.padding_bytes += padding;
    if (tier != Tier::kNvme) {
      add(StateClass::kCheckpoint, Tier::kNvme,
          records * static_cast<std::uint64_t>(request_.slots));
    } else if (request_.slots == 2) {
      add(StateClass::kSecondSlot, tier, records);
      memory_.padding_bytes += padding;
    }
  }

  const MemoryRequest& request_;
  RankMemory memory_;
};

}  // namespace

std::uint64_t ModelSize::rank_count() const noexcept {
  if (units.empty()) return ceil_div(model_count, static_cast<std::uint64_t>(tp));
  return std::accumulate(units.begin(), units.end(), std::uint64_t{0});
}

ModelSize model_size(const ModelSpec& model, int tp) {
  ZIGGURAT_CHECK(tp >= 1, "tp {}", tp);
  ModelSize size{.model_count = model.count(), .units = {}, .tp = tp};
  for (const UnitSpec& unit : model.units) {
    std::uint64_t count = 0;
    for (const ParamSpec& param : unit.params) {
      if (param.tp_dim < 0) {
        count += param.count();
        continue;
      }
      const auto along =
          static_cast<std::uint64_t>(param.shape[static_cast<std::size_t>(param.tp_dim)]);
      count += param.count() / along * ceil_div(along, static_cast<std::uint64_t>(tp));
    }
    size.units.push_back(count);
  }
  return size;
}

ModelSize model_size(std::uint64_t count, int tp) noexcept {
  return {.model_count = count, .units = {}, .tp = tp};
}

std::string_view to_string(StateClass kind) noexcept {
  switch (kind) {
    case StateClass::kParams: return "parameters";
    case StateClass::kSecondaryParams: return "secondary parameters";
    case StateClass::kGradients: return "gradients";
    case StateClass::kMasters: return "masters";
    case StateClass::kMoments: return "moments";
    case StateClass::kSecondSlot: return "second slot of records";
    case StateClass::kCheckpoint: return "room for checkpoints of records";
    case StateClass::kStoreTables: return "the store's tables";
    case StateClass::kActivations: return "activations and workspace";
    case StateClass::kLiveParams: return "parameters in use";
    case StateClass::kAccumulator: return "gradient accumulator";
    case StateClass::kNormSums: return "sums of squares";
    case StateClass::kBucket: return "gradient bucket";
    case StateClass::kQuantizedParams: return "quantized parameters";
    case StateClass::kKeptRecords: return "records kept from step to step";
    case StateClass::kWorkItems: return "data on its way from and to NVMe";
    case StateClass::kSaveBuffers: return "data on its way to a checkpoint";
    case StateClass::kGaps: return "gaps between tensors";
  }
  return "?";
}

std::uint64_t RankMemory::bytes(StateClass kind) const noexcept {
  std::uint64_t total = 0;
  for (const MemoryItem& item : items) total += item.kind == kind ? item.size_bytes : 0;
  return total;
}

std::uint64_t RankMemory::bytes(Tier tier) const noexcept {
  std::uint64_t total = 0;
  for (const MemoryItem& item : items) total += item.tier == tier ? item.size_bytes : 0;
  return total;
}

std::uint64_t RankMemory::bytes(StateClass kind, Tier tier) const noexcept {
  std::uint64_t total = 0;
  for (const MemoryItem& item : items)
    total += item.kind == kind && item.tier == tier ? item.size_bytes : 0;
  return total;
}

std::uint64_t RankMemory::model_state_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const MemoryItem& item : items) {
    if (item.kind < StateClass::kSecondSlot) total += item.size_bytes;
  }
  return total;
}

RankMemory rank_memory(const MemoryRequest& request) { return Sum(request).total(); }

double published_state_bytes(const ModelSize& model, const Recipe& recipe,
                             const Strategy& strategy) noexcept {
  const auto psi = static_cast<double>(model.rank_count());
  const auto element = static_cast<double>(size_bytes(recipe.dtype));
  const double optimizer = state_traffic(recipe.state, /*param_elsewhere=*/false).written;
  const int grad_shards = strategy.zero_stage == 1 ? 1 : strategy.update_shards();
  double bytes = element / strategy.param_shards() + element / grad_shards +
                 optimizer / strategy.update_shards();
  if (strategy.hpz > 0) bytes += element / strategy.hpz;
  return bytes * psi;
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/sharding/memory.cc: elements by class, times bytes.
#include "core/sharding/memory.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "collectives/quantize.h"
#include "core/sharding/shard.h"
#include "tiers/record_format.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) noexcept {
  return (value + by - 1) / by;
}

/// Elements of a class on one rank.
struct Share {
  std::uint64_t exact;   ///< an equal part of the parameters
  std::uint64_t padded;  ///< what is kept
};

/// Of a class that is cut over `shards` ranks.
Share share_of(const ModelSize& model, int slices, int shards) noexcept {
  const std::uint64_t exact = ceil_div(model.rank_count(), static_cast<std::uint64_t>(shards));
  if (model.units.empty()) return {exact, exact};
  std::uint64_t slice = 0;
  for (const std::uint64_t unit : model.units) slice += slice_elements(unit, slices);
  return {exact, slice * static_cast<std::uint64_t>(slices / shards)};
}

/// Chunks of a slice, as core/sharding/chunk_table.h cuts: evenly, so of two sizes.
struct Cut {
  std::uint64_t chunks, tiles, larger;  ///< `larger` of them have one tile more

  Cut(std::uint64_t slice_count, std::uint64_t tiles_max)
      : chunks(ceil_div(slice_count / kTileElements, tiles_max)),
        tiles(slice_count / kTileElements / chunks),
        larger(slice_count / kTileElements % chunks) {}
  std::uint64_t largest() const noexcept { return (tiles + (larger > 0 ? 1 : 0)) * kTileElements; }
};

/// Bytes of all records of a rank.
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
  return state.format == StateFormat::kBf16 ? sizeof(bf16) : sizeof(float);
}

std::uint64_t padded_unit(std::uint64_t count, int slices) noexcept {
  return slice_elements(count, slices) * static_cast<std::uint64_t>(slices);
}

/// The most that kLiveUnits units in a row have, padding included.
std::uint64_t live_count(const ModelSize& model, int slices) noexcept {
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    std::uint64_t sum = 0;
    for (std::size_t u = i; u < std::min(i + kLiveUnits, model.units.size()); ++u)
      sum += padded_unit(model.units[u], slices);
    most = std::max(most, sum);
  }
  return most;
}

/// Gathers the items of a request.
class Sum {
 public:
  explicit Sum(const MemoryRequest& request) : request_(request) {}

  RankMemory total() {
    add_at_rest();
    if (!request_.model.units.empty()) add_in_use();
    return std::move(memory_);
  }

 private:
  void add(StateClass kind, Tier tier, std::uint64_t size_bytes) {
    if (size_bytes > 0) memory_.items.push_back({kind, tier, size_bytes});
  }
  void add_cut(StateClass kind, Tier tier, int shards) {
    const std::uint64_t element = size_bytes(request_.recipe.dtype);
    const Share share = share_of(request_.model, request_.strategy.slices(), shards);
    add(kind, tier, share.padded * element);
    memory_.padding_bytes += (share.padded - share.exact) * element;
  }

  void add_at_rest() {
    const Strategy& strategy = request_.strategy;
    const Placement& placement = request_.placement;
    add_cut(StateClass::kParams, placement.params, strategy.param_shards());
    if (strategy.hpz > 0) add_cut(StateClass::kSecondaryParams, Tier::kHost, strategy.hpz);
    add_cut(StateClass::kGradients, placement.grads, strategy.update_shards());
    add_records(placement.optimizer);
  }

  void add_records(Tier tier) {
    const StateKind& state = request_.recipe.state;
    const RecordFormat format = record_format(state);
    const Share share =
        share_of(request_.model, request_.strategy.slices(), request_.strategy.update_shards());
    const std::uint64_t records = record_bytes(request_, format);
    const std::uint64_t masters = share.padded * master_bytes(state);
    const std::uint64_t padding = records - share.exact * format.tile_bytes() / kTileElements;
    add(StateClass::kMasters, tier, masters);
    add(StateClass::kMoments, tier, records - masters);
    memory_.padding_bytes += padding;
    if (tier != Tier::kNvme || request_.slots == 1) return;
    add(StateClass::kSecondSlot, tier, records);
    memory_.padding_bytes += padding;
  }

  void add_in_use() {
    const ModelSize& model = request_.model;
    const Strategy& strategy = request_.strategy;
    const int slices = strategy.slices();
    const std::uint64_t element = size_bytes(request_.recipe.dtype);
    if (strategy.keeps_params_to_backward) {
      std::uint64_t all = 0;
      for (const std::uint64_t unit : model.units) all += padded_unit(unit, slices);
      add(StateClass::kLiveParams, Tier::kDevice, all * element);
    } else if (request_.placement.params != Tier::kDevice || strategy.param_shards() > 1) {
      add(StateClass::kLiveParams, Tier::kDevice, live_count(model, slices) * element);
    }
    const std::uint64_t largest = *std::ranges::max_element(model.units);
    add(StateClass::kAccumulator, Tier::kDevice, padded_unit(largest, slices) * sizeof(float));
    const std::uint64_t slice = slice_elements(largest, slices);
    std::uint64_t chunk = 0;  // not always the largest unit's: even cuts differ
    for (const std::uint64_t unit : model.units)
      chunk =
          std::max(chunk, Cut(slice_elements(unit, slices), request_.chunk_tiles_max).largest());
    if (strategy.dp > 1) add(StateClass::kBucket, Tier::kHost, bucket_bytes(chunk));
    if (request_.quantization.weights) {
      add(StateClass::kQuantizedParams, Tier::kHost,
          kQuantizedGathers * static_cast<std::uint64_t>(slices) *
              quantized_bytes(QuantizedBits::k8, slice));
    }
    add(StateClass::kWorkItems, Tier::kHost, work_item_bytes(slice, chunk));
  }

  /// Whole tiles of the same run of every slice, and their sum; or what is sent and what comes,
  /// quantized. A bucket ends with its chunk (core/schedule/gradients/gradient_reducer.h).
  std::uint64_t bucket_bytes(std::uint64_t chunk) const noexcept {
    const auto slices = static_cast<std::uint64_t>(request_.strategy.slices());
    const std::uint64_t tiles = request_.reduce_bucket_count / slices / kTileElements;
    const std::uint64_t count = std::min(std::max<std::uint64_t>(1, tiles) * kTileElements, chunk);
    if (const Quantization& quantization = request_.quantization; quantization.gradients()) {
      const auto bits = static_cast<QuantizedBits>(quantization.gradient_bits);
      return kReduceBuckets * 2 * slices * quantized_bytes(bits, count);
    }
    const std::uint64_t sum = size_bytes(request_.recipe.reduce_dtype);
    const std::uint64_t run = std::max<std::uint64_t>(sum, size_bytes(request_.recipe.dtype));
    return kReduceBuckets * count * (slices * run + sum);
  }

  /// What the host must have for each class on NVMe (core/engine/host_plan.h): the sweep's items,
  /// one load of parameters, one gradient on its way out.
  std::uint64_t work_item_bytes(std::uint64_t slice, std::uint64_t chunk) const {
    const Placement& placement = request_.placement;
    const std::uint64_t element = size_bytes(request_.recipe.dtype);
    std::uint64_t item = 0;
    std::uint64_t total = 0;
    if (placement.optimizer == Tier::kNvme)
      item += record_format(request_.recipe.state).record_bytes(chunk / kTileElements);
    if (placement.params == Tier::kNvme) {
      item += chunk * element;
      const int kept = request_.strategy.slices() / request_.strategy.param_shards();
      total += slice * static_cast<std::uint64_t>(kept) * element;
    }
    if (placement.grads == Tier::kNvme) {
      item += chunk * element;
      total += chunk * element;
    }
    return total + kWorkItemsWanted * item;
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
    case StateClass::kLiveParams: return "parameters in use";
    case StateClass::kAccumulator: return "gradient accumulator";
    case StateClass::kBucket: return "gradient bucket";
    case StateClass::kQuantizedParams: return "quantized parameters";
    case StateClass::kWorkItems: return "on the way from and to NVMe";
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
    if (at_rest(item.kind) && item.kind != StateClass::kSecondSlot) total += item.size_bytes;
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

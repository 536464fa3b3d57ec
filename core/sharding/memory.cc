// SPDX-License-Identifier: Apache-2.0
// core/sharding/memory.cc: elements by class, times bytes.
#include "core/sharding/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "tiers/record_format.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) noexcept {
  return (value + by - 1) / by;
}

/// Elements of a class that is cut over `shards`, on one rank.
struct Share {
  std::uint64_t exact;   ///< an equal part of the parameters
  std::uint64_t padded;  ///< what is kept
};

Share share_of(const ModelSize& model, int shards) noexcept {
  const auto n = static_cast<std::uint64_t>(shards);
  const std::uint64_t exact = ceil_div(model.rank_count(), n);
  if (model.units.empty()) return {exact, exact};
  std::uint64_t padded = 0;
  for (const std::uint64_t unit : model.units) padded += padded_to_slices(unit, shards) / n;
  return {exact, padded};
}

/// Bytes of all records of a rank, cut into chunks as core/sharding/chunk_table.h cuts.
std::uint64_t record_bytes(const MemoryRequest& request, const RecordFormat& format, int shards) {
  const ModelSize& model = request.model;
  if (model.units.empty())
    return share_of(model, shards).padded * format.tile_bytes() / kTileElements;
  std::uint64_t total = 0;
  for (const std::uint64_t unit : model.units) {
    const std::uint64_t tiles =
        padded_to_slices(unit, shards) / static_cast<std::uint64_t>(shards) / kTileElements;
    const std::uint64_t chunks = ceil_div(tiles, request.chunk_tiles_max);
    // An even cut has chunks of two sizes.
    const std::uint64_t larger = tiles % chunks;
    total += larger * format.record_bytes(tiles / chunks + 1) +
             (chunks - larger) * format.record_bytes(tiles / chunks);
  }
  return total;
}

std::uint64_t master_bytes(const StateKind& state) noexcept {
  return state.format == StateFormat::kBf16 ? sizeof(bf16) : sizeof(float);
}

/// The most that kLiveUnits units in a row have, each padded to its slices.
std::uint64_t live_count(const ModelSize& model, int shards) noexcept {
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < model.units.size(); ++i) {
    std::uint64_t sum = 0;
    for (std::size_t u = i; u < std::min(i + kLiveUnits, model.units.size()); ++u)
      sum += padded_to_slices(model.units[u], shards);
    most = std::max(most, sum);
  }
  return most;
}

/// The largest slice of a unit, in elements.
std::uint64_t largest_slice(const ModelSize& model, int shards) noexcept {
  const std::uint64_t largest = *std::ranges::max_element(model.units);
  return padded_to_slices(largest, shards) / static_cast<std::uint64_t>(shards);
}

/// Elements of the largest chunk of a class that is cut over `shards`.
std::uint64_t largest_chunk(const MemoryRequest& request, int shards) noexcept {
  const std::uint64_t tiles = largest_slice(request.model, shards) / kTileElements;
  const std::uint64_t chunks = ceil_div(tiles, request.chunk_tiles_max);
  return ceil_div(tiles, chunks) * kTileElements;
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
    const Share share = share_of(request_.model, shards);
    add(kind, tier, share.padded * element);
    memory_.padding_bytes += (share.padded - share.exact) * element;
  }

  void add_at_rest() {
    const Strategy& strategy = request_.strategy;
    const Placement& placement = request_.placement;
    add_cut(StateClass::kParams, placement.params, strategy.param_shards());
    if (strategy.hpz > 1) add_cut(StateClass::kSecondaryParams, placement.params, strategy.hpz);
    add_cut(StateClass::kGradients, placement.grads, strategy.grad_shards());
    add_records(placement.optimizer, strategy.optimizer_shards());
  }

  void add_records(Tier tier, int shards) {
    const StateKind& state = request_.recipe.state;
    const RecordFormat format = record_format(state);
    const Share share = share_of(request_.model, shards);
    const std::uint64_t records = record_bytes(request_, format, shards);
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
    const int shards = strategy.shard_group;
    const std::uint64_t element = size_bytes(request_.recipe.dtype);
    if (strategy.keeps_params_to_backward) {
      std::uint64_t all = 0;
      for (const std::uint64_t unit : model.units) all += padded_to_slices(unit, shards);
      add(StateClass::kLiveParams, Tier::kDevice, all * element);
    } else if (request_.placement.params != Tier::kDevice || strategy.param_shards() > 1) {
      add(StateClass::kLiveParams, Tier::kDevice, live_count(model, shards) * element);
    }
    const std::uint64_t largest = padded_to_slices(*std::ranges::max_element(model.units), shards);
    add(StateClass::kAccumulator, Tier::kDevice, largest * sizeof(float));
    if (strategy.dp > 1) {
      add(StateClass::kBucket, Tier::kDevice,
          std::min(request_.reduce_bucket_count, largest) *
              size_bytes(request_.recipe.reduce_dtype));
    }
    add(StateClass::kWorkItems, Tier::kHost, work_item_bytes());
  }

  /// What the host must have for each class on NVMe (core/engine/host_plan.h): the sweep's items,
  /// one load of parameters, one gradient on its way out.
  std::uint64_t work_item_bytes() const {
    const Placement& placement = request_.placement;
    const Strategy& strategy = request_.strategy;
    const std::uint64_t element = size_bytes(request_.recipe.dtype);
    const std::uint64_t chunk = largest_chunk(request_, strategy.optimizer_shards());
    std::uint64_t item = 0;
    std::uint64_t total = 0;
    if (placement.optimizer == Tier::kNvme)
      item += record_format(request_.recipe.state).record_bytes(chunk / kTileElements);
    if (placement.params == Tier::kNvme) {
      item += chunk * element;
      total += largest_slice(request_.model, strategy.param_shards()) * element;
    }
    if (placement.grads == Tier::kNvme) {
      item += chunk * element;
      total += largest_chunk(request_, strategy.grad_shards()) * element;
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

std::uint64_t padded_to_slices(std::uint64_t count, int shards) noexcept {
  return round_up(count, static_cast<std::uint64_t>(shards) * kTileElements);
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

std::uint64_t RankMemory::model_state_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const MemoryItem& item : items) {
    if (at_rest(item.kind) && item.kind != StateClass::kSecondSlot) total += item.size_bytes;
  }
  return total;
}

RankMemory rank_memory(const MemoryRequest& request) { return Sum(request).total(); }

}  // namespace ziggurat

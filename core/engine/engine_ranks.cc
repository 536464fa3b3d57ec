// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_ranks.cc: what the ranks of one engine must have alike, at open and in every
// step, and how they find out that they have not.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "core/engine/engine_impl.h"
#include "core/engine/engine_settings.h"

namespace ziggurat {
namespace {

struct Fact {
  std::string name;
  std::uint64_t value;
};

std::uint64_t text_hash(const std::string& text) {
  return hash64(std::as_bytes(std::span(text)), 0);
}

}  // namespace

/// Every rank sees every difference, and all leave with the same error.
Task<> EngineImpl::agree_on_settings() {
  std::vector<Fact> facts{
      {"the model", text_hash(ChunkTable(model_, 1, config_.optimizer.state).layout())},
      {"the run (data, seed, batch)", text_hash(config_.run_identity)},
      {"the rounding's seed", config_.optimizer.rounding_seed}};
  for (const SettingOf<EngineConfig>& setting : engine_settings()) {
    if (setting.among_ranks == AmongRanks::kAlike)
      facts.push_back({fmt::format("`{}`", setting.name), text_hash(setting.agreed(config_))});
  }
  std::vector<std::uint64_t> least;
  for (const Fact& fact : facts) least.push_back(fact.value);
  std::vector<std::uint64_t> most = least;
  co_await channels_->store->all_reduce(std::span(least), Communicator::Op::kMin);
  co_await channels_->store->all_reduce(std::span(most), Communicator::Op::kMax);
  std::string differing;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    if (least[i] != most[i]) differing += (differing.empty() ? "" : ", ") + facts[i].name;
  }
  if (differing.empty()) co_return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the {} ranks do not have the same settings: they differ in {}; start "
                          "every rank with the same command",
                          channels_->store->world_size(), differing));
}

/// Stage 3: device memory for whole units, as much on every rank: what the trainer, accumulators
/// and gradients leave, and no more than all units take.
Task<> EngineImpl::set_gather_region_aside() {
  if (!table_->sharding().params_sharded()) co_return;
  std::uint64_t largest_bytes = 0;
  std::uint64_t all_bytes = 0;
  for (UnitId u = 0; u < table_->unit_count(); ++u) {
    largest_bytes = std::max(largest_bytes, UnitGather::place_bytes(*table_, u));
    all_bytes += UnitGather::place_bytes(*table_, u);
  }
  std::uint64_t kept_free = config_.trainer_device_bytes + small_accumulator_bytes() + kMiB;
  if (config_.placement.grads == Tier::kDevice) {
    for (const Chunk& chunk : table_->chunks()) kept_free += chunk.param_bytes();
  }
  const Account account = device_.account();
  const std::uint64_t free_bytes = account.capacity_bytes() - account.used_bytes();
  const std::uint64_t here = free_bytes > kept_free ? free_bytes - kept_free : 0;
  const std::uint64_t everywhere = co_await storage_->quorum.min(here);
  const std::uint64_t needed_bytes =
      strategy_->keeps_params_to_backward ? all_bytes : largest_bytes;
  if (everywhere < needed_bytes) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("`device_memory`: stage 3 needs {} for {} beside the "
                            "trainer's {} and accumulators; the rank with the least has {} (this "
                            "one {}): give {} more",
                            format_bytes(needed_bytes),
                            strategy_->keeps_params_to_backward
                                ? "all units, which `strategy=grad-op` keeps"
                                : "the largest unit",
                            format_bytes(config_.trainer_device_bytes), format_bytes(everywhere),
                            format_bytes(here), format_bytes(needed_bytes - everywhere)));
  }
  DeviceBuffer region = device_.allocate(std::min(everywhere, all_bytes), Purpose::kParams);
  cache_->gather_through(std::make_unique<UnitGather>(*context_, *params_, std::move(region)));
}

/// Accumulators of units so small that none is set aside for them (GradientFlow), as far as several
/// are out at once: an embedding's for the whole backward, and of two more units.
std::uint64_t EngineImpl::small_accumulator_bytes() const {
  const std::uint64_t largest = table_->largest_unit_padded_count();
  std::vector<std::uint64_t> small;
  for (UnitId u = 0; u < table_->unit_count(); ++u) {
    const std::uint64_t count = table_->unit(u).padded_count;
    if (count * 2 <= largest) small.push_back(count * sizeof(float));
  }
  std::ranges::sort(small, std::greater<>());
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(3, small.size()); ++i) total += small[i];
  return total;
}

void EngineImpl::validate_quantization(const Strategy& strategy) const {
  const Quantization& quantization = config_.quantization;
  const int per_node = config_.ranks_per_node;
  require_quantizable(quantization, strategy, per_node == 0 ? strategy.dp : per_node);
  if (quantization.gradients() && config_.reduce_dtype) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("`reduce_dtype={}` and `quantized_gradients={}`: gradients travel as "
                            "one or the other; give one of them",
                            to_string(*config_.reduce_dtype), quantization.gradient_bits));
  }
}

/// The nodes by which quantized exchanges go; no grid where nothing is quantized.
NodeGrid EngineImpl::exchanges() const {
  return config_.quantization.any() ? sharding().nodes() : NodeGrid{};
}

ReductionSettings EngineImpl::reduction() const {
  return {.dtype = config_.reduce_dtype.value_or(model_.dtype),
          .bucket_elements = config_.reduce_bucket_elements};
}

/// The others must not wait for a rank that has failed.
void EngineImpl::tell_ranks(const std::exception_ptr& error) noexcept {
  if (runtime_.ranks->world_size() == 1) return;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& failure) {
    runtime_.ranks->abort(fmt::format("rank {}: {}", runtime_.ranks->rank(), failure.what()));
  }
}

}  // namespace ziggurat

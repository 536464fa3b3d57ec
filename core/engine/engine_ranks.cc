// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_ranks.cc: what the ranks of one engine must have alike, at open and in every
// step, and how they find out that they have not.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "collectives/mesh.h"
#include "core/engine/engine_impl.h"

namespace ziggurat {
namespace {

struct Fact {
  const char* name;
  std::uint64_t value;
};

std::uint64_t text_hash(const std::string& text) {
  return hash64(std::as_bytes(std::span(text)), 0);
}

std::string group_text(const ParamGroup& group) {
  const auto optional = [](const std::optional<float>& value) {
    return value ? fmt::format("{}", *value) : std::string("-");
  };
  return fmt::format("{} {} {} {} {} {} {}\n", group.params, group.lr_scale,
                     optional(group.weight_decay), optional(group.beta1), optional(group.beta2),
                     optional(group.eps), group.frozen);
}

}  // namespace

/// Every rank sees every difference, and all leave with the same error.
Task<> EngineImpl::agree_on_settings() {
  std::string groups;
  for (const ParamGroup& group : config_.param_groups) groups += group_text(group);
  const OptimizerConfig& optimizer = config_.optimizer;
  const std::vector<Fact> facts{
      {"the model", text_hash(ChunkTable(model_, 1, optimizer.state).layout())},
      {"--tp", static_cast<std::uint64_t>(config_.tensor_parallel)},
      {"--zero-stage", static_cast<std::uint64_t>(config_.zero_stage)},
      {"--shard-group", static_cast<std::uint64_t>(config_.shard_group)},
      {"--hpz", static_cast<std::uint64_t>(config_.node_ranks)},
      {"--strategy", static_cast<std::uint64_t>(config_.keep_gathered)},
      {"--quantized-weights", static_cast<std::uint64_t>(config_.quantization.weights)},
      {"--quantized-gradients", static_cast<std::uint64_t>(config_.quantization.gradient_bits)},
      {"--ranks-per-node", static_cast<std::uint64_t>(exchanges().within)},
      {"--reduce-dtype", static_cast<std::uint64_t>(reduction().dtype)},
      {"--reduce-bucket-size", config_.reduce_bucket_elements},
      {"--prefetch-bucket-size", config_.prefetch_elements_max},
      {"max_live_parameters", config_.max_live_parameters},
      {"max_reuse_distance", config_.max_reuse_distance},
      {"--clip", std::bit_cast<std::uint32_t>(config_.clip_norm)},
      {"--betas, --weight-decay, --rounding or --seed",
       text_hash(fmt::format("{} {} {} {} {} {}", static_cast<int>(optimizer.rounding),
                             optimizer.rounding_seed, optimizer.beta1, optimizer.beta2,
                             optimizer.eps, optimizer.weight_decay))},
      {"--param-groups", text_hash(groups)},
      {"--speculate", static_cast<std::uint64_t>(config_.speculation)},
      {"--slots", static_cast<std::uint64_t>(config_.slots)},
      {"--resume", static_cast<std::uint64_t>(config_.resume)},
      {"the run (data, seed, batch)", text_hash(config_.run_identity)},
      {"--placement optimizer=", static_cast<std::uint64_t>(config_.placement.optimizer)},
  };
  std::vector<std::uint64_t> least;
  for (const Fact& fact : facts) least.push_back(fact.value);
  std::vector<std::uint64_t> most = least;
  co_await channels_->store->all_reduce(std::span(least), Communicator::Op::kMin);
  co_await channels_->store->all_reduce(std::span(most), Communicator::Op::kMax);
  std::string differing;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    if (least[i] != most[i])
      differing += (differing.empty() ? "" : ", ") + std::string(facts[i].name);
  }
  if (differing.empty()) co_return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the {} ranks have not the same settings: they differ in {}; start every "
                          "rank with the same command",
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
  const std::uint64_t needed_bytes = config_.keep_gathered ? all_bytes : largest_bytes;
  if (everywhere < needed_bytes) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("--device-memory: stage 3 needs {} for {} beside the "
                            "trainer's {} and accumulators; the rank with the least has {} (this "
                            "one {}): give {} more",
                            format_bytes(needed_bytes),
                            config_.keep_gathered ? "all units, which --strategy grad-op keeps"
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

/// Of the ranks that have the same part of each layer. Errors: resolve()'s.
Strategy EngineImpl::strategy() const {
  const MeshShape shape =
      with_dp_of_world({.tp = config_.tensor_parallel}, runtime_.ranks->world_size());
  StrategyRequest request{.zero_stage = config_.zero_stage,
                          .shard_group = config_.shard_group,
                          .hpz = config_.node_ranks};
  if (config_.shard_group > 0) request.name = StrategyName::kHybrid;
  if (config_.keep_gathered) request.name = StrategyName::kGradOp;
  return resolve(request, shape.dp);
}

void EngineImpl::validate_quantization(const Strategy& strategy) const {
  const Quantization& quantization = config_.quantization;
  const int per_node = config_.ranks_per_node;
  require_quantizable(quantization, strategy, per_node == 0 ? strategy.dp : per_node);
  if (quantization.gradients() && config_.reduce_dtype) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--reduce-dtype {} and --quantized-gradients {}: gradients travel as "
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

/// Why another rank failed: it says so as it ends every call, one that it will never make too.
Task<std::exception_ptr> EngineImpl::first_cause(std::exception_ptr followed) {
  try {
    co_await runtime_.ranks->barrier();
  } catch (...) {
    followed = std::current_exception();
  }
  co_return followed;
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

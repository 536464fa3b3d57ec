// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_ranks.cc: what the ranks of one engine must have alike, at open and in every
// step, and how they find out that they have not.
#include <fmt/format.h>

#include <algorithm>
#include <array>
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

/// How a rank left a part of opening its store.
struct StoreVerdict {
  enum Kind : std::uint32_t {
    kGood,
    kFollowed,       ///< because of another rank
    kLost,           ///< nothing here is whole
    kLostElsewhere,  ///< what is here is whole, and no use without another's part
    kFailed,         ///< for another reason
  };
  Kind kind = kGood;
  std::array<char, 1020> text{};  ///< why, cut off where it is longer; ends with a NUL
};

StoreVerdict verdict_of(const std::exception_ptr& error) {
  StoreVerdict verdict;
  if (!error) return verdict;
  verdict.kind = StoreVerdict::kFailed;
  const bool followed = followed_from_another(error);
  if (followed) verdict.kind = StoreVerdict::kFollowed;
  try {
    std::rethrow_exception(error);
  } catch (const Error& why) {
    if (why.code() == ErrorCode::kDataLoss)
      verdict.kind = followed ? StoreVerdict::kLostElsewhere : StoreVerdict::kLost;
    const std::string_view text(why.what());
    std::copy_n(text.begin(), std::min(text.size(), verdict.text.size() - 1), verdict.text.begin());
  } catch (...) {
  }
  return verdict;
}

std::uint64_t text_hash(const std::string& text) {
  return hash64(std::as_bytes(std::span(text)), 0);
}

/// Out of the coroutine that finds it: GCC 12 takes the frame's memory for another allocator's.
[[noreturn]] void throw_lost(const char* why, const std::optional<StateLine>& line) {
  throw StoreLost(why, line);
}

}  // namespace

/// What is lent is this rank's own, and divided with nobody, however many ranks there are.
void EngineImpl::find_place() {
  const Communicator& ranks = *runtime_.ranks;
  const int sharing = is_lent() ? 1 : ranks.world_size();
  strategy_ = strategy_of(config_, sharing);
  if (is_lent()) {
    place_ = {.rank = ranks.rank(), .data_group = {ranks.rank()}, .tensor_group = {ranks.rank()}};
  } else {
    place_ = place_of(ranks.rank(), sharing, config_.tensor_parallel);
  }
}

/// Every rank sees every difference, and all leave with the same error. What is lent is each rank's
/// own: the run's identity names the model that it is of.
Task<> EngineImpl::agree_on_settings() {
  // To a GPU a unit is gathered in pieces, to the host-emulated device at once.
  const bool in_pieces = !is_lent() && reduction().staged && sharding().params_sharded();
  std::vector<Fact> facts{
      {is_lent() ? "`run`" : "the run (data, seed, batch)", text_hash(config_.run_identity)},
      {"the rounding's seed", config_.optimizer.rounding_seed},
      {"whether there is a `store`", config_.store.empty() ? 0U : 1U},
      {"whether the device is a GPU (stage 3)", in_pieces ? 1U : 0U}};
  if (!is_lent()) {
    const ChunkTable whole(model_, 1, config_.optimizer.state);
    facts.push_back({"the model", text_hash(whole.layout())});
  }
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

/// Stage 3: device memory for whole units, as much on every rank.
Task<> EngineImpl::set_gather_region_aside() {
  if (!table_->sharding().params_sharded()) co_return;
  const std::uint64_t everywhere = co_await storage_->quorum.min(device_plan_.live_bytes);
  DeviceBuffer region = device_.allocate(everywhere, Purpose::kParams);
  cache_->gather_through(
      std::make_unique<UnitGather>(*context_, *params_, std::move(region), reduction()));
}

void EngineImpl::validate_quantization(const Strategy& strategy) const {
  const Quantization& quantization = config_.quantization;
  const int per_node = config_.ranks_per_node;
  require_quantizable(quantization, strategy, per_node == 0 ? strategy.dp : per_node);
  if (quantization.gradients() && config_.reduce_dtype) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "`reduce_dtype={}` and `quantized_gradients={}` exclude each other: give one of them",
            to_string(*config_.reduce_dtype), quantization.gradient_bits));
  }
}

/// The nodes by which quantized exchanges go; no grid where nothing is quantized.
NodeGrid EngineImpl::exchanges() const {
  return config_.quantization.any() ? sharding().nodes() : NodeGrid{};
}

ReductionSettings EngineImpl::reduction() const {
  return {.dtype = config_.reduce_dtype.value_or(model_.dtype),
          .bucket_elements = config_.reduce_bucket_elements,
          .staged = !device_.host_accessible()};
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

/// Runs a part of opening the store, which every rank leaves at the same place. Where one leaves it
/// because no generation is whole, and none for another reason, all throw StoreLost.
Task<> EngineImpl::unless_lost(Task<> part) {
  std::exception_ptr error;
  try {
    co_await std::move(part);
  } catch (...) {
    error = std::current_exception();
  }
  std::vector<StoreVerdict> all(static_cast<std::size_t>(storage_->ranks.world_size()));
  const StoreVerdict own = verdict_of(error);
  try {
    co_await storage_->ranks.all_gather(std::as_bytes(std::span(&own, 1)),
                                        std::as_writable_bytes(std::span(all)));
  } catch (...) {  // the ranks have parted, for the first reason
    if (!error) error = std::current_exception();
  }
  const auto said = [&](StoreVerdict::Kind kind) {
    return std::ranges::find(all, kind, &StoreVerdict::kind);
  };
  if (said(StoreVerdict::kFailed) == all.end()) {
    auto lost = said(StoreVerdict::kLost);
    if (lost == all.end()) lost = said(StoreVerdict::kLostElsewhere);
    if (own.kind == StoreVerdict::kLost) throw_lost(own.text.data(), line_seen());
    if (lost != all.end()) throw_lost(lost->text.data(), line_seen());
  }
  if (error) std::rethrow_exception(error);
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

// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_ranks.cc: what must be equal on all ranks of one engine, at open and in
// every step, and how they find out that it is not.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "core/engine/engine_settings.h"
#include "core/engine/state/training_state.h"

namespace ziggurat {
namespace {

std::uint64_t text_hash(std::string_view text) { return hash64(std::as_bytes(std::span(text)), 0); }

/// A rank's value of what must be equal on all ranks, as it tells the others.
struct ToldFact {
  std::uint64_t hash = 0;
  std::uint64_t size = 0;        ///< of the whole text
  std::array<char, 112> text{};  ///< as much of it as fits
  bool is_whole() const noexcept { return size <= text.size(); }
  std::string_view words() const noexcept {
    return size == 0 ? "none" : std::string_view(text.data(), size);
  }
};

/// Returns which ranks differ in what `name` says, and their values if these are short. All ranks
/// call it.
Task<std::string> difference(Communicator& ranks, std::string_view name, std::string_view value) {
  ToldFact own{.hash = text_hash(value), .size = value.size()};
  std::copy_n(value.begin(), std::min(value.size(), own.text.size()), own.text.begin());
  std::vector<ToldFact> all(static_cast<std::size_t>(ranks.world_size()));
  co_await ranks.all_gather(std::as_bytes(std::span(&own, 1)),
                            std::as_writable_bytes(std::span(all)));
  const auto other =
      std::ranges::find_if(all, [&](const ToldFact& its) { return its.hash != all.front().hash; });
  const auto rank = other - all.begin();
  if (other == all.end()) co_return std::string(name);
  if (!all.front().is_whole() || !other->is_whole())
    co_return fmt::format("{} (rank {} has another than rank 0)", name, rank);
  co_return fmt::format("{} (rank 0 has {} and rank {} has {})", name, all.front().words(), rank,
                        other->words());
}

/// How a part of opening the store ended on one rank.
struct StoreVerdict {
  enum Kind : std::uint32_t {
    kGood,
    kFollowed,       ///< another rank has failed
    kLost,           ///< this rank's part of the store has no undamaged generation
    kLostElsewhere,  ///< this rank's part is undamaged, but useless without another rank's part
    kFailed,         ///< failed for another reason
  };
  Kind kind = kGood;
  std::array<char, 1020> text{};  ///< the reason, cut to fit; ends with a NUL
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

/// Throws outside the coroutine that finds the loss, because GCC 12 frees the memory of such a
/// coroutine with the wrong allocator.
[[noreturn]] void throw_lost(const char* why, const std::optional<StateLine>& line) {
  throw StoreLost(why, line);
}

}  // namespace

/// Finds this rank's place. Pieces belong to this rank alone and are divided with no other,
/// whatever the number of ranks.
void TrainingState::find_place() {
  const Communicator& ranks = *runtime_.ranks;
  const int sharing = of_pieces() ? 1 : ranks.world_size();
  strategy_ = strategy_of(config_, sharing);
  if (of_pieces()) {
    place_ = {.rank = ranks.rank(), .data_group = {ranks.rank()}, .tensor_group = {ranks.rank()}};
  } else {
    place_ = place_of(ranks.rank(), sharing, config_.tensor_parallel);
  }
}

/// Returns what must be equal on all ranks. Models of pieces need not be, because each rank has its
/// own: the run's identity names the whole model.
std::vector<std::pair<std::string, std::string>> TrainingState::shared_facts() const {
  const auto yes = [](bool holds) { return std::string(holds ? "yes" : "no"); };
  // A unit is gathered in pieces if the device is a GPU, and all at once if it is emulated on the
  // host.
  const bool in_pieces = !of_pieces() && reduction().staged && sharding().params_sharded();
  std::vector<std::pair<std::string, std::string>> facts{
      {of_pieces() ? "`run`" : "the run (data, seed, batch)", config_.run_identity},
      {"the rounding's seed", fmt::to_string(config_.optimizer.rounding_seed)},
      {"whether there is a `store`", yes(!config_.store.empty())},
      {"whether the device is a GPU (stage 3)", yes(in_pieces)},
      {"whether every parameter is frozen", yes(!trains())}};
  if (!of_pieces()) {
    // How units are cut is not in question yet, and a model may have millions of tiles.
    constexpr std::uint64_t kUncut = std::uint64_t{1} << 40;
    const ChunkTable whole(model_, kUncut, config_.optimizer.state);
    facts.emplace_back("the model", whole.layout());
    std::string optional;  // no layout has it
    for (const UnitSpec& unit : model_.units) optional += unit.optional ? '1' : '0';
    facts.emplace_back("which units are optional", optional);
  }
  for (const SettingOf<EngineConfig>& setting : engine_settings()) {
    if (setting.among_ranks == AmongRanks::kAlike)
      facts.emplace_back(fmt::format("`{}`", setting.name), setting.agreed(config_));
  }
  return facts;
}

Task<> TrainingState::agree_on_settings() {
  Communicator& ranks = *channels_->store;
  if (ranks.world_size() == 1) co_return;
  const auto facts = shared_facts();
  std::vector<std::uint64_t> least;
  for (const auto& [name, text] : facts) least.push_back(text_hash(text));
  std::vector<std::uint64_t> most = least;
  co_await ranks.all_reduce(std::span(least), Communicator::Op::kMin);
  co_await ranks.all_reduce(std::span(most), Communicator::Op::kMax);
  std::string differing;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    if (least[i] == most[i]) continue;
    const std::string its = co_await difference(ranks, facts[i].first, facts[i].second);
    differing += (differing.empty() ? "" : " and in ") + its;
  }
  if (differing.empty()) co_return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the {} ranks do not have the same settings and differ in {}; start "
                          "every rank with the same command",
                          ranks.world_size(), differing));
}

void TrainingState::validate_quantization(const Strategy& strategy) const {
  const Quantization& quantization = config_.quantization;
  const int per_node = config_.ranks_per_node;
  require_quantizable(quantization, strategy, per_node == 0 ? strategy.dp : per_node);
  if (quantization.gradients() && config_.reduce_dtype) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("`reduce_dtype={}` and `quantized_gradients={}` cannot be used "
                            "together: give only one of them",
                            to_string(*config_.reduce_dtype), quantization.gradient_bits));
  }
}

/// Returns how many ranks share one copy of the state, if there are several copies; else 0.
int TrainingState::shard_group() const {
  return strategy_->is_hybrid() ? strategy_->shard_group : 0;
}

Sharding TrainingState::sharding() const {
  Sharding its = Sharding::of(*strategy_, place_.data);
  its.quantization = config_.quantization;
  its.ranks_per_node = config_.ranks_per_node;
  its.tensor = {.rank = place_.tensor, .ranks = place_.tensor_ranks()};
  return its;
}

/// Returns the nodes for quantized exchanges; an empty grid if nothing is quantized.
NodeGrid TrainingState::exchanges() const {
  return config_.quantization.any() ? sharding().nodes() : NodeGrid{};
}

ReductionSettings TrainingState::reduction() const {
  ReductionSettings settings{.dtype = config_.reduce_dtype,
                             .bucket_elements = config_.reduce_bucket_elements,
                             .staged = out_of_reach()};
  if (settings.staged) settings.whole_unit_bytes = largest_unit_bytes(config_.wholes);
  return settings;
}

/// Returns why another rank failed. That rank gives its reason to every call that it ends, even to
/// this one, which it will never make.
Task<std::exception_ptr> TrainingState::first_cause(std::exception_ptr followed) {
  try {
    co_await runtime_.ranks->barrier();
  } catch (...) {
    followed = std::current_exception();
  }
  co_return followed;
}

Task<> TrainingState::unless_lost(Task<> part) {
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
  } catch (...) {  // the exchange failed for the same reason as the part
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

/// Tells the other ranks that this rank has failed, so that they do not wait for it.
void TrainingState::tell_ranks(const std::exception_ptr& error) noexcept {
  if (runtime_.ranks->world_size() == 1) return;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& failure) {
    runtime_.ranks->abort(fmt::format("rank {}: {}", runtime_.ranks->rank(), failure.what()));
  }
}

}  // namespace ziggurat

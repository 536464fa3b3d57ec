// SPDX-License-Identifier: Apache-2.0
// core/engine/state/store_reshard.cc: converts a store. Each new rank is a coroutine, and all of
// them exchange on one reactor.
#include "core/engine/state/store_reshard.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/for_each.h"
#include "collectives/mesh.h"
#include "collectives/self_communicator.h"
#include "core/checkpoint/stored_state.h"
#include "core/engine/engine_settings.h"
#include "core/engine/state/storage.h"
#include "core/engine/state/store_builder.h"
#include "core/engine/state/store_rounding.h"
#include "core/plan/host_plan.h"
#include "tiers/store/meeting.h"
#include "tiers/store/store_succession.h"

namespace ziggurat {
namespace {

/// Returns each rank's place in `target`. Errors: kInvalidArgument, with the arithmetic.
std::vector<Sharding> shardings(const StoreReshard::Target& target) {
  EngineConfig config;
  config.tensor_parallel = target.tensor_parallel;
  config.strategy = target.strategy;
  const Strategy strategy = strategy_of(config, target.ranks);
  std::vector<Sharding> all;
  for (int rank = 0; rank < target.ranks; ++rank) {
    const Place place = place_of(rank, target.ranks, target.tensor_parallel);
    all.push_back(Sharding::of(strategy, place.data));
    all.back().tensor = {.rank = place.tensor, .ranks = place.tensor_ranks()};
  }
  return all;
}

/// Returns the chunk size for all ranks: the smallest that suits any of them, with everything on
/// NVMe.
std::uint64_t smallest_chunk_tiles(const ModelSpec& part, const StateKind& state,
                                   const std::vector<Sharding>& cut, std::uint64_t host_bytes) {
  const Placement placement{.params = Tier::kNvme, .grads = Tier::kNvme, .optimizer = Tier::kNvme};
  const ReductionSettings exchanged{.dtype = part.dtype};
  std::uint64_t tiles = kChunkTilesMax;
  for (const Sharding& its : cut) {
    tiles = std::min(tiles, choose_chunk_tiles({.model = part,
                                                .state = state,
                                                .sharding = its,
                                                .placement = placement,
                                                .reduction = exchanged},
                                               host_bytes));
  }
  return tiles;
}

/// Throws the first error that a rank had itself, not one that followed from another rank's.
void rethrow_first(std::vector<std::exception_ptr> errors) {
  std::ranges::stable_partition(errors, [](const std::exception_ptr& error) {
    return error && !followed_from_another(error);
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

class StoreReshard::Impl {
 public:
  Impl(Runtime& runtime, std::vector<StoreDirectory> store)
      : runtime_(runtime), store_(std::move(store)) {}

  Task<> open();
  Task<> look();
  Task<Result> run(const Target& target);
  Task<> close();
  Runtime& runtime() const noexcept { return runtime_; }
  const StateContent& content() const noexcept { return stored_->content(); }
  ModelSpec model() const { return stored_->whole_table(1).model(); }

 private:
  struct Rank {
    std::unique_ptr<StoreBuilder> builder;
    AlignedMemory scratch;
  };
  bool is_so_already(const ChunkTable& first) const;
  void require_space() const;
  Task<> build(const Target& target);
  Task<> each_rank(const std::function<Task<>(std::size_t rank)>& work);
  Task<> create(std::size_t rank);
  StripedStore::Environment environment(std::size_t rank);
  Task<> make_records(const Target& target);

  Runtime& runtime_;
  std::vector<StoreDirectory> store_;
  SelfCommunicator alone_;
  std::unique_ptr<Storage> storage_;      // the old store's directories
  std::unique_ptr<Storage> new_storage_;  // the new store's directories
  std::unique_ptr<StoredState> stored_;
  std::optional<StoreSuccession> succession_;
  std::optional<Meeting> meeting_;
  std::deque<MeetingQuorum> quorums_;
  std::deque<AlignedMemory> staging_;
  std::vector<Rank> ranks_;
};

Task<> StoreReshard::Impl::look() {
  Task<std::unique_ptr<StoredState>> opening =
      StoredState::open(runtime_.reactor, runtime_.jobs(), storage_->places);
  stored_ = co_await std::move(opening);
  stored_->require_whole("a reshard");
}

Task<> StoreReshard::Impl::open() {
  for (const StoreDirectory& directory : store_) {
    struct ::stat about {};
    if (::stat(directory.path.c_str(), &about) == 0) continue;
    throw system_error(errno, fmt::format("there is no store in {}", directory.path));
  }
  storage_ = Storage::open(runtime_, alone_, store_);
  succession_.emplace(runtime_.reactor, storage_->places);
  co_await succession_->recover();
  co_await look();
}

Task<> StoreReshard::Impl::close() {
  ranks_.clear();
  new_storage_.reset();
  stored_.reset();
  succession_.reset();
  storage_.reset();
  co_return;
}

bool StoreReshard::Impl::is_so_already(const ChunkTable& first) const {
  try {
    ChunkTable::from_layout(first.model(), stored_->layout(), first.state(), first.sharding());
    return true;
  } catch (const Error&) {
    return false;
  }
}

Task<StoreReshard::Result> StoreReshard::Impl::run(const Target& target) {
  const std::vector<Sharding> cut = shardings(target);
  if (!content().state)
    throw Error(ErrorCode::kDataLoss,
                "the store has no optimizer state, so it cannot be resharded");
  const StateKind state{content().state->optimizer, target.format};
  require_compatible(state.format, Rounding::kNearest, target.model.is_bf16());
  require_undivided_scales(state.format, target.tensor_parallel);
  const ModelSpec part = part_of(target.model, target.tensor_parallel);
  const std::uint64_t tiles = smallest_chunk_tiles(part, state, cut, target.host_budget_bytes);
  Result result;
  OptimizerConfig as_it_is;
  as_it_is.state = state;
  const std::optional<Roundings> rounding =
      rounding_of_copy(as_it_is, content(), /*in_place=*/true);
  if (is_so_already(ChunkTable(part, tiles, state, cut.front()))) co_return result;
  const std::vector<std::size_t> order = succession_->order();
  succession_->lock_old();
  co_await look();  // the store's owner may have made a step before the lock
  std::exception_ptr failure;
  try {
    for (const Sharding& its : cut) {
      ranks_.push_back(
          {.builder = std::make_unique<StoreBuilder>(
               runtime_, *stored_, ChunkTable(part, tiles, state, its, rounding),
               StoreBuilder::Request{.run_identity = target.run_identity,
                                     .numerics_fingerprint = content().numerics_fingerprint,
                                     .slots = static_cast<int>(stored_->slots()),
                                     .blob_bytes_max = std::max<std::uint64_t>(
                                         kBlobBytesMax, content().blob.size())}),
           .scratch = AlignedMemory(StripedStore::scratch_bytes(store_.size()))});
      result.record_bytes += ranks_.back().builder->table().total_record_bytes();
    }
    result.notes = ranks_.front().builder->notes();
    require_space();
    std::vector<StoreDirectory> beside;
    for (const std::size_t place : order) {
      beside.push_back(store_[place]);
      beside.back().path = StoreSuccession::folder_in(beside.back().path);
    }
    new_storage_ = Storage::open(runtime_, alone_, beside);
    Task<> building = build(target);
    co_await std::move(building);
  } catch (...) {
    failure = std::current_exception();
  }
  ranks_.clear();
  if (failure) {
    new_storage_.reset();
    succession_.emplace(runtime_.reactor, storage_->places);  // returns the locks
    co_await succession_->recover();
    std::rethrow_exception(failure);
  }
  co_await succession_->complete();
  result.changed = true;
  co_return result;
}

/// Throws if there is no room for both stores at the same time. This checks only the sum over all
/// directories; create() reserves each directory's part before anything is written.
void StoreReshard::Impl::require_space() const {
  std::uint64_t needed = 0;
  for (const Rank& rank : ranks_) needed += rank.builder->file_bytes();
  std::uint64_t available = 0;
  std::set<const IoEngine*> drives;
  for (const StripePlace& place : storage_->places) {
    if (drives.insert(&place.io).second) available += place.io.free_bytes(place.directory);
  }
  if (needed <= available) return;
  throw Error(ErrorCode::kResourceExhausted,
              fmt::format("{}: the new store is built beside the old one and needs {}, but only {} "
                          "are free: make room, or load the store into a new one elsewhere",
                          stored_->place(), format_bytes(needed), format_bytes(available)));
}

Task<> StoreReshard::Impl::build(const Target& target) {
  const auto ranks = static_cast<int>(ranks_.size());
  meeting_.emplace(runtime_.reactor, ranks);
  for (int rank = 0; rank < ranks; ++rank) quorums_.emplace_back(*meeting_, rank, ranks);
  const std::function<Task<>(std::size_t)> creating = [&](std::size_t rank) {
    return create(rank);
  };
  co_await each_rank(creating);
  Task<> making = make_records(target);
  co_await std::move(making);
  const std::function<Task<>(std::size_t)> sealing = [&](std::size_t rank) {
    return ranks_[rank].builder->seal();
  };
  co_await each_rank(sealing);
}

/// Does `work` for all ranks at once, because they exchange in it.
Task<> StoreReshard::Impl::each_rank(const std::function<Task<>(std::size_t rank)>& work) {
  std::vector<std::exception_ptr> errors(ranks_.size());
  WorkGroup group(runtime_.reactor);
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    group.spawn([](Task<> its, Meeting& meeting, std::exception_ptr& error) -> Task<> {
      try {
        co_await std::move(its);
      } catch (...) {
        error = std::current_exception();
        meeting.lose(error);  // no other rank may wait for a rank that has failed
      }
    }(work(rank), *meeting_, errors[rank]));
  }
  co_await group.wait_idle();
  rethrow_first(std::move(errors));
}

StripedStore::Environment StoreReshard::Impl::environment(std::size_t rank) {
  return {.reactor = runtime_.reactor,
          .ranks = quorums_[rank],
          .places = new_storage_->places,
          .staging =
              [this](std::uint64_t size_bytes) {
                staging_.emplace_back(size_bytes);
                return staging_.back().bytes();
              },
          .scratch = ranks_[rank].scratch.bytes()};
}

Task<> StoreReshard::Impl::create(std::size_t rank) {
  StripedStore::Environment its = environment(rank);
  Task<> creating = ranks_[rank].builder->create(std::move(its));
  co_await std::move(creating);
}

/// Makes all records, in the order of ranks. If the old store is divided in the same way, each part
/// of it is then read only once.
Task<> StoreReshard::Impl::make_records(const Target& target) {
  struct Record {
    StoreBuilder* builder;
    ChunkId chunk;
  };
  std::vector<Record> records;
  std::uint64_t total = 0;
  for (const Rank& rank : ranks_) {
    const ChunkTable& table = rank.builder->table();
    for (ChunkId id = 0; id < table.chunks().size(); ++id)
      records.push_back({rank.builder.get(), id});
    total += table.total_record_bytes();
  }
  std::uint64_t done = 0;
  const std::function<Task<>(std::size_t)> make = [&](std::size_t i) -> Task<> {
    co_await records[i].builder->make(records[i].chunk);
    done += records[i].builder->table().chunk(records[i].chunk).record_bytes();
    if (target.progress) target.progress("resharding", done, total);
  };
  const std::size_t at_once = StoreBuilder::records_at_once(
      ranks_.front().builder->table(), target.host_budget_bytes, runtime_.jobs());
  co_await for_each_index(runtime_.reactor, records.size(), at_once, make);
}

StoreReshard::StoreReshard(Runtime& runtime, std::vector<StoreDirectory> store)
    : impl_(std::make_unique<Impl>(runtime, std::move(store))) {
  try {
    runtime.reactor.block_on(impl_->open());
  } catch (...) {
    close();
    throw;
  }
}

StoreReshard::~StoreReshard() { close(); }

void StoreReshard::close() noexcept { impl_->runtime().reactor.block_on(impl_->close()); }

const StateContent& StoreReshard::content() const noexcept { return impl_->content(); }

ModelSpec StoreReshard::model() const { return impl_->model(); }

StoreReshard::Result StoreReshard::run(const Target& target) {
  return impl_->runtime().reactor.block_on(impl_->run(target));
}

}  // namespace ziggurat

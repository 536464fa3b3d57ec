// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_reshard.cc: converts a store of other ranks, or in another format, to this
// run's in the same directories. The new store is built beside the old one, which remains until the
// new one is complete.
#include <fmt/format.h>

#include "base/error.h"
#include "core/checkpoint/stored_state.h"
#include "core/engine/engine_impl.h"
#include "tiers/store_succession.h"

namespace ziggurat {
namespace {

/// Does `work` on rank 0 while the other ranks wait for it. Every rank calls this.
Task<> first_rank_does(Quorum& ranks, Task<> work, const char* what) {
  Task<> nothing = []() -> Task<> { co_return; }();
  Task<> done = together(ranks, std::move(ranks.rank() == 0 ? work : nothing), what);
  co_await std::move(done);
}

}  // namespace

/// Finishes what an earlier conversion left unfinished, before a store is looked for.
Task<> EngineImpl::end_succession() {
  StoreSuccession succession(runtime_.reactor, storage_->places);
  Task<> done =
      first_rank_does(storage_->quorum, succession.recover(), "finish resharding its store");
  co_await std::move(done);
}

/// The old store while it is converted. All calls but build() are made on the reactor.
class Resharding {
 public:
  explicit Resharding(EngineImpl& engine) : engine_(engine) {}

  /// Reads and locks the old store. Returns false if there is no store, or one that needs no
  /// conversion.
  Task<bool> begin();
  /// Returns an engine over the new store, which is then complete and durable on every rank. Not
  /// called on the reactor.
  std::unique_ptr<EngineImpl> build();
  /// Puts the new store in the old one's place.
  Task<> complete(EngineImpl& engine);
  void close() {
    succession_.reset();
    stored_.reset();
    engine_.storage_.reset();
    engine_.channels_.reset();
  }

 private:
  void require_same_model() const;
  EngineConfig config() const;
  Task<> lock() {
    succession_->lock_old();
    co_return;
  }

  EngineImpl& engine_;
  std::unique_ptr<StoredState> stored_;
  std::optional<StoreSuccession> succession_;
  std::vector<std::size_t> order_;
};

Task<bool> Resharding::begin() {
  EngineImpl& of = engine_;
  Runtime& runtime = of.runtime_;
  of.validate();
  if (!of.config_.param_groups.empty()) assign_groups(of.model_, of.config_.param_groups);
  of.channels_ = std::make_unique<RankChannels>(
      *runtime.ranks, of.place_,
      RankChannels::Groups{.shard = of.shard_group(), .node = 0, .exchanges = {}});
  of.storage_ = Storage::open(runtime, *of.channels_->store, of.config_.store);
  co_await of.end_succession();
  if (!co_await of.store_found()) co_return false;
  const std::function<Task<>()> look = [&]() -> Task<> {
    Task<std::unique_ptr<StoredState>> opening =
        StoredState::open(runtime.reactor, *runtime.workers, of.storage_->places);
    stored_ = co_await std::move(opening);
    require_same_model();
    stored_->require_whole("`resume=reshard`");
    if (of.config_.before_reshard) of.config_.before_reshard(stored_->content());
  };
  Task<> looked =
      of.unless_lost(together(of.storage_->quorum, look(), "read the store that is resharded"));
  co_await std::move(looked);
  bool fits = true;
  try {
    ChunkTable::from_layout(of.model_, stored_->layout(), of.config_.optimizer.state,
                            of.sharding());
  } catch (const Error&) {
    fits = false;
  }
  if (co_await of.storage_->quorum.min(fits ? 1 : 0) != 0) co_return false;
  succession_.emplace(runtime.reactor, of.storage_->places);
  order_ = succession_->order();
  Task<> locking = first_rank_does(of.storage_->quorum, lock(), "lock the store");
  co_await std::move(locking);
  // The store's owner may have made a step between the first look and the lock.
  Task<> again =
      of.unless_lost(together(of.storage_->quorum, look(), "read the store that is resharded"));
  co_await std::move(again);
  co_return true;
}

void Resharding::require_same_model() const {
  if (stored_->content().model == engine_.model_.name) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("`resume=reshard`: the store {} holds model '{}', but this run trains "
                          "'{}': give another `store`",
                          stored_->place(), stored_->content().model, engine_.model_.name));
}

EngineConfig Resharding::config() const {
  EngineConfig config = engine_.config_;
  config.resume = EngineConfig::Resume::kNever;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    config.store[i] = engine_.config_.store[order_[i]];
    config.store[i].path = StoreSuccession::folder_in(config.store[i].path);
  }
  return config;
}

std::unique_ptr<EngineImpl> Resharding::build() {
  auto engine =
      std::make_unique<EngineImpl>(engine_.model_, config(), engine_.runtime_, engine_.device_);
  engine->open(*stored_, {.continues_line = true, .in_place = true});
  engine->make_durable();  // no rank continues before the parts of all ranks are complete
  const int ranks = stored_->content().layout.ranks;
  engine->notes_.insert(engine->notes_.begin(),
                        fmt::format("the store was converted in place from a store of {} rank{}",
                                    ranks, ranks == 1 ? "" : "s"));
  return engine;
}

Task<> Resharding::complete(EngineImpl& engine) {
  Quorum& ranks = engine_.storage_->quorum;
  co_await ranks.barrier();  // now every rank's part is complete
  Task<> completing =
      first_rank_does(ranks, succession_->complete(), "put the resharded store in its place");
  co_await std::move(completing);
  std::vector<std::string> directories;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const StoreDirectory& directory = engine_.config_.store[order_[i]];
    directories.push_back(directory.path);
    engine.config_.store[i].path = directory.path;
  }
  engine.storage_->moved(directories);
}

std::unique_ptr<EngineImpl> EngineImpl::reshard(const ModelSpec& model, const EngineConfig& config,
                                                Runtime& runtime, Device& device) {
  if (config.resume != EngineConfig::Resume::kReshard) return nullptr;
  EngineImpl shell(model, config, runtime, device);
  Resharding resharding(shell);
  std::unique_ptr<EngineImpl> engine;
  std::exception_ptr error;
  try {
    if (runtime.reactor.block_on(resharding.begin())) {
      engine = resharding.build();
      runtime.reactor.block_on(resharding.complete(*engine));
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (error) engine.reset();
  runtime.reactor.block_on([](Resharding& its) -> Task<> {
    its.close();
    co_return;
  }(resharding));
  if (error) std::rethrow_exception(error);
  return engine;
}

}  // namespace ziggurat

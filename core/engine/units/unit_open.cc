// SPDX-License-Identifier: Apache-2.0
// core/engine/units/unit_open.cc: opens an engine for a trainer of units. Before that it may
// convert a store of other ranks, or in another format, to this run's in the same directories. The
// new store is built beside the old one, which remains until the new one is complete.
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <optional>

#include "base/error.h"
#include "core/checkpoint/stored_state.h"
#include "core/engine/units/unit_engine.h"
#include "tiers/store_succession.h"

namespace ziggurat {
namespace {

/// The old store while it is converted. All calls but build() are made on the reactor.
class Resharding {
 public:
  Resharding(const ModelSpec& model, const EngineConfig& config, Runtime& runtime, Device& device)
      : old_(model, config, runtime, &device, TrainingState::Division::kModel) {}

  /// Reads and locks the old store. Returns false if there is no store, or one that needs no
  /// conversion.
  Task<bool> begin();
  /// Returns an engine over the new store, which is then complete and durable on every rank. Not
  /// called on the reactor.
  std::unique_ptr<UnitEngine> build();
  /// Puts the new store in the old one's place.
  Task<> complete(UnitEngine& engine);
  Task<> close() {
    succession_.reset();
    stored_.reset();
    old_.close_storage();
    co_return;
  }

 private:
  void require_same_model() const;
  EngineConfig config() const;
  Task<> lock() {
    succession_->lock_old();
    co_return;
  }

  TrainingState old_;  // this run's settings, over the old store's directories; has no hand
  std::unique_ptr<StoredState> stored_;
  std::optional<StoreSuccession> succession_;
  std::vector<std::size_t> order_;
};

Task<bool> Resharding::begin() {
  Runtime& runtime = old_.runtime();
  old_.validate();
  old_.open_channels({.shard = old_.shard_group(), .node = 0, .exchanges = {}});
  old_.open_storage();
  co_await old_.end_succession();
  if (!co_await old_.store_found()) co_return false;
  Storage& storage = old_.storage();
  const std::function<Task<>()> look = [&]() -> Task<> {
    Task<std::unique_ptr<StoredState>> opening =
        StoredState::open(runtime.reactor, *runtime.workers, storage.places);
    stored_ = co_await std::move(opening);
    require_same_model();
    stored_->require_whole("`resume=reshard`");
    if (old_.config().before_reshard) old_.config().before_reshard(stored_->content());
  };
  Task<> looked =
      old_.unless_lost(together(storage.quorum, look(), "read the store that is resharded"));
  co_await std::move(looked);
  bool fits = true;
  try {
    ChunkTable::from_layout(old_.model(), stored_->layout(), old_.config().optimizer.state,
                            old_.sharding());
  } catch (const Error&) {
    fits = false;
  }
  if (co_await storage.quorum.min(fits ? 1 : 0) != 0) co_return false;
  succession_.emplace(runtime.reactor, storage.places);
  order_ = succession_->order();
  Task<> locking = first_rank_does(storage.quorum, lock(), "lock the store");
  co_await std::move(locking);
  // The store's owner may have made a step between the first look and the lock.
  Task<> again =
      old_.unless_lost(together(storage.quorum, look(), "read the store that is resharded"));
  co_await std::move(again);
  co_return true;
}

void Resharding::require_same_model() const {
  if (stored_->content().model == old_.model().name) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("`resume=reshard`: the store {} holds model '{}', but this run trains "
                          "'{}': give another `store`",
                          stored_->place(), stored_->content().model, old_.model().name));
}

EngineConfig Resharding::config() const {
  EngineConfig config = old_.config();
  config.resume = EngineConfig::Resume::kNever;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    config.store[i] = old_.config().store[order_[i]];
    config.store[i].path = StoreSuccession::folder_in(config.store[i].path);
  }
  return config;
}

std::unique_ptr<UnitEngine> Resharding::build() {
  auto engine = std::make_unique<UnitEngine>(old_.model(), config(), old_.runtime(), old_.device());
  engine->open(*stored_, {.continues_line = true, .in_place = true});
  engine->make_durable();  // no rank continues before the parts of all ranks are complete
  const int ranks = stored_->content().layout.ranks;
  std::vector<std::string>& notes = engine->state().notes();
  notes.insert(notes.begin(),
               fmt::format("the store was converted in place from a store of {} rank{}", ranks,
                           ranks == 1 ? "" : "s"));
  return engine;
}

Task<> Resharding::complete(UnitEngine& engine) {
  Quorum& ranks = old_.storage().quorum;
  co_await ranks.barrier();  // now every rank's part is complete
  Task<> completing =
      first_rank_does(ranks, succession_->complete(), "put the resharded store in its place");
  co_await std::move(completing);
  std::vector<std::string> directories;
  for (const std::size_t place : order_) directories.push_back(old_.config().store[place].path);
  engine.state().moved(directories);
}

/// Returns an engine over the converted store; null if there is no store, or one that needs no
/// conversion.
std::unique_ptr<UnitEngine> resharded(const ModelSpec& model, const EngineConfig& config,
                                      Runtime& runtime, Device& device) {
  Resharding resharding(model, config, runtime, device);
  std::unique_ptr<UnitEngine> engine;
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
  runtime.reactor.block_on(resharding.close());
  if (error) std::rethrow_exception(error);
  return engine;
}

/// Makes an engine, and opens it by `open` unless a store was converted for it.
template <class Open>
std::unique_ptr<Engine> opened(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                               Device& device, const Open& open) {
  std::unique_ptr<UnitEngine> engine;
  if (config.resume == EngineConfig::Resume::kReshard)
    engine = resharded(model, config, runtime, device);
  if (engine) return engine;
  engine = std::make_unique<UnitEngine>(model, config, runtime, device);
  open(*engine);
  return engine;
}

}  // namespace

std::unique_ptr<Engine> Engine::open(const ModelSpec& model, const EngineConfig& config,
                                     Runtime& runtime, Device& device,
                                     const Initializer& initialize) {
  return opened(model, config, runtime, device,
                [&](UnitEngine& engine) { engine.open(initialize); });
}

std::unique_ptr<Engine> Engine::open(const ModelSpec& model, const EngineConfig& config,
                                     Runtime& runtime, Device& device, StateSource& source,
                                     const LoadOptions& options) {
  return opened(model, config, runtime, device,
                [&](UnitEngine& engine) { engine.open(source, options); });
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/engine/state/reshard_in_place.h: converts the store of other ranks, or in another format, to
// that of the engine which is being opened, in the same directories (`resume=reshard`).
//
// The new store is an engine's that opens beside the old one, with the old one as its source; the
// old one remains until the new one is complete (tiers/store/store_succession.h). Private to the
// engine.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/checkpoint/stored_state.h"
#include "core/engine/state/training_state.h"
#include "tiers/store/store_succession.h"

namespace ziggurat {

class ReshardInPlace {
 public:
  /// What the trainer of this rank asks of a store. On the reactor.
  struct Judge {
    /// Whether the trainer goes on from the store as it is. `own` has its validated settings.
    std::function<bool(const TrainingState& own, StoredState& stored)> fits;
    /// Throws unless the trainer can take the store's state. Called again once nobody can change
    /// the store.
    std::function<void(StoredState& stored)> require;
    /// Throws unless all ranks together take all of it; may be empty. `ranks` are the trainer's.
    std::function<Task<>(Communicator& ranks)> require_together;
  };

  ReshardInPlace(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                 Device* device, TrainingState::Division division, Judge judge)
      : old_(model, config, runtime, device, division), judge_(std::move(judge)) {}

  /// Returns an engine over the converted store; null if there is no store, or one that needs no
  /// conversion. `make` makes an engine of the given model and config, and opens it from the old
  /// store. Not called on the reactor.
  template <class Engine, class Make>
  std::unique_ptr<Engine> run(const Make& make) {
    Reactor& reactor = old_.runtime().reactor;
    std::unique_ptr<Engine> engine;
    std::exception_ptr error;
    try {
      if (reactor.block_on(begin())) {
        engine = make(old_.model(), beside(), *stored_);
        engine->make_durable();  // no rank continues before the parts of all ranks are complete
        note(engine->state());
        reactor.block_on(complete(engine->state()));
      }
    } catch (...) {
      error = std::current_exception();
    }
    if (error) engine.reset();
    reactor.block_on(close());
    if (error) std::rethrow_exception(error);
    return engine;
  }

 private:
  Task<bool> begin();
  bool say_notes();
  void validate();
  Task<> look();
  Task<> require();
  Task<> lock();
  EngineConfig beside() const;
  void note(TrainingState& engine) const;
  Task<> complete(TrainingState& engine);
  Task<> close();

  TrainingState old_;  // this run's settings, over the old store's directories; has no hand
  Judge judge_;
  std::unique_ptr<StoredState> stored_;
  std::optional<StoreSuccession> succession_;
  std::vector<std::size_t> order_;
};

}  // namespace ziggurat

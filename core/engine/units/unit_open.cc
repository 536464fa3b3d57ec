// SPDX-License-Identifier: Apache-2.0
// core/engine/units/unit_open.cc: opens an engine for a trainer of units. Before that it may
// convert a store of other ranks, or in another format, to this run's in the same directories
// (state/reshard_in_place.h).
#include <fmt/format.h>

#include <memory>

#include "base/error.h"
#include "core/engine/state/reshard_in_place.h"
#include "core/engine/units/unit_engine.h"

namespace ziggurat {
namespace {

void require_same_model(const ModelSpec& model, const StoredState& stored) {
  if (stored.content().model == model.name) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("`resume=reshard`: the store {} holds model '{}', but this run trains "
                          "'{}': give another `store`",
                          stored.place(), stored.content().model, model.name));
}

/// Whether the store is divided as this run is, in the same format.
bool fits(const TrainingState& own, StoredState& stored) {
  if (stored.of_pieces()) return false;
  try {
    ChunkTable::from_layout(own.model(), stored.layout(), own.config().optimizer.state,
                            own.sharding());
  } catch (const Error&) {
    return false;
  }
  return true;
}

/// Returns an engine over the converted store; null if there is no store, or one that needs no
/// conversion.
std::unique_ptr<UnitEngine> resharded(const ModelSpec& model, const EngineConfig& config,
                                      Runtime& runtime, Device& device) {
  const ReshardInPlace::Judge judge{.fits = fits,
                                    .require =
                                        [&](StoredState& stored) {
                                          require_same_model(model, stored);
                                          stored.require_whole("`resume=reshard`");
                                        },
                                    .require_together = {}};
  ReshardInPlace reshard(model, config, runtime, &device, TrainingState::Division::kModel, judge);
  const auto make = [&](const ModelSpec& own, const EngineConfig& beside, StoredState& stored) {
    auto engine = std::make_unique<UnitEngine>(own, beside, runtime, device);
    engine->open(stored, {.continues_line = true, .in_place = true});
    return engine;
  };
  return reshard.run<UnitEngine>(make);
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

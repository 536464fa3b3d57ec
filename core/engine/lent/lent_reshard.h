// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/lent_reshard.h: divides the store of a trainer that lends its parameters among
// other ranks, or in other pieces, in place (`resume=reshard`). Private to the engine.
#pragma once

#include <memory>
#include <span>

#include "core/engine/lent/lent_engine_impl.h"

namespace ziggurat {

/// What LentEngine::open() is given.
struct LentOpening {
  const ModelSpec& model;
  const EngineConfig& config;
  Runtime& runtime;
  std::span<const TypedSpan<std::byte>> params;
  Device* device;  ///< may be null
};

/// Returns an engine over the converted store; null if there is no store, or one whose ranks have
/// the same pieces. Errors: kInvalidArgument if the store or the trainer does not say where the
/// pieces lie, or if their tensors differ; kUnimplemented for cuts within a block of 8-bit codes.
std::unique_ptr<LentEngineImpl> resharded(const LentOpening& opening);

}  // namespace ziggurat

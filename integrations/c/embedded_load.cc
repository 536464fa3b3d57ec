// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_load.cc: opens an embedded engine from a copy of its state.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/numerics/typed_value.h"
#include "core/checkpoint/piece_source.h"
#include "core/checkpoint/steps_blob.h"
#include "integrations/c/embedded_engine.h"
#include "integrations/c/wrong.h"

namespace ziggurat {

/// Opens an engine from `load`. The counts of steps come in the blob, as those of a store do.
std::unique_ptr<LentEngine> EmbeddedEngine::opened_from(
    const EngineConfig& config, const EmbeddedLoad& load,
    std::span<const TypedSpan<std::byte>> lent) {
  if (load.parts.size() != trained_ || load.steps.size() != trained_) {
    throw wrong(
        fmt::format("{} parts and {} counts of steps were given for {} trained parameters: give "
                    "one of each for every one",
                    load.parts.size(), load.steps.size(), trained_));
  }
  std::vector<PieceSource::Param> params;
  for (std::size_t p = 0; p < trained_; ++p) {
    const ParamSpec& spec = model_.units[p].params[0];
    const TensorPiece& part = load.parts[p];
    if (!part.name.empty() && part.count() != spec.count()) {
      throw wrong(fmt::format("parameter '{}' has {} elements, but its part of '{}' has {}",
                              spec.name, spec.count(), part.name, part.count()));
    }
    params.push_back({.name = spec.name, .shape = spec.shape, .part = part});
  }
  const PieceSource::ReadOwn own = [&](std::size_t param, std::uint64_t first,
                                       std::span<float> values) {
    if (lent[param].bytes.empty()) {
      std::ranges::fill(values, 0.0F);  // a streamed parameter begins with zeros
      return;
    }
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = value_at(lent[param].dtype, lent[param].bytes.data(), first + i);
  };
  std::vector<std::byte> counts =
      StepsBlob{.steps = load.steps, .of_ranks = 0, .own = {}}.written();
  PieceSource source(load.source, std::move(params), std::move(counts), own);
  return LentEngine::open(
      model_, config, runtime_, lent, source,
      {.weights_only = load.weights_only, .continues_line = load.continues_line}, device());
}

}  // namespace ziggurat

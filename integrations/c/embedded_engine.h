// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_engine.h: an engine for a trainer that keeps its parameters and gradients
// in memory of its own, and knows parameters but no units: each parameter is a unit.
//
// For now the engine has a copy of both: 2 or 4 bytes of parameter and 4 of accumulator for each
// element, in a host-emulated device that is exactly as large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/typed_span.h"
#include "core/engine/engine.h"

namespace ziggurat {

struct EmbeddedParam {
  std::string name;
  std::vector<std::int64_t> shape;
  std::uint32_t group = 0;
  TypedSpan<const std::byte> values{};  ///< at open; a new store's masters are made from them
};

/// Thread-safe: its calls are made one after the other.
class EmbeddedEngine {
 public:
  /// `config` says everything but the budgets that are 0, which become what a run uses well.
  /// `runtime` must outlive the engine. Errors: kInvalidArgument for parameters that make no model;
  /// kUnimplemented for several types in one; Engine::open()'s.
  EmbeddedEngine(Runtime& runtime, const std::vector<EmbeddedParam>& params, EngineConfig config);

  std::size_t param_count() const noexcept { return model_.units.size(); }
  /// Adds `values` to the gradient of `param` in the step to come. Errors: kInvalidArgument for
  /// another number of elements.
  void put_gradient(std::size_t param, TypedSpan<const std::byte> values);
  /// Errors: kInvalidArgument naming a parameter without a gradient; Engine::step()'s.
  StepResult step(const StepOptions& options);
  /// Copies the parameter as it is after the newest step. Errors: kInvalidArgument for another
  /// type or number of elements.
  void read_param(std::size_t param, TypedSpan<std::byte> values);
  void make_durable();

  struct State {
    bool resumed;
    std::uint64_t generation;
    std::uint64_t durable_generation;
    std::uint64_t blob_bytes;
  };
  State state() const;
  std::vector<std::byte> resumed_blob() const;
  std::vector<std::string> description() const;

 private:
  void require_count(const char* call, std::size_t param, std::size_t count) const;
  void require_gradients() const;

  mutable std::mutex mutex_;
  ModelSpec model_;
  std::vector<bool> has_gradient_;  ///< per parameter, in the step to come
  std::unique_ptr<Device> device_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace ziggurat

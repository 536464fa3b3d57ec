// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_kinds.h: the kinds of state that lending engines are tested with, and where it
// is.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "base/memory_exhausted.h"
#include "core/engine/lent_engine.h"
#include "tests/core/lent_trainer.h"

namespace ziggurat::testing {

struct LentKind {
  StateFormat format;
  DType dtype;
  std::optional<Rounding> rounding = std::nullopt;
};
inline std::string name_of(const LentKind& kind) {
  std::string name =
      fmt::format("{}_{}{}", to_string(kind.format), to_string(kind.dtype),
                  kind.rounding ? fmt::format("_{}", to_string(*kind.rounding)) : std::string());
  std::ranges::replace(name, '-', '_');
  return name;
}

inline std::string name_of(const std::tuple<LentKind, Where>& one) {
  constexpr std::array kNames{"memory", "host", "nvme"};
  return fmt::format("{}_{}", name_of(std::get<0>(one)),
                     kNames[static_cast<std::size_t>(std::get<1>(one))]);
}

inline EngineConfig config_of(const LentKind& kind, Where where,
                              const ScratchDirectory& directory) {
  EngineConfig config = small_config(directory.path());
  config.host_budget_bytes = 24 * kMiB;
  config.optimizer.state.format = kind.format;
  config.optimizer.state_rounding = config.optimizer.param_rounding = kind.rounding;
  config.optimizer.rounding_seed = kRoundingSeed;
  config.clip_norm = 0;
  config.placement.optimizer = where == Where::kNvme ? Tier::kNvme : Tier::kHost;
  if (where == Where::kMemory) config.store.clear();
  return config;
}

inline std::unique_ptr<Runtime> runtime_of(std::size_t threads) {
  return Runtime::create({.threads = threads, .trace_path = ""});
}

/// The least memory in which the engine works: for a few records.
inline std::uint64_t smallest_budget(const ModelSpec& model, EngineConfig config) {
  const ScratchDirectory directory;
  if (!config.store.empty()) config.store = {{directory.path()}};
  config.host_budget_bytes = 4096;
  LentTrainer trainer(model, config.optimizer.state);
  const auto runtime = runtime_of(1);
  try {
    LentEngine::open(model, config, *runtime, trainer.lent());
  } catch (const MemoryExhausted& error) {
    return error.shortage().smallest_bytes;
  }
  ADD_FAILURE() << "opened in a page";
  return 0;
}

}  // namespace ziggurat::testing

// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_rig.h: ranks of any layout that load a checkpoint, train and save, and what
// a checkpoint holds, whoever wrote it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "aio/thread_engine.h"
#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/checkpoint_save.h"
#include "tests/core/tensor_rig.h"

namespace ziggurat::testing {

struct Layout {
  std::string name;
  int ranks = 1;
  int tp = 1;
  int stage = 3;
  int shard_group = 0;
  Tier optimizer = Tier::kNvme;
  Tier params = Tier::kHost;
  StateFormat format = StateFormat::kFp32;
  Rounding rounding = Rounding::kNearest;
  DType dtype = DType::kBFloat16;
};
inline std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.name;
}

inline ModelSpec part_model(const Layout& layout) {
  ModelSpec model = part_of(whole_model(), layout.tp);
  model.dtype = layout.dtype;
  return model;
}

inline EngineConfig config_of(const Layout& layout, const std::string& store) {
  EngineConfig config = small_config(store);
  config.tensor_parallel = layout.tp;
  config.strategy.zero_stage = layout.stage;
  if (layout.shard_group > 0) {
    config.strategy.name = StrategyName::kHybrid;
    config.strategy.shard_group = layout.shard_group;
  }
  config.placement.optimizer = layout.optimizer;
  config.placement.params = layout.params;
  config.optimizer.state.format = layout.format;
  config.optimizer.state_rounding = config.optimizer.param_rounding = layout.rounding;
  config.optimizer.rounding_seed = kRoundingSeed;
  config.checkpoint.saves = true;
  return config;
}

/// On the runtime's reactor; its files and their engine go there too.
class OpenCheckpoint {
 public:
  OpenCheckpoint(Runtime& runtime, const std::string& directory) : runtime_(runtime) {
    runtime.reactor.block_on([](OpenCheckpoint& self, const std::string& from) -> Task<> {
      self.io_ = std::make_unique<ThreadEngine>(self.runtime_.reactor);
      Task<std::unique_ptr<CheckpointReader>> opening =
          CheckpointReader::open({self.runtime_.reactor, *self.runtime_.workers, *self.io_}, from);
      self.reader_ = co_await std::move(opening);
    }(*this, directory));
  }
  ~OpenCheckpoint() {
    runtime_.reactor.block_on([](OpenCheckpoint& self) -> Task<> {
      self.reader_.reset();
      self.io_.reset();
      co_return;
    }(*this));
  }
  OpenCheckpoint(const OpenCheckpoint&) = delete;
  CheckpointReader& reader() noexcept { return *reader_; }

 private:
  Runtime& runtime_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<CheckpointReader> reader_;
};

/// Every tensor, whole.
using TensorBytes = std::map<std::string, std::vector<std::byte>>;
inline TensorBytes tensors_of(Runtime& runtime, const std::string& directory) {
  OpenCheckpoint checkpoint(runtime, directory);
  TensorBytes all;
  runtime.reactor.block_on([](CheckpointReader& reader, TensorBytes& to) -> Task<> {
    const std::vector<StateTensor>& tensors = reader.content().tensors;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      std::vector<std::byte>& bytes = to[tensors[t].name];
      bytes.resize(tensors[t].size_bytes());
      const TensorRun whole{.first = 0, .count = tensors[t].count(), .at = 0};
      co_await reader.read(t, std::span(&whole, 1), bytes);
    }
  }(checkpoint.reader(), all));
  return all;
}
inline TensorBytes tensors_of(const std::string& directory) {
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  return tensors_of(*runtime, directory);
}
/// The names of tensors whose bytes differ, or that only one has.
inline std::vector<std::string> differing(const TensorBytes& a, const TensorBytes& b) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : a) {
    const auto found = b.find(name);
    if (found == b.end() || found->second != bytes) names.push_back(name);
  }
  for (const auto& [name, bytes] : b) {
    if (!a.contains(name)) names.push_back(name);
  }
  return names;
}

/// One rank with its part of the model.
class CheckpointRank {
 public:
  /// Without `from`, from initial values.
  CheckpointRank(Runtime& runtime, const Layout& layout, const EngineConfig& config,
                 const std::string& from, LoadOptions options = {})
      : CheckpointRank(runtime, layout) {
    if (!from.empty()) {
      OpenCheckpoint source(runtime, from);
      engine = Engine::open(model_, config, runtime, *device_, source.reader(), options);
      return;
    }
    engine = Engine::open(model_, config, runtime, *device_,
                          [this](UnitId unit, std::uint64_t first, std::span<float> values) {
                            for (std::size_t i = 0; i < values.size(); ++i)
                              values[i] = initial_value(unit, elements_[unit][first + i]);
                          });
  }

  CheckpointRank(Runtime& runtime, const Layout& layout, const EngineConfig& config,
                 StateSource& from)
      : CheckpointRank(runtime, layout) {
    engine = Engine::open(model_, config, runtime, *device_, from, {});
  }

  /// Makes the next step.
  StepResult step(const CheckpointRequest* checkpoint = nullptr,
                  std::span<const std::byte> blob = {}) {
    const std::uint64_t step = engine->generation();
    engine->prepare_step({.learning_rate = kPartLearningRate, .blob = {}});
    for (UnitId u = 0; u < model_.units.size(); ++u) {
      engine->acquire(u);
      engine->release(u);
    }
    for (auto u = static_cast<UnitId>(model_.units.size()); u-- > 0;) {
      const auto params = HostDevice::view(engine->acquire(u));
      const auto gradient = HostDevice::view(engine->gradient(u));
      for (std::size_t i = 0; i < params.count(); ++i)
        gradient[i] += gradient_of(value_at(params, i), u, elements_[u][i], step, data_rank_);
      engine->release(u);
      engine->finish_gradient(u);
    }
    return engine->step(
        {.learning_rate = kPartLearningRate, .checkpoint = checkpoint, .blob = blob});
  }
  void end() {
    engine->finish_saves();
    engine->make_durable();
  }

 private:
  CheckpointRank(Runtime& runtime, const Layout& layout)
      : part_{runtime.ranks->rank() % layout.tp, layout.tp},
        data_rank_(runtime.ranks->rank() / layout.tp),
        model_(part_model(layout)),
        device_(HostDevice::create(runtime.reactor, 8 * kMiB, nullptr, &runtime.metrics)) {
    for (const UnitSpec& unit : model_.units) elements_.push_back(whole_elements(unit, part_));
  }

  TensorPart part_;
  int data_rank_;
  ModelSpec model_;
  std::vector<std::vector<std::uint64_t>> elements_;
  std::unique_ptr<Device> device_;

 public:
  std::unique_ptr<Engine> engine;
};

/// Runs `body` on each rank of `layout`, over fresh stores in `scratch`, and ends them.
inline void on_ranks(const Layout& layout, const ScratchDirectory& scratch, const std::string& from,
                     const std::function<void(CheckpointRank&)>& body, LoadOptions options = {}) {
  const std::string store = (scratch.path() + "/" + "store-" + layout.name);
  std::filesystem::remove_all(store);
  const std::vector<std::unique_ptr<Runtime>> runtimes = connected_runtimes(layout.ranks, 1);
  expect_none(run_ranks(layout.ranks, [&](int rank) {
    CheckpointRank its(*runtimes[static_cast<std::size_t>(rank)], layout, config_of(layout, store),
                       from, options);
    body(its);
    its.end();
  }));
}

}  // namespace ziggurat::testing

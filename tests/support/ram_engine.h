// SPDX-License-Identifier: Apache-2.0
// tests/support/ram_engine.h: an Engine that keeps all state in RAM, for tests of trainers: no
// tiers, no threads, no overlap.
//
// It also checks what a trainer owes an engine: acquire and release in pairs, every gradient
// finished once before step(). Every stream is the host to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/engine/engine.h"

namespace ziggurat::testing {

class RamEngine final : public Engine {
 public:
  RamEngine(const ModelSpec& model, const OptimizerConfig& adamw, float clip_norm,
            const Initializer& initialize);

  TypedDeviceSpan<const std::byte> acquire(UnitId unit, StreamRef& stream) override;
  void release(UnitId unit, StreamRef& stream) override;
  DeviceSpan<float> gradient(UnitId unit, StreamRef& stream) override;
  void finish_gradient(UnitId unit, StreamRef& stream) override;
  using Engine::acquire;
  using Engine::finish_gradient;
  using Engine::gradient;
  using Engine::release;
  StepResult step(const StepOptions& options) override;
  std::uint64_t generation() const override { return generation_; }
  std::uint64_t durable_generation() const override { return 0; }
  void make_durable() override {}
  void save_checkpoint(const CheckpointRequest&) override {}
  void give_blob(std::span<const std::byte>) override {}
  void finish_saves() override {}
  void close() override {}
  std::vector<SaveOutcome> ended_saves() override { return {}; }
  bool resumed() const override { return false; }
  std::span<const std::byte> resumed_blob() const override { return {}; }
  std::size_t master_chunks(UnitId) const override { return 1; }
  MasterChunk read_master(UnitId unit, std::size_t chunk) override;
  const Metrics& metrics() const override { return metrics_; }
  Account host_account() const override { return Account(0); }
  std::vector<std::string> description() const override { return {"everything in RAM"}; }
  StateLine line() const override { return {}; }

  std::size_t unit_count() const { return units_.size(); }
  /// For tests that look inside or nudge a weight. The last finished gradient: as summed, and as
  /// rounded.
  TypedSpan<std::byte> params(UnitId unit) { return {dtype_, units_.at(unit).params}; }
  std::span<const float> finished_gradient(UnitId unit) const {
    return units_.at(unit).accumulator;
  }
  /// Units acquired and not released; must be 0 between steps.
  int acquired() const;
  /// Every acquire() so far, in order.
  const std::vector<UnitId>& acquisitions() const noexcept { return acquisitions_; }
  /// Forgets finished gradients without a step.
  void drop_gradients();

 private:
  struct Unit {
    std::vector<bool> decay;  // one a parameter tensor
    std::vector<std::uint64_t> ends;
    std::vector<std::byte> params, rounded;  // of the model's type
    std::vector<float> master, exp_avg, exp_avg_sq, accumulator;
    int acquired = 0;
    bool open = false;
    bool finished = false;
  };

  void update(Unit& unit, float learning_rate, float scale);

  DType dtype_;
  OptimizerConfig adamw_;
  float clip_norm_;
  std::vector<Unit> units_;
  std::vector<UnitId> acquisitions_;
  std::uint64_t generation_ = 0;
  Metrics metrics_;
};

}  // namespace ziggurat::testing

// SPDX-License-Identifier: Apache-2.0
// tests/support/paced_engine.h: an engine whose trainer computes for so long that all transfers and
// jobs that its last call has begun have ended before its next call.
//
// The engine's reactor has virtual time, which passes only while nothing else is under way
// (Reactor): so a pause ends when everything is quiet, however fast the machine is. What the engine
// begins is then a function of the trainer's calls alone.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/runtime/async.h"
#include "core/engine/engine.h"

namespace ziggurat::testing {

class PacedEngine final : public Engine {
 public:
  /// `held`: the unit whose gradient is open from the head to the end of backward.
  PacedEngine(Engine& inside, Reactor& reactor, UnitId held)
      : inside_(inside), reactor_(reactor), held_(held) {}

  using Engine::acquire;
  using Engine::finish_gradient;
  using Engine::gradient;
  using Engine::release;
  TypedDeviceSpan<const std::byte> acquire(UnitId unit, StreamRef& stream) override {
    return inside_.acquire(unit, stream);
  }
  void release(UnitId unit, StreamRef& stream) override {
    pause();
    inside_.release(unit, stream);
  }
  DeviceSpan<float> gradient(UnitId unit, StreamRef& stream) override {
    return inside_.gradient(unit, stream);
  }
  void finish_gradient(UnitId unit, StreamRef& stream) override {
    if (unit == held_) pause();
    inside_.finish_gradient(unit, stream);
  }
  void prepare_step(const StepOptions& options) override { inside_.prepare_step(options); }
  StepResult step(const StepOptions& options) override { return inside_.step(options); }
  std::size_t master_chunks(UnitId unit) const override { return inside_.master_chunks(unit); }
  MasterChunk read_master(UnitId unit, std::size_t chunk) override {
    return inside_.read_master(unit, chunk);
  }
  std::uint64_t generation() const override { return inside_.generation(); }
  std::uint64_t durable_generation() const override { return inside_.durable_generation(); }
  void make_durable() override { inside_.make_durable(); }
  void give_blob(std::span<const std::byte> blob) override { inside_.give_blob(blob); }
  void save_checkpoint(const CheckpointRequest& request) override {
    inside_.save_checkpoint(request);
  }
  void finish_saves() override { inside_.finish_saves(); }
  void close() override { inside_.close(); }
  std::vector<SaveOutcome> ended_saves() override { return inside_.ended_saves(); }
  bool resumed() const override { return inside_.resumed(); }
  std::span<const std::byte> resumed_blob() const override { return inside_.resumed_blob(); }
  const Metrics& metrics() const override { return inside_.metrics(); }
  Account host_account() const override { return inside_.host_account(); }
  std::vector<std::string> description() const override { return inside_.description(); }
  StateLine line() const override { return inside_.line(); }

  /// Returns once everything is quiet.
  void pause() {
    Task<> pausing = quiet(reactor_);
    reactor_.block_on(std::move(pausing));
  }

 private:
  static Task<> quiet(Reactor& reactor) {
    Signal over(reactor);
    reactor.clock().after(std::chrono::seconds(1), [&over] { over.set(); });
    co_await over.wait();
  }

  Engine& inside_;
  Reactor& reactor_;
  UnitId held_;
};

}  // namespace ziggurat::testing

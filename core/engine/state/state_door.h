// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_door.h: the calls on the state that every engine has, for a trainer's
// thread: each takes its turn, and waits on the reactor until it has ended. Private to the engine.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/state/training_state.h"

namespace ziggurat {

/// `Interface` is StateEngine, or derives from it. A derived class is the state's hand, so its
/// destructor calls close().
template <class Interface>
class StateDoor : public Interface {
 public:
  StateDoor(const ModelSpec& model, const EngineConfig& config, Runtime& runtime, Device* device,
            TrainingState::Division division)
      : state_(model, config, runtime, device, division) {}

  std::uint64_t generation() const override {
    const Turn turn(turn_);
    return state_.generation();
  }
  std::uint64_t durable_generation() const override {
    return at_end_ ? at_end_->durable_generation : state_.durable_generation();
  }
  void make_durable() override {
    const Turn turn(turn_);
    state_.require_durable();
    run(state_.make_durable());
  }
  void give_blob(std::span<const std::byte> blob) override {
    const Turn turn(turn_);
    take_blob(blob);
  }
  void save_checkpoint(const CheckpointRequest& request) override {
    const Turn turn(turn_);
    state_.require_saves("save_checkpoint()");
    state_.require_blob_given("save_checkpoint()");
    run(state_.save_checkpoint(request));
  }
  void finish_saves() override {
    const Turn turn(turn_);
    run(state_.finish_saves());
  }
  bool saves_hang() const override {
    const Turn turn(turn_);
    return state_.runtime().reactor.block_on(
        [](const TrainingState& state) -> Task<bool> { co_return state.saves_hang(); }(state_));
  }
  std::vector<SaveOutcome> ended_saves() override {
    const Turn turn(turn_);
    std::vector<SaveOutcome> outcomes;
    run([](TrainingState& state, std::vector<SaveOutcome>& all) -> Task<> {
      all = state.ended_saves();
      co_return;
    }(state_, outcomes));
    return outcomes;
  }
  bool resumed() const override { return state_.resumed(); }
  std::span<const std::byte> resumed_blob() const override { return state_.resumed_blob(); }
  Placement placement() const override { return state_.config().placement; }
  double state_seconds() const override { return state_.state_seconds(); }
  std::uint64_t read_ahead_bytes() const override {
    return state_.plan().items * state_.plan().item_bytes;
  }
  std::uint64_t kept_record_bytes() const override { return state_.plan().kept_bytes; }
  const Metrics& metrics() const override { return state_.runtime().metrics; }
  Account host_account() const override { return state_.host_account(); }
  std::vector<std::string> description() const override { return state_.notes(); }
  StateLine line() const override { return at_end_ ? at_end_->line : state_.line(); }
  void close() override {
    const std::lock_guard lock(turn_.mutex);
    if (!turn_.closed) state_.runtime().reactor.block_on(closing());
  }
  /// Does the same on the reactor's thread, where nothing else is called meanwhile.
  Task<> closing() {
    if (std::exchange(turn_.closed, true)) co_return;
    at_end_ = AtEnd{.durable_generation = state_.durable_generation(), .line = state_.line()};
    Task<> its = state_.close();
    co_await std::move(its);
  }

 protected:
  /// Puts the calls of a trainer's threads in an order.
  struct TurnOrder {
    std::mutex mutex;
    bool closed = false;  ///< no call follows
  };
  /// The turn of a call, which others wait for. So a call that waits for what another thread's call
  /// gives back (LentEngine::acquire) ends its turn before. Errors: kCancelled once the engine is
  /// closed.
  class Turn {
   public:
    explicit Turn(TurnOrder& order) : lock_(order.mutex) {
      if (order.closed) throw Error(ErrorCode::kCancelled, "the engine was closed");
    }

   private:
    std::lock_guard<std::mutex> lock_;
  };

  /// Runs a call. If the state has ended, throws only when no job uses memory that the trainer
  /// lends, or ever will.
  template <class T>
  T run(Task<T> call) {
    return state_.runtime().reactor.block_on(state_.giving_back(std::move(call)));
  }
  /// Throws, before anything changes, if `stream` may not wait for events.
  static void require_waits(StreamRef& stream) { stream.wait(Event()); }
  /// Makes `stream` wait for an event. The host waits on the reactor, like all calls of the engine,
  /// so that a lost device ends the run.
  void wait_on(StreamRef& stream, const Event& event) {
    if (dynamic_cast<Host*>(&stream) == nullptr) return stream.wait(event);
    run(state_.ending_the_run(event.wait()));
  }
  /// Gives the state the blob for which it waits. Errors: TrainingState::require_blob()'s.
  void take_blob(std::span<const std::byte> blob) {
    state_.require_blob(blob);
    run([](TrainingState& state, std::span<const std::byte> given) -> Task<> {
      state.give_blob(given);
      co_return;
    }(state_, blob));
  }
  void open_state(Hand& hand, StateSource* source, const LoadOptions& options) {
    state_.runtime().reactor.block_on(state_.open(hand, source, options));
  }
  /// Throws kInvalidArgument for a unit that the model does not have.
  void require_unit(const char* call, UnitId unit) const {
    const std::size_t count = state_.model().units.size();
    if (unit < count) return;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}(unit {}): the model has only units 0 to {}", call, unit, count - 1));
  }

  mutable TurnOrder turn_;
  /// What a closed engine still answers.
  struct AtEnd {
    std::uint64_t durable_generation;
    StateLine line;
  };
  std::optional<AtEnd> at_end_;
  TrainingState state_;
};

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsed_rank.cc: plays the trainer of a rank.
#include "core/rehearsal/rehearsed_rank.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/runtime/seconds.h"

namespace ziggurat {
namespace {

template <class T>
std::span<const std::byte> bytes_of(const DeviceSpan<T>& span) noexcept {
  return {reinterpret_cast<const std::byte*>(span.address()), span.size_bytes()};
}

}  // namespace

RankOnTwins::RankOnTwins(RehearsedWorld& world, std::unique_ptr<Communicator> ranks)
    : RankTwins(world, std::move(ranks)) {
  if (!device_->host_accessible()) stream_ = device_->create_costed_stream("trainer");
  const RehearsalRequest& request = world.request;
  units_.resize(request.model.units.size());
  engine_ = EngineTasks::create(request.model, watched_config(), runtime_, *device_);
}

RankOnTwins::~RankOnTwins() = default;

Task<> RankOnTwins::live() {
  std::exception_ptr error;
  try {
    Task<> playing = play();
    co_await std::move(playing);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) runtime_.ranks->abort("a rank of the rehearsal failed");
  if (!error && world_.watch != nullptr) watch_end();
  Task<> closing = engine_->close();
  co_await std::move(closing);
  if (world_.watch != nullptr) {
    world_.watch->must(device_->account().used_bytes() == 0,
                       fmt::format("rank {} has closed its engine, but of device memory {} are "
                                   "still in use",
                                   rank_, device_->account().text()));
  }
  if (error) std::rethrow_exception(error);
}

Task<> RankOnTwins::play() {
  // Masters have no memory here, so nobody asks for their values.
  const Initializer none = [](UnitId, std::uint64_t, std::span<float>) {};
  Task<> opening = engine_->open(none);
  co_await std::move(opening);
  const double opened = now();
  Reading reading = read();
  its_.before = reading.counters;
  for (int i = 0; i < world_.request.steps; ++i) {
    RehearsedStep step;
    step.began_s = now() - opened;
    Task<> training = train(i, step);
    co_await std::move(training);
    if (i + 1 == world_.request.steps) {
      const double ended = now();
      Task<> durable = engine_->make_durable();
      co_await std::move(durable);
      its_.durable_s = now() - ended;
      if (world_.watch != nullptr)
        world_.watch->ranks[static_cast<std::size_t>(rank_)].all_durable = true;
    }
    count_step(reading, engine_->host_account(), step);
    reading = read();
    its_.steps.push_back(std::move(step));
  }
  its_.after = reading.counters;
  its_.host = engine_->host_account();
  its_.device = device_->account();
  its_.workers_busy_s = reading.workers_busy_s;
}

Task<> RankOnTwins::train(int index, RehearsedStep& step) {
  const double began = now();
  slowness_ = 1;
  if (world_.watch != nullptr) {
    for (const RehearsalFaults::SlowRank& slow : world_.watch->faults.slow_ranks)
      if (slow.rank == rank_ && slow.step == index) slowness_ = slow.factor;
  }
  StepOptions options;
  options.learning_rate = 1e-3F;
  Task<> preparing = engine_->prepare_step(options);
  co_await std::move(preparing);
  const auto units = static_cast<UnitId>(world_.request.model.units.size());
  for (int micro = 0; micro < world_.request.micro_batches; ++micro) {
    const bool last = micro == world_.request.micro_batches - 1;
    for (UnitId unit = 0; unit < units; ++unit) {
      Task<> its = forward(unit, step);
      co_await std::move(its);
    }
    for (const UnitId unit : world_.request.config.trainer_held_units) {
      Task<> its = between(unit, step);
      co_await std::move(its);
    }
    for (UnitId unit = units; unit-- > 0;) {
      Task<> its = backward(unit, last, step);
      co_await std::move(its);
    }
  }
  const double called = now();
  Task<StepResult> stepping = engine_->step(options);
  const StepResult result = co_await std::move(stepping);
  step.generation = result.generation;
  if (world_.watch != nullptr) watch_step(index, result);
  step.step_s = now() - called;
  step.seconds = now() - began;
}

bool RankOnTwins::held(UnitId unit) const {
  return std::ranges::find(world_.request.config.trainer_held_units, unit) !=
         world_.request.config.trainer_held_units.end();
}

Task<> RankOnTwins::acquire(UnitId unit, RehearsedStep& step) {
  const double called = now();
  Task<EngineTasks::Acquired> acquiring = engine_->acquire(unit);
  const EngineTasks::Acquired its = co_await std::move(acquiring);
  if (!stream_) co_await its.landed.wait();
  units_[unit] = {.params = bytes_of(its.params.bytes), .landed = its.landed};
  step.acquire_s += now() - called;
}

Task<> RankOnTwins::take_gradient(UnitId unit, RehearsedStep& step) {
  const double called = now();
  Task<EngineTasks::Gradient> taking = engine_->gradient(unit);
  const EngineTasks::Gradient gradient = co_await std::move(taking);
  units_[unit].gradient = bytes_of(gradient.values);
  if (stream_) {
    stream_->wait(gradient.zeroed);
  } else {
    co_await gradient.zeroed.wait();
  }
  step.gradient_s += now() - called;
}

Task<> RankOnTwins::forward(UnitId unit, RehearsedStep& step) {
  Task<> acquiring = acquire(unit, step);
  co_await std::move(acquiring);
  Task<> computing = compute("forward", unit, world_.request.costs[unit].forward_s, step);
  co_await std::move(computing);
  release(unit);
  tell_progress();
}

/// A unit that is held has its gradient open from here on.
Task<> RankOnTwins::between(UnitId unit, RehearsedStep& step) {
  Task<> acquiring = acquire(unit, step);
  co_await std::move(acquiring);
  Task<> taking = take_gradient(unit, step);
  co_await std::move(taking);
  Task<> computing = compute("head", unit, world_.request.costs[unit].between_s, step);
  co_await std::move(computing);
  release(unit);
}

Task<> RankOnTwins::backward(UnitId unit, bool last, RehearsedStep& step) {
  if (!held(unit)) {
    Task<> acquiring = acquire(unit, step);
    co_await std::move(acquiring);
    Task<> taking = take_gradient(unit, step);
    co_await std::move(taking);
  }
  Task<> computing = compute("backward", unit, world_.request.costs[unit].backward_s, step);
  co_await std::move(computing);
  const Event added = stream_ ? stream_->record() : Event();
  if (!held(unit)) release(unit);
  tell_progress();
  if (!last) co_return;
  const double finished = now();
  Task<> finishing = engine_->finish_gradient(unit, added);
  co_await std::move(finishing);
  step.gradient_s += now() - finished;
}

void RankOnTwins::release(UnitId unit) {
  engine_->release(unit, stream_ ? stream_->record() : Event());
  units_[unit].params = {};
}

/// Computes once the unit's parameters are there: on the CPU until it is done, on a GPU's stream
/// without waiting for it.
Task<> RankOnTwins::compute(const char* what, UnitId unit, double seconds, RehearsedStep& step) {
  seconds *= slowness_;
  step.compute_s += seconds;
  const InUse& its = units_[unit];
  if (stream_) {
    stream_->wait(its.landed);
    stream_->compute(nanoseconds_of(seconds), what, unit,
                     {.read = its.params, .written = its.gradient});
    co_return;
  }
  const AccessLedger::Access reading = AccessLedger::read(world_.ledger(), its.params, what);
  const AccessLedger::Access writing = AccessLedger::write(world_.ledger(), its.gradient, what);
  const Nanoseconds began = world_.reactor.clock().now();
  Task<> passing = world_.request.machine.workers_compute
                       ? workers_->compute(what, nanoseconds_of(seconds))
                       : pass_time(world_.reactor, seconds);
  co_await std::move(passing);
  if (trace_ != nullptr) trace_->span(track_, what, began, world_.reactor.clock().now(), unit);
}

void RankOnTwins::tell_progress() {
  const RehearsalRequest& request = world_.request;
  if (!request.progress || rank_ != 0) return;
  request.progress(++uses_, 2 * request.model.units.size() *
                                static_cast<std::uint64_t>(request.steps) *
                                static_cast<std::uint64_t>(request.micro_batches));
}

}  // namespace ziggurat

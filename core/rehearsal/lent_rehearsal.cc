// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/lent_rehearsal.cc: a trainer that does what was recorded, over an engine on twins.
#include "core/rehearsal/lent_rehearsal.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/seconds.h"
#include "collectives/self_communicator.h"
#include "core/engine/lent_tasks.h"
#include "core/rehearsal/rank_twins.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {
namespace {

using Kind = LentEvent::Kind;

DType dtype_of(const ModelSpec& model, std::size_t param) {
  return model.units[param].dtype.value_or(model.dtype);
}

void require_events(const LentRehearsal& request) {
  const auto wrong = [](const std::string& what) {
    return Error(ErrorCode::kInvalidArgument, fmt::format("a recording {}", what));
  };
  if (request.steps < 1)
    throw wrong(fmt::format("is played for {} steps: give at least one", request.steps));
  const auto steps = std::ranges::count(request.events, Kind::kStep, &LentEvent::kind);
  if (steps != 1) throw wrong(fmt::format("of a step makes {} of them: give one", steps));
  for (const LentEvent& event : request.events) {
    if (event.seconds < 0)
      throw wrong(fmt::format("computes {} seconds: give 0 or more", event.seconds));
    const bool of_param = event.kind == Kind::kWait || event.kind == Kind::kGradient ||
                          event.kind == Kind::kAddGradient;
    if (of_param && event.of >= request.model.units.size())
      throw wrong(fmt::format("names parameter {}, but the model has {}", event.of,
                              request.model.units.size()));
  }
}

/// Returns how many addresses the trainer's memory takes, and that of the engine where it chooses
/// its budget itself.
std::uint64_t addresses_of(const LentRehearsal& request) {
  constexpr std::uint64_t kMostOfElement = 64;  // bytes, of state and what is on its way
  std::uint64_t bytes = 4 * kGiB;
  for (const UnitSpec& unit : request.model.units)
    bytes += unit.count() * kMostOfElement + 2 * kHugePageBytes;
  return bytes;
}

/// Returns what the world of twins asks of a rehearsal; the model is known to the engine alone.
RehearsalRequest world_of(const LentRehearsal& request) {
  RehearsalRequest its;
  its.config = request.config;
  its.machine = request.machine;
  its.steps = request.steps;
  return its;
}

class LentOnTwins : private RankTwins {
 public:
  LentOnTwins(RehearsedWorld& world, const LentRehearsal& request)
      : RankTwins(world, std::make_unique<SelfCommunicator>()),
        request_(request),
        sums_(request.model.units.size()),
        gradients_(request.model.units.size()),
        groups_(group_count(request.model), GroupStep{.learning_rate = 1e-3F}) {
    const ModelSpec& model = request.model;
    for (std::size_t p = 0; p < model.units.size(); ++p) {
      const bool streamed = model.units[p].params[0].streamed.has_value();
      params_.push_back(lent(dtype_of(model, p), streamed ? 0 : model.units[p].count()));
      const DType dtype = request.gradients.value_or(dtype_of(model, p));
      const bool trained = !model.units[p].frozen();
      const std::uint64_t count = trained ? model.units[p].count() : 0;
      memory_.push_back(lent(dtype, count));
      made_.push_back(lent(dtype_of(model, p), count));
    }
    engine_ = LentTasks::create(model, request.config, runtime_, device_.get());
  }

  /// Opens the engine, trains, makes all steps durable and closes it.
  Task<> live() {
    std::exception_ptr error;
    try {
      Task<> playing = play();
      co_await std::move(playing);
    } catch (...) {
      error = std::current_exception();
    }
    Task<> closing = engine_->close();
    co_await std::move(closing);
    if (error) std::rethrow_exception(error);
  }
  RehearsedRank take() { return std::move(its_); }

 private:
  /// Returns memory of the trainer's, which does not exist.
  TypedSpan<std::byte> lent(DType dtype, std::uint64_t count) {
    if (count == 0) return {dtype, {}};
    return {dtype, world_.absent.reserve(count * size_bytes(dtype))};
  }

  Task<> play() {
    Task<> opening = engine_->open(params_);
    co_await std::move(opening);
    const double opened = now();
    Reading reading = read();
    its_.before = reading.counters;
    for (int i = 0; i < request_.steps; ++i) {
      RehearsedStep step;
      step.began_s = now() - opened;
      for (const LentEvent& event : request_.events) {
        Task<> doing = act(event, step);
        co_await std::move(doing);
      }
      step.seconds = now() - opened - step.began_s;
      if (i + 1 == request_.steps) {
        const double ended = now();
        Task<> durable = end();
        co_await std::move(durable);
        its_.durable_s = now() - ended;
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

  /// Waits until the last step is at home, and on the drive if there is one.
  Task<> end() {
    Task<> updating = engine_->wait_all_updated();
    co_await std::move(updating);
    if (request_.config.store.empty()) co_return;
    Task<> durable = engine_->make_durable();
    co_await std::move(durable);
  }

  Task<> act(const LentEvent& event, RehearsedStep& step) {
    const double began = now();
    switch (event.kind) {
      case Kind::kCompute: {
        Task<> computing = compute(event);
        co_await std::move(computing);
        step.compute_s += event.seconds;
        break;
      }
      case Kind::kAcquire: {
        Task<> acquiring = acquire(event.of);
        co_await std::move(acquiring);
        step.acquire_s += now() - began;
        break;
      }
      case Kind::kRelease: engine_->release(event.of, Event()); break;
      case Kind::kWait: {
        Task<> waiting = engine_->wait_updated(event.of);
        co_await std::move(waiting);
        step.acquire_s += now() - began;
        break;
      }
      case Kind::kGradient:
      case Kind::kAddGradient: {
        Task<> giving = give(event);
        co_await std::move(giving);
        step.gradient_s += now() - began;
        break;
      }
      case Kind::kStep: {
        Task<> making = make_step(step);
        co_await std::move(making);
        step.step_s += now() - began;
        break;
      }
    }
  }

  Task<> compute(const LentEvent& event) {
    const Nanoseconds began = world_.reactor.clock().now();
    const std::size_t threads = event.threads == 0 ? workers_->threads() : event.threads;
    Task<> passing = request_.machine.workers_compute
                         ? workers_->compute_beside(nanoseconds_of(event.seconds), threads)
                         : pass_time(world_.reactor, event.seconds);
    co_await std::move(passing);
    if (trace_ != nullptr)
      trace_->span(track_, "compute", began, world_.reactor.clock().now(), event.of);
  }

  Task<> acquire(StreamedUnit unit) {
    Task<std::vector<Event>> acquiring = engine_->acquire(unit);
    const std::vector<Event> landed = co_await std::move(acquiring);
    for (const Event& event : landed) co_await event.wait();
  }

  Task<> give(const LentEvent& event) {
    if (!expecting_) {
      Task<> expecting = engine_->expect_gradients();
      co_await std::move(expecting);
    }
    expecting_ = true;
    if (event.kind == Kind::kGradient) {
      gradients_[event.of] = memory_[event.of];
      co_return;
    }
    Task<> adding = engine_->add_gradient(event.of, made_[event.of], 1,
                                          /*instead_of_zeros=*/!sums_[event.of]);
    co_await std::move(adding);
    sums_[event.of] = true;
  }

  Task<> make_step(RehearsedStep& step) {
    StepOptions options{.blob = {}};
    options.groups = groups_;
    options.update_at_once = request_.update_at_once;
    Task<StepResult> stepping = engine_->step(gradients_, options);
    const StepResult result = co_await std::move(stepping);
    step.generation = result.generation;
    std::ranges::fill(gradients_, TypedSpan<const std::byte>{});
    sums_.assign(sums_.size(), false);
    expecting_ = false;
  }

  const LentRehearsal& request_;
  std::vector<TypedSpan<std::byte>> params_;           // by ParamId
  std::vector<TypedSpan<std::byte>> memory_;           // of gradients for the step
  std::vector<TypedSpan<std::byte>> made_;             // of those that backward makes
  std::vector<bool> sums_;                             // whether there is one
  std::vector<TypedSpan<const std::byte>> gradients_;  // for the step to come
  std::vector<GroupStep> groups_;
  bool expecting_ = false;  // gradients of this step
  std::unique_ptr<LentTasks> engine_;
  RehearsedRank its_;
};

}  // namespace

RehearsedRank rehearse_lent(const LentRehearsal& request) {
  require_events(request);
  const RehearsalRequest its = world_of(request);
  RehearsedWorld world(its,
                       std::make_shared<SimulatedDisk>(disk_bytes(its), SimulatedDisk::Keeps::kAll),
                       nullptr, addresses_of(request));
  LentOnTwins rank(world, request);
  world.reactor.block_on(rank.live());
  return rank.take();
}

}  // namespace ziggurat

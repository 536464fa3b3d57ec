// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/lent_streams.cc: what the engine keeps for a trainer that has no memory for it:
// sums of gradients, and streamed parameters.
#include <fmt/format.h>

#include <thread>
#include <utility>

#include "base/error.h"
#include "core/engine/lent/lent_engine_impl.h"

namespace ziggurat {

GradSums& LentEngineImpl::sums(const char* call) const {
  if (sums_) return *sums_;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}(): gradients are not summed on NVMe: choose `placement=grads=nvme`", call));
}

bool LentEngineImpl::has_gradient(std::span<const TypedSpan<const std::byte>> gradients,
                                  ParamId param) const {
  return !gradients[param].bytes.empty() || (sums_ && sums_->has(param));
}

void LentEngineImpl::add_gradient(ParamId param, TypedSpan<const std::byte> values, float scale,
                                  bool instead_of_zeros) {
  const Turn turn(turn_);
  require_trained("add_gradient", param);
  require_count("add_gradient", param, values.count());
  GradSums& its = sums("add_gradient");
  run([](LentEngineImpl& self, GradSums& all, ParamId of, TypedSpan<const std::byte> summand,
         float factor, bool first) -> Task<> {
    self.state_.check();
    self.state_.begin_call();
    // The step before may still read its sum.
    co_await self.state_.gates().wait(self.state_.lent_place(of).unit);
    const std::vector<ChunkRun> runs = self.state_.lent_runs(of);
    co_await all.add(of, runs, summand, factor, first);
  }(*this, its, param, values, scale, instead_of_zeros));
}

void LentEngineImpl::discard_sum(ParamId param) {
  const Turn turn(turn_);
  require_param("discard_sum", param);
  run([](GradSums& all, ParamId of) -> Task<> {
    all.discard(of);
    co_return;
  }(sums("discard_sum"), param));
}

void LentEngineImpl::read_sum(ParamId param, std::uint64_t first, std::span<float> values) {
  const Turn turn(turn_);
  require_param("read_sum", param);
  GradSums& its = sums("read_sum");
  const std::string& name = state_.lent_param(param).name;
  run([](LentEngineImpl& self, GradSums& all, ParamId of, const std::string& whose,
         std::uint64_t begin, std::span<float> to) -> Task<> {
    self.state_.check();
    if (!all.has(of) || begin + to.size() > self.state_.lent_place(of).count) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("read_sum('{}'): there is no sum of these elements", whose));
    }
    const std::vector<ChunkRun> runs = self.state_.lent_runs(of);
    co_await all.read(runs, begin, to);
  }(*this, its, param, name, first, values));
}

StreamedParams& LentEngineImpl::streamed(const char* call) const {
  if (streamed_) return *streamed_;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}(): all parameters are in the caller's memory, and there are no units", call));
}

// Waits without its turn, because another thread's release() may give back what it waits for.
void LentEngineImpl::acquire(StreamedUnit unit, StreamRef& stream) {
  StreamedParams* its = nullptr;
  {
    const Turn turn(turn_);
    its = &streamed("acquire");
    its->require_unit("acquire", unit);
    require_waits(stream);
    its->acquiring(unit);
  }
  bool acquired = false;
  try {
    const CountedTime waited(state_.runtime().metrics, Counter::kWaitParamsNs);
    const std::vector<Event> landed = run(its->acquire(unit, std::this_thread::get_id()));
    acquired = true;
    for (const Event& event : landed) wait_on(stream, event);
  } catch (...) {
    if (acquired) {
      its->released(unit);
      state_.runtime().reactor.post([its, unit] { its->release(unit, {}); });
    }
    throw;
  }
}

void LentEngineImpl::release(StreamedUnit unit, StreamRef& stream) {
  const Turn turn(turn_);
  StreamedParams& its = streamed("release");
  its.require_acquired("release", unit);
  const Event read = stream.record();
  its.released(unit);
  state_.runtime().reactor.post([&its, unit, read] { its.release(unit, read); });
}

void LentEngineImpl::expect_units(std::span<const StreamedUnit> units) {
  const Turn turn(turn_);
  StreamedParams& its = streamed("expect_units");
  for (const StreamedUnit unit : units) its.require_unit("expect_units", unit);
  std::vector<StreamedUnit> order(units.begin(), units.end());
  state_.runtime().reactor.post([&its, order = std::move(order)] { its.expect(order); });
}

void LentEngineImpl::end_waits() {
  if (streamed_) streamed_->end_waits();
}

TypedDeviceSpan<std::byte> LentEngineImpl::place(ParamId param) const {
  const Turn turn(turn_);
  require_param("param_memory", param);
  const StreamedParams& its = streamed("param_memory");
  its.require_acquired_param("param_memory", param);
  return its.place(param);
}

void LentEngineImpl::store_param(ParamId param, StreamRef& stream) {
  const Turn turn(turn_);
  require_param("store_param", param);
  StreamedParams& its = streamed("store_param");
  its.require_acquired_param("store_param", param);
  const Event written = stream.record();
  run([](TrainingState& state, StreamedParams& params, ParamId of, Event event) -> Task<> {
    state.check();
    co_await params.store(of, event);
  }(state_, its, param, written));
}

}  // namespace ziggurat

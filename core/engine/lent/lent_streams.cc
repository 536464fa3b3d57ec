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
  run(gradient_added(param, values, scale, instead_of_zeros));
}

Task<> LentEngineImpl::gradient_added(ParamId param, TypedSpan<const std::byte> values, float scale,
                                      bool instead_of_zeros) {
  require_trained("add_gradient", param);
  require_count("add_gradient", param, values.count());
  GradSums& its = sums("add_gradient");
  state_.check();
  state_.begin_call();
  // The step before may still read its sum.
  co_await state_.gates().wait(state_.lent_place(param).unit);
  const std::vector<ChunkRun> runs = state_.lent_runs(param);
  Task<> adding = its.add(param, runs, values, scale, instead_of_zeros);
  co_await std::move(adding);
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
    const std::uint64_t count = self.state_.lent_place(of).count;
    if (!all.has(of) || begin > count || to.size() > count - begin) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("read_sum('{}'): there is no sum of these elements", whose));
    }
    const std::vector<ChunkRun> runs = self.state_.lent_runs(of);
    co_await all.read(of, runs, begin, to);
  }(*this, its, param, name, first, values));
}

StreamedParams& LentEngineImpl::streamed(const char* call) const {
  if (streamed_) return *streamed_;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}(): all parameters are in the caller's memory, and there are no units", call));
}

/// Uses a stream of the trainer's. If that finds that the device is lost, the engine ends.
template <class Use>
auto LentEngineImpl::on_stream(const Use& use) {
  std::exception_ptr lost;
  try {
    return use();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnavailable) throw;
    lost = std::current_exception();
  }
  run([](TrainingState& state, const std::exception_ptr& error) -> Task<> {
    state.fail(error);
    state.check();
    co_return;
  }(state_, lost));
  std::rethrow_exception(lost);
}

StreamedParams& LentEngineImpl::begin_acquire(StreamedUnit unit) {
  StreamedParams& its = streamed("acquire");
  its.require_unit("acquire", unit);
  its.acquiring(unit);
  return its;
}

StreamedParams& LentEngineImpl::begin_release(StreamedUnit unit) {
  StreamedParams& its = streamed("release");
  its.require_acquired("release", unit);
  its.released(unit);
  return its;
}

Task<std::vector<Event>> LentEngineImpl::acquired(StreamedUnit unit, std::thread::id thread,
                                                  Acquire why) {
  Task<std::vector<Event>> its = state_.ending_the_run(streamed_->acquire(unit, thread, why));
  co_return co_await std::move(its);
}

// Waits without its turn, because another thread's release() may give back what it waits for.
void LentEngineImpl::acquire(StreamedUnit unit, StreamRef& stream, Acquire why) {
  StreamedParams* its = nullptr;
  {
    const Turn turn(turn_);
    streamed("acquire").require_unit("acquire", unit);
    // Throws, before anything changes, if the stream may not wait.
    on_stream([&] { require_waits(stream); });
    its = &begin_acquire(unit);
  }
  bool is_acquired = false;
  try {
    const CountedTime waited(state_.runtime().reactor.clock(), state_.runtime().metrics,
                             Counter::kWaitParamsNs);
    const std::vector<Event> landed = run(acquired(unit, std::this_thread::get_id(), why));
    is_acquired = true;
    wait_for(unit, landed, stream);
  } catch (...) {
    if (is_acquired) {
      its->released(unit);
      state_.runtime().reactor.post([its, unit] { its->release(unit, {}); });
    }
    throw;
  }
}

/// Makes `stream` wait for what was brought.
void LentEngineImpl::wait_for(StreamedUnit unit, const std::vector<Event>& landed,
                              StreamRef& stream) {
  try {
    for (const Event& event : landed) on_stream([&] { wait_on(stream, event); });
  } catch (const Error& error) {
    throw Error(error.code(),
                fmt::format("acquire(unit {}): its parameters did not reach the device: {}", unit,
                            error.what()),
                error.native());
  }
}

void LentEngineImpl::release(StreamedUnit unit, StreamRef& stream) {
  const Turn turn(turn_);
  streamed("release").require_acquired("release", unit);
  const Event read = on_stream([&] { return stream.record(); });
  StreamedParams& its = begin_release(unit);
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
  require_param_or_whole("param_memory", param);
  const StreamedParams& its = streamed("param_memory");
  its.require_acquired_param("param_memory", param);
  return its.place(param);
}

void LentEngineImpl::store_param(ParamId param, StreamRef& stream) {
  const Turn turn(turn_);
  require_param_or_whole("store_param", param);
  StreamedParams& its = streamed("store_param");
  const StreamedUnit unit = its.require_acquired_param("store_param", param);
  const Event written = on_stream([&] { return stream.record(); });
  run([](LentEngineImpl& self, StreamedParams& params, StreamedUnit in, ParamId of,
         Event event) -> Task<> {
    self.state_.check();
    params.require_exact("store_param", in);
    params.written(in);
    const std::optional<ParamId> stored = params.stored_in(of);
    if (!stored) co_return;  // other ranks have it all
    const UnitUses::Use writing = co_await self.state_.writing(*stored);
    Task<> storing = self.or_end(params.store(of, event));  // a part of it may be home
    co_await std::move(storing);
    self.state_.param_stored(*stored);
  }(*this, its, unit, param, written));
}

/// Throws unless `param` is streamed, its unit is not acquired, and `values` fit it.
StreamedParams& LentEngineImpl::at_home(const char* call, ParamId param,
                                        TypedSpan<const std::byte> values) const {
  require_count(call, param, values.count());
  StreamedParams& its = streamed(call);
  const DType dtype = state_.table().dtype(state_.lent_place(param).unit);
  if (values.dtype != dtype)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}('{}'): the parameter is {}, but the memory is {}", call,
                    state_.lent_param(param).name, to_string(dtype), to_string(values.dtype)));
  its.require_free(call, param);
  return its;
}

void LentEngineImpl::read_home(ParamId param, TypedSpan<std::byte> values) {
  const Turn turn(turn_);
  StreamedParams& its = at_home("read_home", param, values);
  run([](TrainingState& state, StreamedParams& params, ParamId of, auto into) -> Task<> {
    state.check();
    co_await state.gates().wait(state.lent_place(of).unit);
    co_await params.read_home(of, into);
  }(state_, its, param, values));
}

void LentEngineImpl::write_home(ParamId param, TypedSpan<const std::byte> values) {
  const Turn turn(turn_);
  StreamedParams& its = at_home("write_home", param, values);
  run([](LentEngineImpl& self, StreamedParams& params, ParamId of, auto from) -> Task<> {
    self.state_.check();
    co_await self.state_.gates().wait(self.state_.lent_place(of).unit);
    const UnitUses::Use writing = co_await self.state_.writing(of);
    Task<> storing = self.or_end(params.write_home(of, from));
    co_await std::move(storing);
    self.state_.param_stored(of);
  }(*this, its, param, values));
}

/// Does something that can neither be undone nor be left half done: an error ends the engine.
Task<> LentEngineImpl::or_end(Task<> call) {
  std::exception_ptr error;
  try {
    co_await std::move(call);
  } catch (...) {
    error = std::current_exception();
  }
  if (!error) co_return;
  state_.fail(error);
  std::rethrow_exception(error);
}

}  // namespace ziggurat

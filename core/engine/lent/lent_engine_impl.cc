// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/lent_engine_impl.cc: steps of a trainer that lends its parameters and gradients,
// and how it reads and writes the state of a parameter by name.
#include "core/engine/lent/lent_engine_impl.h"

#include <fmt/format.h>

#include <limits>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "core/engine/state/step_agreement.h"
#include "optimizer/state_values.h"

namespace ziggurat {

void LentEngineImpl::require_param(const char* call, ParamId param) const {
  const std::size_t count = state_.lent_count();
  if (param < count) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}(parameter {}): the model has {} parameters: give 0 to {}", call,
                          param, count, count - 1));
}

void LentEngineImpl::require_param_or_whole(const char* call, ParamId param) const {
  const std::size_t wholes = streamed_ ? streamed_->whole_count() : 0;
  if (param < state_.lent_count() + wholes) return;
  require_param(call, param);
}

/// Throws if `param` is frozen, because it has neither gradient nor state.
void LentEngineImpl::require_trained(const char* call, ParamId param) const {
  require_param(call, param);
  if (param < state_.stored_count()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}(parameter {} '{}'): the parameter is frozen, so it has no gradient and "
                  "no state",
                  call, param, state_.lent_param(param).name));
}

/// Throws unless `param` has `count` elements.
void LentEngineImpl::require_count(const char* call, ParamId param, std::uint64_t count) const {
  require_param(call, param);
  const std::uint64_t own = state_.lent_place(param).count;
  if (count == own) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}(parameter {} '{}'): {} elements were given, but the parameter has {}",
                          call, param, state_.lent_param(param).name, count, own));
}

void LentEngineImpl::begin_generation(std::uint64_t generation) {
  if (streamed_) streamed_->begin_generation(generation);
}

Task<> LentEngineImpl::end_loads() {
  if (!streamed_) co_return;
  try {
    co_await streamed_->quiesce();
  } catch (const std::exception& error) {
    log().debug("while an engine is closed: {}", error.what());
  }
}

void LentEngineImpl::destroy_parts() {
  if (streamed_) streamed_->close();
  sums_.reset();
}

void LentEngineImpl::lend_param(ParamId param, TypedSpan<std::byte> values) {
  const Turn turn(turn_);
  require_count("lend_param", param, values.count());
  if (state_.lent_param(param).streamed) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("lend_param('{}'): the engine keeps this parameter: write it while "
                            "its unit is acquired",
                            state_.lent_param(param).name));
  }
  const UnitId unit = state_.lent_place(param).unit;
  if (const DType dtype = state_.table().dtype(unit); values.dtype != dtype) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("lend_param('{}'): the parameter is {}, but the memory is {}",
                    state_.lent_param(param).name, to_string(dtype), to_string(values.dtype)));
  }
  run([](LentEngineImpl& self, UnitId in, ParamId of, auto lent) -> Task<> {
    co_await self.state_.gates().wait(in);
    // Another rank may read the state of a parameter that has no record yet.
    LentMemory& memory = self.state_.context().lent;
    co_await memory.idle();
    memory.lend(of, lent);
  }(*this, unit, param, values));
}

void LentEngineImpl::check() {
  if (!state_.has_ended()) return;
  const Turn turn(turn_);
  run([](TrainingState& state) -> Task<> {
    state.check();
    co_return;
  }(state_));
}

void LentEngineImpl::expect_gradients() {
  const Turn turn(turn_);
  run(gradients_expected());
}

Task<> LentEngineImpl::gradients_expected() {
  state_.check();
  state_.sweep().gradient_started(0, state_.generation() + 1, nullptr);
  co_return;
}

void LentEngineImpl::wait_updated(ParamId param) {
  const Turn turn(turn_);
  run(param_updated(param));
}

Task<> LentEngineImpl::param_updated(ParamId param) {
  require_param("wait", param);
  state_.check();
  co_await state_.gates().wait(state_.lent_place(param).unit);
}

void LentEngineImpl::wait_all_updated() {
  const Turn turn(turn_);
  run(all_updated());
}

Task<> LentEngineImpl::all_updated() {
  state_.check();
  co_await state_.gates().wait_all();
}

StepResult LentEngineImpl::step(std::span<const TypedSpan<const std::byte>> gradients,
                                const StepOptions& options) {
  const Turn turn(turn_);
  return run(finish_step(gradients, options));
}

void LentEngineImpl::refuse_step(const Error& why) {
  const Turn turn(turn_);
  run([](LentEngineImpl& self, const Error& its) -> Task<> {
    self.state_.check();
    co_await self.agree({.blob = {}}, its);
  }(*this, why));
}

/// Returns why this rank will not make the step; none if it will.
std::optional<Error> LentEngineImpl::refusal_of(
    std::span<const TypedSpan<const std::byte>> gradients, const StepOptions& options) const {
  if (gradients.size() != state_.lent_count()) {
    return Error(ErrorCode::kInvalidArgument,
                 fmt::format("{} gradients were given for {} parameters: give one for each",
                             gradients.size(), state_.lent_count()));
  }
  try {
    state_.require_blob_given("step()");
    for (ParamId p = 0; p < gradients.size(); ++p) {
      if (gradients[p].bytes.empty()) continue;
      require_trained("step", p);
      require_count("step", p, gradients[p].count());
      if (!sums_ || !sums_->has(p)) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("step(parameter {} '{}'): the parameter has a gradient and a sum of "
                              "gradients: give one of them",
                              p, state_.lent_param(p).name));
    }
  } catch (const Error& error) {
    return error;
  }
  if (state_.stored_count() == 0)
    return Error(ErrorCode::kInvalidArgument, "step(): every parameter is frozen");
  if (state_.config().counts_steps && options.groups.empty())
    return Error(ErrorCode::kInvalidArgument,
                 "step(): no groups were given, but the engine counts the steps of each parameter: "
                 "give the settings of each in StepOptions::groups");
  if (const std::optional<Error> refusal = state_.refusal_of(options)) return refusal;
  if (streamed_) {
    if (const std::optional<Error> refusal = streamed_->refusal_of_step()) return refusal;
  }
  const ChunkTable& table = state_.table();
  bool some_left_out = false;
  for (ParamId p = 0; p < state_.stored_count(); ++p)
    some_left_out = some_left_out || !has_gradient(gradients, p);
  const bool counted = table.rounding() && state_.config().counts_steps;
  const bool drawn = drawn_by(table.state().format, state_.rounding()).param;
  if (!some_left_out || !drawn || counted || holds_param(table.state().format)) return std::nullopt;
  return Error(
      ErrorCode::kUnimplemented,
      "some parameters have no gradient in this step, but parameters are rounded stochastically "
      "and nobody counts their steps. The store would round them differently when it is opened "
      "again: make a new store, or choose `param_rounding=nearest`");
}

/// Agrees with the other ranks on the step: either all make it, or none does and each throws.
/// Returns whether the step is to be stored, which rank 0 decides. Without a verdict the engine has
/// ended.
Task<bool> LentEngineImpl::agree(const StepOptions& options, const std::optional<Error>& refusal) {
  state_.require_all_open("step()");
  // Each trainer decides groups and gradients for its own parameters, so nothing follows the facts.
  std::vector<StepFacts> all(static_cast<std::size_t>(state_.runtime().ranks->world_size()));
  StepVerdict verdict;
  std::exception_ptr lost;
  try {
    const TrainingState::Agreeing now(state_);
    Task<StepVerdict> agreeing =
        state_.agree(state_.facts(options), refusal, std::as_writable_bytes(std::span(all)));
    verdict = co_await std::move(agreeing);
  } catch (...) {
    lost = std::current_exception();
  }
  if (lost) {
    state_.fail(lost);
    std::rethrow_exception(lost);
  }
  if (verdict.refused) throw not_made(state_.generation() + 1, *verdict.refused);
  co_return verdict.checkpoint;
}

/// Makes a step. No update starts before the trainers of all ranks have agreed to the step, so none
/// is ever undone.
Task<StepResult> LentEngineImpl::finish_step(std::span<const TypedSpan<const std::byte>> gradients,
                                             const StepOptions& given) {
  state_.check();
  const CountedStep counted = counted_step(gradients, given);
  const StepOptions& options = counted.options;
  std::optional<Error> refusal = refusal_of(gradients, options);
  try {
    if (sums_ && !refusal) co_await sums_->settle();
  } catch (const Error& error) {
    refusal = error;
  }
  const bool checkpoint = co_await agree(options, refusal);
  state_.begin_call();
  // The gradients of the previous step are in use until all units are updated.
  co_await state_.gates().wait_all();
  co_await state_.checkpoint_ended();
  if (streamed_) {                                  // a copy to the device reads the home
    Task<> settling = or_end(streamed_->settle());  // all ranks have agreed to the step
    co_await std::move(settling);
  }
  const ChunkTable& table = state_.table();
  std::vector<bool> present;
  for (ParamId p = 0; p < gradients.size(); ++p) {
    present.push_back(has_gradient(gradients, p));
    state_.context().lent.lend_gradient(p, gradients[p]);
  }
  if (sums_) sums_->take();
  state_.sweep().gradient_started(0, state_.generation() + 1, nullptr);
  for (ChunkId id = 0; id < table.chunks().size(); ++id) grads_->arrived(id).set();
  const auto grad_scale = static_cast<float>(1.0 / state_.gradient_divisor(options));
  const StepScalars steps = state_.scalars(options, grad_scale);
  take_counts(present, counted.steps);
  state_.end_step(steps, options.blob, options.blob_follows, checkpoint);
  if (options.update_at_once) co_await updated_from_memory();
  co_return StepResult{.generation = state_.generation(),
                       .grad_norm = std::numeric_limits<double>::quiet_NaN()};
}

/// Returns when all units whose records are in memory are updated.
Task<> LentEngineImpl::updated_from_memory() {
  const ChunkTable& table = state_.table();
  const auto in_memory = [&](UnitId u) {
    const UnitChunks& chunks = table.unit(u);
    const ChunkId last = chunks.first_chunk + chunks.chunk_count - 1;
    return state_.records().stays(chunks.first_chunk) && state_.records().stays(last);
  };
  for (UnitId u = 0; u < table.unit_count(); ++u)
    if (in_memory(u)) co_await state_.gates().wait(u);
}

std::vector<std::string> LentEngineImpl::state_names() const {
  return ziggurat::state_names(state_.table().state().optimizer);
}

std::size_t LentEngineImpl::require_state(const char* call, ParamId param, std::string_view name,
                                          std::uint64_t count) const {
  require_trained(call, param);
  require_count(call, param, count);
  return state_.state_index(call, state_.lent_param(param).name, name);
}

void LentEngineImpl::read_state(ParamId param, std::string_view name, std::span<float> values) {
  const Turn turn(turn_);
  run(state_.read_state(param, require_state("read_state", param, name, values.size()), values));
}

void LentEngineImpl::write_state(ParamId param, std::string_view name,
                                 std::span<const float> values) {
  const Turn turn(turn_);
  run(state_.write_state(param, require_state("write_state", param, name, values.size()), values));
}

std::shared_ptr<StateCopy> LentEngineImpl::begin_copy(const CopyOptions& options) {
  const Turn turn(turn_);
  return run(state_.begin_copy(options));
}

std::vector<LentEngine::Piece> LentEngineImpl::pieces_of(int rank) const {
  const Turn turn(turn_);
  return state_.known_pieces(rank).all;
}

void LentEngineImpl::read_state_of(int rank, std::string_view piece, std::string_view name,
                                   std::span<float> values) {
  const Turn turn(turn_);
  const TrainingState::Pieces& pieces = state_.known_pieces(rank);
  const auto found = pieces.places.find(piece);
  if (found == pieces.places.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("read_state_of(rank {}, '{}'): the rank has no piece of that name",
                            rank, piece));
  }
  const std::size_t index = found->second;
  const std::uint64_t count = pieces.all[index].count;
  if (values.size() != count) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "read_state_of(rank {}, '{}'): {} elements were asked for, but the piece has {}", rank,
            piece, values.size(), count));
  }
  const std::size_t state = state_.state_index("read_state_of", piece, name);
  if (rank == state_.runtime().ranks->rank())
    return run(state_.read_state(static_cast<ParamId>(index), state, values));
  run(state_.read_state_of(rank, index, state, values));
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_save.cc: writes engines' arrays, and what else an embedder saves, to a
// checkpoint's sink.
#include "integrations/c/embedded_save.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <utility>

#include "aio/blocking_calls.h"
#include "base/error.h"
#include "base/log.h"
#include "collectives/self_communicator.h"
#include "core/checkpoint/save_ranks.h"
#include "integrations/c/wrong.h"
#include "tiers/store/quorum.h"

namespace ziggurat {
namespace {

/// Most elements that are written at once.
constexpr std::uint64_t kWrittenAtOnce = std::uint64_t{1} << 20;

/// Turns `values` of an array of `type`, which came as fp32, back into that type. The result lies
/// at the beginning of `values`.
void narrow_exactly(TensorType type, std::span<float> values) {
  if (type != TensorType::kBF16) return;
  const std::span<std::byte> bytes = std::as_writable_bytes(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto high = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(values[i]) >> 16);
    std::memcpy(&bytes[i * sizeof(high)], &high, sizeof(high));
  }
}

/// Returns true if an engine has only a part of some parameter.
bool has_parts(const EmbeddedSave& save) {
  return std::ranges::any_of(save.engines, [](const EmbeddedSave::Engine& engine) {
    return std::ranges::any_of(engine.parts, [](const EmbeddedSave::Part& its) {
      return !its.part.boxes.empty() && !its.part.is_whole();
    });
  });
}

std::string text_of(const std::optional<Roundings>& rounding) {
  if (!rounding) return "no recorded rounding";
  return fmt::format("`state_rounding={}` and `param_rounding={}`", to_string(rounding->state),
                     to_string(rounding->params));
}

}  // namespace

EmbeddedSaving::EmbeddedSaving(Runtime& runtime, EmbeddedSave save, Beside beside)
    : runtime_(runtime),
      save_(std::move(save)),
      beside_(beside),
      widens_(save_.widened || runtime.ranks->world_size() > 1 || has_parts(save_)),
      kind_(save_.engines.at(0).engine->lent().copied_state(widens_)),
      tensors_(save_.params, kind_),
      target_(runtime.reactor,
              beside == Beside::kSteps ? std::optional(save_.stall_max_s) : std::nullopt),
      writes_(runtime.reactor) {
  if (beside == Beside::kSteps && !save_.others.empty())
    throw wrong("content: \"others\" cannot be saved beside steps: wait for this save");
  try {
    pin_state();
  } catch (...) {
    refused_ = std::current_exception();
  }
  runtime_.reactor.block_on(start());
}

/// Starts the save on the reactor. Its communicator is made here, so that all ranks make theirs in
/// the same order.
Task<> EmbeddedSaving::start() {
  begun_.emplace(runtime_.reactor);
  others_.emplace(runtime_.reactor);
  if (save_.others.empty()) others_->set();
  try {
    std::vector<int> everyone(static_cast<std::size_t>(runtime_.ranks->world_size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    if (save_.alone) {
      ranks_ = std::make_unique<SelfCommunicator>();
    } else {
      ranks_ = runtime_.ranks->split(everyone);
    }
  } catch (...) {
    for (const std::shared_ptr<StateCopy>& its : copies_) its->end();
    throw;
  }
  runtime_.reactor.spawn(save(), [](std::exception_ptr) {});
  co_return;
}

EmbeddedSaving::~EmbeddedSaving() {
  if (!under_way()) return;
  runtime_.reactor.block_on([](EmbeddedSaving& self) -> Task<> {
    while (self.under_way()) {
      Task<Nanoseconds> waiting = self.target_.ended_or_silent([] { return true; });
      co_await std::move(waiting);
    }
  }(*this));
}

/// Fixes what is saved: from here on the embedder may make steps.
void EmbeddedSaving::pin_state() {
  require_one_kind();
  request_.folder = save_.folder;
  request_.retention = save_.retention;
  request_.content = content();
  const bool beside = beside_ == Beside::kSteps;
  for (const EmbeddedSave::Engine& its : save_.engines)
    copies_.push_back(its.engine->in_turn(
        [options = copy_options(*its.engine)](LentEngine& of) { return of.begin_copy(options); }));
  if (!beside) return;
  for (EmbeddedSave::Values& values : save_.values) {
    values_.emplace_back(values.memory.bytes.begin(), values.memory.bytes.end());
    values.memory.bytes = values_.back();
  }
}

/// Returns an engine's share of what the save may cost, by its elements.
CopyOptions EmbeddedSaving::copy_options(const EmbeddedEngine& engine) const {
  if (beside_ == Beside::kNothing) return {.widen_codes = widens_};
  const auto elements = [](const EmbeddedEngine& of) {
    std::uint64_t all = 0;
    for (std::size_t p = 0; p < of.trained_count(); ++p) all += of.count_of(p);
    return static_cast<double>(all);
  };
  double all = 0;
  for (const EmbeddedSave::Engine& its : save_.engines) all += elements(*its.engine);
  const double share = all > 0 ? elements(engine) / all : 0;  // all may be frozen
  const auto part_of = [&](std::uint64_t whole) {
    return static_cast<std::uint64_t>(static_cast<double>(whole) * share);
  };
  const std::uint64_t bandwidth = save_.bandwidth_bytes_per_s;
  return {
      .widen_codes = widens_,
      .stall_max_s = save_.stall_max_s / static_cast<double>(save_.engines.size()),
      .bandwidth_bytes_per_s = bandwidth == 0 ? 0 : std::max<std::uint64_t>(part_of(bandwidth), 1),
      .spare_bytes = part_of(save_.spare_bytes)};
}

StateContent EmbeddedSaving::content() const {
  StateContent its = save_.content;
  its.state = kind_;
  its.rounding = save_.engines.front().engine->lent().rounding();
  its.tensors = tensors_.all();
  for (const EmbeddedSave::Param& param : save_.params)
    if (param.trained) its.units.push_back({.name = param.name, .params = {param.name}});
  its.layout.ranks = its.layout.shard_group = save_.alone ? 1 : runtime_.ranks->world_size();
  its.versions = {{"manifest", fmt::format("{}", Manifest::kSchema)}};
  its.line = save_.engines.front().engine->lent().line();
  return its;
}

ShardPlan EmbeddedSaving::plan() const {
  std::vector<TensorBoxes> boxes;
  const auto add = [&](const EmbeddedSave::Part& its, std::size_t arrays) {
    for (std::size_t a = 0; a < arrays && !its.part.boxes.empty(); ++a) {
      const std::uint32_t tensor = tensors_.of(its.param, a);
      const bool scale = tensors_.is_scale(a);
      boxes.push_back(
          {.tensor = tensor,
           .boxes = scale ? std::vector{whole_box(tensors_.all()[tensor].shape)} : its.part.boxes});
    }
  };
  for (const EmbeddedSave::Engine& engine : save_.engines)
    for (const EmbeddedSave::Part& part : engine.parts) add(part, tensors_.arrays(part.param));
  for (const EmbeddedSave::Other& other : save_.others)
    add(other.part, tensors_.arrays(other.part.param));
  for (const EmbeddedSave::Values& values : save_.values) add(values.part, 1);
  const Communicator& ranks = *ranks_;
  return plan_boxes(tensors_.all(), boxes, {.rank = ranks.rank(), .ranks = ranks.world_size()});
}

/// Requires that the engines of one checkpoint have one kind of state.
void EmbeddedSaving::require_one_kind() const {
  for (std::size_t e = 1; e < save_.engines.size(); ++e) {
    const StateKind its = save_.engines[e].engine->lent().copied_state(widens_);
    if (its != kind_) {
      throw wrong(fmt::format(
          "options.engines: the state of engine {} is {}, but that of engine 0 is {}; a "
          "checkpoint has one `optimizer` and one `state_format`: save the engines apart",
          e, to_string(its), to_string(kind_)));
    }
    const std::optional<Roundings> rounding = save_.engines[e].engine->lent().rounding();
    const std::optional<Roundings> first = save_.engines[0].engine->lent().rounding();
    if (rounding == first) continue;
    throw wrong(
        fmt::format("options.engines: engine {} has {}, but engine 0 has {}; a checkpoint has "
                    "one `state_rounding` and one `param_rounding`: save the engines apart",
                    e, text_of(rounding), text_of(first)));
  }
}

/// The whole save, on the reactor.
Task<> EmbeddedSaving::save() {
  try {
    co_await begin();
    target_.copying(true);
    co_await copy();
  } catch (...) {
    failure_ = std::current_exception();
  }
  target_.copying(false);
  begun_->set();
  for (const std::shared_ptr<StateCopy>& its : copies_) its->end();
  if (checkpoint_) co_await end_checkpoint();
  checkpoint_.reset();
  io_.reset();
  ranks_.reset();
  target_.end();
  under_way_ = false;  // the last access: who sees it may destroy this object
}

/// Makes or removes the checkpoint, on all ranks alike.
Task<> EmbeddedSaving::end_checkpoint() {
  if (!failure_) failure_ = given_up_;
  try {
    // Others may have more to write: that this rank waits for them says nothing of its target.
    SaveRanks ranks(runtime_.reactor, *ranks_);
    co_await ranks.agree(failure_, checkpoint_->directory());
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  try {
    const SaveTarget::Asked asked(target_);
    if (failure_) {
      while (writes_.count() > 0) co_await writes_.wait_idle();  // maybe for ever
      co_await checkpoint_->remove_all();
    } else {
      committing_ = true;
      co_await checkpoint_->commit({});
      directory_ = checkpoint_->directory();
    }
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  notes_ = checkpoint_->notes();
}

/// Begins the save on all ranks, or on none if one of them cannot even reach the folder.
Task<> EmbeddedSaving::begin() {
  const SaveTarget::Asked asked(target_);
  std::exception_ptr error = refused_;
  try {
    if (!error) request_.plan = plan();
    const std::function<void()> make = [&] { std::filesystem::create_directories(save_.folder); };
    if (!error) co_await BlockingCalls(caller_).run(runtime_.reactor, make);
    if (!error) io_ = runtime_.io_engine(runtime_.reactor, save_.folder);
  } catch (const std::filesystem::filesystem_error& failed) {
    error = std::make_exception_ptr(system_error(
        failed.code().value(), fmt::format("cannot make the folder {}", save_.folder)));
  } catch (...) {
    error = std::current_exception();
  }
  std::uint64_t failed = error ? 1 : 0;
  co_await ranks_->all_reduce(std::span(&failed, 1), Communicator::Op::kMax);
  if (error) std::rethrow_exception(error);
  if (failed != 0) {
    throw PeerFailed(
        ErrorCode::kUnavailable,
        fmt::format("another rank could not begin to save to {}: that rank's error says why",
                    save_.folder));
  }
  const CheckpointSave::Environment environment{.reactor = runtime_.reactor,
                                                .workers = *runtime_.workers,
                                                .io = *io_,
                                                .ranks = *ranks_,
                                                .observers = {.metrics = &target_.moved()},
                                                .calls = BlockingCalls(caller_)};
  Task<std::unique_ptr<CheckpointSave>> beginning =
      CheckpointSave::begin(environment, std::move(request_));
  checkpoint_ = co_await std::move(beginning);
}

Task<> EmbeddedSaving::copy() {
  writable_ = true;
  begun_->set();
  std::exception_ptr failure;
  try {
    WorkGroup engines(runtime_.reactor);
    for (std::size_t e = 0; e < copies_.size(); ++e) engines.spawn(copy_engine(e));
    co_await engines.wait_idle();
    for (const EmbeddedSave::Values& values : save_.values)
      co_await copy_array(values.part, 0, values.memory.bytes);
  } catch (...) {
    failure = std::current_exception();
    failed_ = true;
  }
  // The trainer's thread may be writing what other ranks have, whatever has failed here.
  try {
    co_await others_->wait();
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  writable_ = false;
  if (failure) std::rethrow_exception(failure);
}

Task<> EmbeddedSaving::copy_engine(std::size_t engine) {
  const StateCopy::Take take = [this, engine](ParamId param, std::size_t array, std::uint64_t first,
                                              std::shared_ptr<const AlignedBytes> values) {
    return write(save_.engines[engine].parts[param], array, first, std::move(values));
  };
  const StateCopy::Lead lead = [this, engine](ParamId param, std::size_t array,
                                              std::uint64_t first) {
    return lead_bytes(save_.engines[engine].parts[param], array, first);
  };
  std::exception_ptr failure;
  try {
    co_await copies_[engine]->run(take, lead);
  } catch (...) {
    failure = std::current_exception();
  }
  if (!failure) co_return;
  for (const std::shared_ptr<StateCopy>& its : copies_) its->give_up(failure);
  std::rethrow_exception(failure);
}

/// Returns where memory for values should begin (StateSink::lead_bytes()).
std::uint64_t EmbeddedSaving::lead_bytes(const EmbeddedSave::Part& part, std::size_t array,
                                         std::uint64_t first) const {
  if (part.part.boxes.empty()) return 0;
  if (!tensors_.is_scale(array))
    first = whole_runs(part.part, {.first = first, .count = 1, .at = 0}).front().first;
  return checkpoint_->sink().lead_bytes(tensors_.of(part.param, array), first);
}

/// Writes values, or returns with an error when the save is given up: then the target may hang, and
/// only this object waits for it.
Task<> EmbeddedSaving::write(const EmbeddedSave::Part& part, std::size_t array, std::uint64_t first,
                             std::shared_ptr<const AlignedBytes> values) {
  if (given_up_) std::rethrow_exception(given_up_);
  if (part.part.boxes.empty()) co_return;
  const auto written = std::make_shared<Signal>(runtime_.reactor);
  waiting_.insert(written);
  writes_.spawn(write_now(part, array, first, std::move(values), written));
  std::exception_ptr failure;
  try {
    co_await written->wait();
  } catch (...) {
    failure = std::current_exception();
  }
  waiting_.erase(written);
  if (failure) std::rethrow_exception(failure);
}

Task<> EmbeddedSaving::write_now(const EmbeddedSave::Part& part, std::size_t array,
                                 std::uint64_t first, std::shared_ptr<const AlignedBytes> values,
                                 std::shared_ptr<Signal> written) {
  const std::uint32_t tensor = tensors_.of(part.param, array);
  const std::span<const std::byte> bytes = values->span();
  const TensorRun run{
      .first = first, .count = bytes.size() / size_bytes(tensors_.all()[tensor].type), .at = 0};
  std::vector<TensorRun> runs{run};
  if (!tensors_.is_scale(array)) runs = whole_runs(part.part, run);
  try {
    const SaveTarget::Asked asked(target_);
    co_await checkpoint_->sink().write(tensor, runs, bytes);
  } catch (...) {
    written->fail(std::current_exception());
    co_return;
  }
  written->set();
}

/// Copies what another rank's engine has, one array at a time, so that only one is in memory.
void EmbeddedSaving::copy_other(const EmbeddedSave::Other& its) {
  EmbeddedEngine& engine = *save_.engines[its.engine].engine;
  std::vector<float> values(its.part.part.count());
  for (std::size_t a = 0; a < tensors_.arrays(its.part.param); ++a) {
    engine.in_turn(
        [&](LentEngine& of) { of.read_state_of(its.rank, its.name, tensors_.array(a), values); });
    const std::uint32_t tensor = tensors_.of(its.part.param, a);
    narrow_exactly(tensors_.all()[tensor].type, values);
    runtime_.reactor.block_on(copy_array(its.part, a, std::as_bytes(std::span(values))));
  }
}

Task<> EmbeddedSaving::copy_array(const EmbeddedSave::Part& part, std::size_t array,
                                  std::span<const std::byte> values) {
  const std::size_t element = size_bytes(tensors_.all()[tensors_.of(part.param, array)].type);
  const std::uint64_t all = part.part.count();
  for (std::uint64_t first = 0; first < all; first += kWrittenAtOnce) {
    const std::uint64_t count = std::min(kWrittenAtOnce, all - first);
    auto copied =
        std::make_shared<const AlignedBytes>(count * element, lead_bytes(part, array, first));
    std::memcpy(copied->span().data(), &values[first * element], count * element);
    co_await write(part, array, first, std::move(copied));
  }
}

/// Copies what the engines of other ranks have, on the trainer's thread.
void EmbeddedSaving::copy_others() {
  runtime_.reactor.block_on(
      [](EmbeddedSaving& self) -> Task<> { co_await self.begun_->wait(); }(*this));
  std::exception_ptr failure;
  try {
    for (const EmbeddedSave::Other& other : save_.others) {
      if (writable_ && !failed_) copy_other(other);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  runtime_.reactor.block_on(others_copied(failure));
}

Task<> EmbeddedSaving::others_copied(std::exception_ptr failure) {
  if (failure) {
    others_->fail(std::move(failure));
  } else {
    others_->set();
  }
  co_return;
}

bool EmbeddedSaving::waits_for_time() const {
  return std::ranges::any_of(copies_, [](const auto& its) { return its->waits_for_time(); });
}

std::string EmbeddedSaving::end() {
  const std::lock_guard lock(ending_);
  if (!save_.others.empty() && !std::exchange(others_asked_, true)) copy_others();
  runtime_.reactor.block_on(ended_or_given_up());
  if (!std::exchange(said_, true)) {
    for (const std::string& note : notes_) log().warn("{}", note);
  }
  if (failure_) std::rethrow_exception(failure_);
  return directory_;
}

Task<> EmbeddedSaving::ended_or_given_up() {
  if (given_up_ && under_way()) std::rethrow_exception(given_up_);
  Task<Nanoseconds> waiting = target_.ended_or_silent([this] { return waits_for_time(); });
  const Nanoseconds silent = co_await std::move(waiting);
  if (silent == Nanoseconds{0}) co_return;
  hangs_ = true;
  if (!given_up_) {
    Error why = target_.not_answered(silent);
    if (committing_) {
      why =
          Error(why.code(), fmt::format("{}. The checkpoint was being completed, and may still be "
                                        "there when the drive answers",
                                        why.what()));
    }
    given_up_ = std::make_exception_ptr(why);
    for (const std::shared_ptr<StateCopy>& its : copies_) its->give_up(given_up_);
    for (const std::shared_ptr<Signal>& its : std::exchange(waiting_, {})) its->fail(given_up_);
  }
  std::rethrow_exception(given_up_);
}

}  // namespace ziggurat

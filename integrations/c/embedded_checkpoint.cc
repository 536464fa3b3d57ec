// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_checkpoint.cc: writes engines' arrays to a save's sink, and reads values
// into the embedder's memory.
#include "integrations/c/embedded_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "aio/aligned_bytes.h"
#include "aio/blocking_calls.h"
#include "base/error.h"
#include "base/log.h"
#include "collectives/self_communicator.h"
#include "core/checkpoint/tensor_values.h"
#include "integrations/c/wrong.h"
#include "optimizer/state_arrays.h"
#include "tiers/quorum.h"

namespace ziggurat {
namespace {

/// Most elements that are written or read at once.
constexpr std::uint64_t kElementsAtOnce = std::uint64_t{1} << 20;

/// Tensors of a save, by parameter and array.
class Tensors {
 public:
  Tensors(const std::vector<EmbeddedSave::Param>& params, const StateKind& kind)
      : arrays_(state_arrays(kind)), of_(params.size()) {
    for (std::size_t p = 0; p < params.size(); ++p) add(p, params[p]);
  }
  const std::vector<StateTensor>& all() const noexcept { return all_; }
  std::size_t arrays(std::size_t param) const { return of_[param].size(); }
  std::uint32_t of(std::size_t param, std::size_t array) const { return of_[param].at(array); }
  bool is_scale(std::size_t array) const { return arrays_[array].is_scale(); }
  const std::string& array(std::size_t index) const { return arrays_[index].name; }

 private:
  void add(std::size_t p, const EmbeddedSave::Param& param) {
    const std::size_t count = param.trained ? arrays_.size() : std::size_t{1};
    for (std::size_t a = 0; a < count; ++a) {
      const StateArray& array = arrays_[a];
      StateTensor tensor{.name = a == 0 ? param.name : state_tensor_name(array.name, param.name),
                         .owner = param.name,
                         .array = array.name,
                         .type = type_of(array),
                         .shape = param.shape};
      if (!param.trained) tensor.type = param.type;
      if (array.is_scale()) {
        const std::uint64_t blocks = (tensor.count() + array.block - 1) / array.block;
        tensor.shape = {static_cast<std::int64_t>(blocks)};
      }
      of_[p].push_back(static_cast<std::uint32_t>(all_.size()));
      all_.push_back(std::move(tensor));
    }
  }
  static TensorType type_of(const StateArray& array) {
    switch (array.element) {
      case StateElement::kBF16: return TensorType::kBF16;
      case StateElement::kCode: return TensorType::kU8;
      case StateElement::kF32: break;
    }
    return TensorType::kF32;
  }

  std::vector<StateArray> arrays_;
  std::vector<StateTensor> all_;
  std::vector<std::vector<std::uint32_t>> of_;
};

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

class Saving {
 public:
  Saving(Runtime& runtime, EmbeddedSave save)
      : runtime_(runtime),
        save_(std::move(save)),
        widens_(save_.widened || runtime.ranks->world_size() > 1 || has_parts(save_)),
        kind_(save_.engines.at(0).engine->copied_state(widens_)),
        tensors_(save_.params, kind_) {}
  ~Saving() {
    runtime_.reactor.block_on([](Saving& self) -> Task<> {
      self.checkpoint_.reset();
      self.io_.reset();
      self.ranks_.reset();
      co_return;
    }(*this));
  }
  Saving(const Saving&) = delete;
  Saving& operator=(const Saving&) = delete;

  void run() {
    runtime_.reactor.block_on(begin());
    std::exception_ptr failure;
    try {
      for (const EmbeddedSave::Engine& engine : save_.engines) copy_engine(engine);
      for (const EmbeddedSave::Other& other : save_.others) copy_other(other);
      for (const EmbeddedSave::Values& values : save_.values)
        runtime_.reactor.block_on(copy_array(values.part, 0, values.memory.bytes));
    } catch (...) {
      failure = std::current_exception();
    }
    try {
      runtime_.reactor.block_on(checkpoint_->commit(failure));
    } catch (...) {
      failure = std::current_exception();
    }
    for (const std::string& note : checkpoint_->notes()) log().warn("{}", note);
    if (failure) std::rethrow_exception(failure);
  }

 private:
  StateContent content() const {
    StateContent its = save_.content;
    its.state = kind_;
    its.rounding = save_.engines.front().engine->rounding();
    its.tensors = tensors_.all();
    for (const EmbeddedSave::Param& param : save_.params)
      if (param.trained) its.units.push_back({.name = param.name, .params = {param.name}});
    its.layout.ranks = its.layout.shard_group = save_.alone ? 1 : runtime_.ranks->world_size();
    its.versions = {{"manifest", fmt::format("{}", Manifest::kSchema)}};
    its.line = save_.engines.front().engine->line();
    return its;
  }

  ShardPlan plan() const {
    std::vector<TensorBoxes> boxes;
    const auto add = [&](const EmbeddedSave::Part& its, std::size_t arrays) {
      for (std::size_t a = 0; a < arrays && !its.part.boxes.empty(); ++a) {
        const std::uint32_t tensor = tensors_.of(its.param, a);
        const bool scale = tensors_.is_scale(a);
        boxes.push_back({.tensor = tensor,
                         .boxes = scale ? std::vector{whole_box(tensors_.all()[tensor].shape)}
                                        : its.part.boxes});
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
  void require_one_kind() const {
    for (std::size_t e = 1; e < save_.engines.size(); ++e) {
      const StateKind its = save_.engines[e].engine->copied_state(widens_);
      if (its != kind_) {
        throw wrong(fmt::format(
            "options.engines: the state of engine {} is {}, but that of engine 0 is {}; a "
            "checkpoint has one `optimizer` and one `state_format`: save the engines apart",
            e, to_string(its), to_string(kind_)));
      }
      const std::optional<Roundings> rounding = save_.engines[e].engine->rounding();
      const std::optional<Roundings> first = save_.engines[0].engine->rounding();
      if (rounding == first) continue;
      throw wrong(
          fmt::format("options.engines: engine {} has {}, but engine 0 has {}; a checkpoint has "
                      "one `state_rounding` and one `param_rounding`: save the engines apart",
                      e, text_of(rounding), text_of(first)));
    }
  }

  /// Begins the save on all ranks, or on none if one of them cannot even reach the folder.
  Task<> begin() {
    std::vector<int> everyone(static_cast<std::size_t>(runtime_.ranks->world_size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    if (save_.alone) {
      ranks_ = std::make_unique<SelfCommunicator>();
    } else {
      ranks_ = runtime_.ranks->split(everyone);
    }
    std::exception_ptr error;
    CheckpointSave::Request request;
    try {
      require_one_kind();
      request.folder = save_.folder;
      request.retention = save_.retention;
      request.content = content();
      request.plan = plan();
      const std::function<void()> make = [&] { std::filesystem::create_directories(save_.folder); };
      co_await BlockingCalls(caller_).run(runtime_.reactor, make);
      io_ = runtime_.io_engine(runtime_.reactor, save_.folder);
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
                                                  .calls = BlockingCalls(caller_)};
    Task<std::unique_ptr<CheckpointSave>> beginning =
        CheckpointSave::begin(environment, std::move(request));
    checkpoint_ = co_await std::move(beginning);
  }

  void copy_engine(const EmbeddedSave::Engine& engine) {
    const LentEngine::TakeArray take = [&](ParamId param, std::size_t array, std::uint64_t first,
                                           std::span<const std::byte> values) {
      return write(engine.parts[param], array, first, values);
    };
    engine.engine->copy_state(widens_, take);
  }

  Task<> write(const EmbeddedSave::Part& part, std::size_t array, std::uint64_t first,
               std::span<const std::byte> values) {
    if (part.part.boxes.empty()) co_return;
    const std::uint32_t tensor = tensors_.of(part.param, array);
    const TensorRun run{
        .first = first, .count = values.size() / size_bytes(tensors_.all()[tensor].type), .at = 0};
    std::vector<TensorRun> runs{run};
    if (!tensors_.is_scale(array)) runs = whole_runs(part.part, run);
    co_await checkpoint_->sink().write(tensor, runs, values);
  }

  /// Copies what another rank's engine has, one array at a time, so that only one is in memory.
  void copy_other(const EmbeddedSave::Other& its) {
    EmbeddedEngine& engine = *save_.engines[its.engine].engine;
    std::vector<float> values(its.part.part.count());
    for (std::size_t a = 0; a < tensors_.arrays(its.part.param); ++a) {
      engine.read_state_of(its.rank, its.name, tensors_.array(a), values);
      const std::uint32_t tensor = tensors_.of(its.part.param, a);
      narrow_exactly(tensors_.all()[tensor].type, values);
      runtime_.reactor.block_on(copy_array(its.part, a, std::as_bytes(std::span(values))));
    }
  }

  Task<> copy_array(const EmbeddedSave::Part& part, std::size_t array,
                    std::span<const std::byte> values) {
    const std::size_t element = size_bytes(tensors_.all()[tensors_.of(part.param, array)].type);
    const std::uint64_t all = part.part.count();
    for (std::uint64_t first = 0; first < all; first += kElementsAtOnce) {
      const std::uint64_t count = std::min(kElementsAtOnce, all - first);
      co_await write(part, array, first, values.subspan(first * element, count * element));
    }
  }

  Runtime& runtime_;
  EmbeddedSave save_;
  /// True if codes of 8 bits are saved as the values that they stand for, because their scales are
  /// for blocks of what an engine has, not of whole parameters. The same on all ranks.
  bool widens_;
  StateKind kind_;
  Tensors tensors_;
  /// Makes calls that name files, which may take minutes. If the reactor stood still meanwhile, the
  /// other ranks would think that this rank is gone.
  WorkerPool caller_{{.threads = 1, .cpus = {}}};
  std::unique_ptr<Communicator> ranks_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<CheckpointSave> checkpoint_;
};

}  // namespace

void save_checkpoint(Runtime& runtime, EmbeddedSave save) {
  Saving(runtime, std::move(save)).run();
}

EmbeddedCheckpoint::EmbeddedCheckpoint(Runtime& runtime, const std::string& path)
    : runtime_(runtime) {
  if (!std::filesystem::is_directory(path))
    throw wrong(
        fmt::format("the directory {} does not exist, so there is no checkpoint in it", path));
  runtime.reactor.block_on([](EmbeddedCheckpoint& self, const std::string& from) -> Task<> {
    std::exception_ptr error;
    try {
      self.io_ = self.runtime_.io_engine(self.runtime_.reactor, from);
      Task<std::string> finding =
          find_checkpoint({.reactor = self.runtime_.reactor, .io = *self.io_}, from);
      std::string found = co_await std::move(finding);
      Task<std::unique_ptr<CheckpointReader>> opening = CheckpointReader::open(
          {self.runtime_.reactor, *self.runtime_.workers, *self.io_}, std::move(found));
      self.reader_ = co_await std::move(opening);
      Task<bool> looking = ziggurat::is_newest_of_line(
          {.reactor = self.runtime_.reactor, .io = *self.io_}, self.reader_->place());
      self.is_newest_of_line_ = co_await std::move(looking);
    } catch (...) {
      error = std::current_exception();
    }
    if (!error) co_return;
    self.io_.reset();
    std::rethrow_exception(error);
  }(*this, path));
}

EmbeddedCheckpoint::~EmbeddedCheckpoint() {
  runtime_.reactor.block_on([](EmbeddedCheckpoint& self) -> Task<> {
    self.reader_.reset();
    self.io_.reset();
    co_return;
  }(*this));
}

std::string EmbeddedCheckpoint::description() const {
  using nlohmann::json;
  const StateContent& its = reader_->content();
  json tensors = json::array();
  for (const StateTensor& tensor : its.tensors)
    tensors.push_back(
        {tensor.name, tensor.owner, tensor.array, to_string(tensor.type), tensor.shape});
  json resume = json::object();
  for (const auto& [name, text] : its.resume) resume[name] = json::parse(text);
  json all{{"directory", reader_->place()}, {"step", its.step},     {"model", its.model},
           {"dtype", to_string(its.dtype)}, {"optimizer", nullptr}, {"resume", resume},
           {"blob_bytes", its.blob.size()}, {"tensors", tensors}};
  if (its.state) {
    all["optimizer"] = to_string(its.state->optimizer);
    all["state_format"] = to_string(its.state->format);
  }
  return all.dump();
}

void EmbeddedCheckpoint::read(std::size_t tensor, std::uint64_t first,
                              TypedSpan<std::byte> values) {
  const std::vector<StateTensor>& tensors = reader_->content().tensors;
  if (tensor >= tensors.size())
    throw wrong(fmt::format("there is no tensor {}, because {} has only {} tensors", tensor,
                            reader_->place(), tensors.size()));
  const StateTensor& its = tensors[tensor];
  if (first > its.count() || values.count() > its.count() - first) {
    throw wrong(fmt::format("elements {} to {} of '{}' were asked for, but the tensor has only {}",
                            first, first + values.count(), its.name, its.count()));
  }
  const bool same = dtype_of(its.type) == values.dtype;
  if (its.type == TensorType::kU8 || (!same && values.dtype != DType::kFloat32)) {
    throw wrong(
        fmt::format("'{}' has the type {}: read it in that type, or in fp32 unless it holds codes",
                    its.name, to_string(its.type)));
  }
  runtime_.reactor.block_on([](CheckpointReader& reader, std::size_t index, const StateTensor& of,
                               std::uint64_t from, TypedSpan<std::byte> into,
                               bool as_it_is) -> Task<> {
    AlignedPool memory;
    for (std::uint64_t at = 0; at < into.count(); at += kElementsAtOnce) {
      const std::uint64_t count = std::min(kElementsAtOnce, into.count() - at);
      const TensorRun run{.first = from + at, .count = count, .at = 0};
      const TypedSpan<std::byte> next = into.subspan(at, count);
      if (as_it_is) {
        co_await reader.read(index, std::span(&run, 1), next.bytes);
        continue;
      }
      const AlignedBytes bytes = memory.take(count * size_bytes(of.type));
      co_await reader.read(index, std::span(&run, 1), bytes.span());
      widen(of.type, bytes.span(), next.as<float>());
    }
  }(*reader_, tensor, its, first, values, same));
}

}  // namespace ziggurat

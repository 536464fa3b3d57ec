// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/piece_source.cc: finds names, shapes and runs of parts from those of whole
// tensors.
#include "core/checkpoint/piece_source.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "optimizer/eight_bit.h"

namespace ziggurat {
namespace {

constexpr std::string_view kMaster = "master";

bool is_scale(const StateTensor& tensor) { return tensor.array.ends_with(".scale"); }

}  // namespace

PieceSource::PieceSource(StateSource& whole, std::vector<Param> params, std::vector<std::byte> blob,
                         ReadOwn read_own)
    : whole_(whole), params_(std::move(params)), read_own_(std::move(read_own)) {
  const StateContent& its = whole.content();
  content_.model = its.model;
  content_.dtype = its.dtype;
  content_.state = its.state;
  content_.rounding = its.rounding;
  content_.step = its.step;
  content_.line = its.line;
  content_.blob = std::move(blob);
  add_units();
  std::map<std::string_view, std::vector<std::size_t>> by_owner;
  std::map<std::string_view, std::vector<std::size_t>> scales;
  for (std::size_t t = 0; t < its.tensors.size(); ++t)
    (is_scale(its.tensors[t]) ? scales : by_owner)[its.tensors[t].owner].push_back(t);
  for (std::size_t i = 0; i < params_.size(); ++i) add_param(i, by_owner[params_[i].part.name]);
  for (std::size_t i = 0; alone_ && i < params_.size(); ++i)
    add_scales_of(i, scales[params_[i].part.name]);
  if (!alone_) add_scales();
}

/// Scales have blocks of units, so units that are alike get the names that the reader has for them.
void PieceSource::add_units() {
  const std::vector<StateUnit>& units = whole_.content().units;
  const auto is_alone = [](const StateUnit& unit) {
    return unit.params.size() == 1 && unit.params[0] == unit.name;
  };
  alone_ = !units.empty() && std::ranges::all_of(units, is_alone);
  if (alone_) {
    for (const Param& param : params_)
      content_.units.push_back({.name = param.name, .params = {param.name}});
    return;
  }
  std::map<std::string, std::string> names;
  for (const Param& param : params_) names[param.part.name] = param.name;
  for (StateUnit unit : units) {
    const bool alone = is_alone(unit);
    for (std::string& name : unit.params)
      if (const auto found = names.find(name); found != names.end()) name = found->second;
    if (alone) unit.name = unit.params[0];
    content_.units.push_back(std::move(unit));
  }
}

/// Throws unless the source's tensor can be divided as the parameter's part is.
void PieceSource::require_shape(const Param& param, const StateTensor& its) const {
  if (its.shape != param.part.shape) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has '{}' with the shape [{}], but this model has it with [{}]",
                            whole_.place(), its.name, fmt::join(its.shape, ", "),
                            fmt::join(param.part.shape, ", ")));
  }
  if (its.type != TensorType::kU8 || param.part.is_whole()) return;
  const std::optional<std::uint64_t> begin = run_begin(param.part);
  const std::uint64_t count = param.part.count();
  const bool on_blocks = begin && *begin % kEightBitBlock == 0 &&
                         (count % kEightBitBlock == 0 || *begin + count == its.count());
  if (alone_ && on_blocks) return;
  throw Error(
      ErrorCode::kUnimplemented,
      fmt::format("{}: '{}' is in 8 bits, with scales for blocks of the whole parameter, but this "
                  "rank's part of it is cut within a block of {}: load the state on one rank, or "
                  "save it from several ranks",
                  whole_.place(), its.name, kEightBitBlock));
}

/// Adds a parameter; `of_source` are the source's tensors of it.
void PieceSource::add_param(std::size_t index, std::span<const std::size_t> of_source) {
  const Param& param = params_[index];
  bool has_master = false;
  for (const std::size_t t : of_source) {
    const StateTensor& its = whole_.content().tensors[t];
    require_shape(param, its);
    const bool master = its.array == kMaster;
    has_master = has_master || master;
    content_.tensors.push_back(
        {.name = master ? param.name : state_tensor_name(its.array, param.name),
         .owner = param.name,
         .array = its.array,
         .type = its.type,
         .shape = param.shape});
    from_.push_back({.tensor = t, .param = index});
  }
  if (has_master) return;
  content_.tensors.push_back({.name = param.name,
                              .owner = param.name,
                              .array = std::string(kMaster),
                              .type = TensorType::kF32,
                              .shape = param.shape});
  from_.push_back({.tensor = kOwn, .param = index});
}

void PieceSource::add_scales() {
  const StateContent& its = whole_.content();
  std::map<std::string, std::string> units;
  for (std::size_t u = 0; u < its.units.size(); ++u)
    units[its.units[u].name] = content_.units[u].name;
  for (std::size_t t = 0; t < its.tensors.size(); ++t) {
    if (!is_scale(its.tensors[t])) continue;
    StateTensor scale = its.tensors[t];
    if (const auto found = units.find(scale.owner); found != units.end())
      scale.owner = found->second;
    scale.name = state_tensor_name(scale.array, scale.owner);
    content_.tensors.push_back(std::move(scale));
    from_.push_back({.tensor = t});
  }
}

/// Adds the scales of a parameter that is a unit of the source.
void PieceSource::add_scales_of(std::size_t index, std::span<const std::size_t> of_source) {
  const Param& param = params_[index];
  const std::uint64_t blocks = (param.part.count() + kEightBitBlock - 1) / kEightBitBlock;
  for (const std::size_t t : of_source) {
    StateTensor scale = whole_.content().tensors[t];
    scale.owner = param.name;
    scale.name = state_tensor_name(scale.array, scale.owner);
    scale.shape = {static_cast<std::int64_t>(blocks)};
    content_.tensors.push_back(std::move(scale));
    from_.push_back(
        {.tensor = t, .first_block = run_begin(param.part).value_or(0) / kEightBitBlock});
  }
}

Task<> PieceSource::read(std::size_t tensor, std::span<const TensorRun> runs,
                         std::span<std::byte> array) {
  const From from = from_[tensor];
  if (from.param == kOwn) {
    std::vector<TensorRun> moved(runs.begin(), runs.end());
    for (TensorRun& run : moved) run.first += from.first_block;
    co_await whole_.read(from.tensor, moved, array);
    co_return;
  }
  if (from.tensor == kOwn) {
    for (const TensorRun& run : runs) {
      std::vector<float> values(run.count);
      read_own_(from.param, run.first, values);
      std::memcpy(array.data() + run.at * sizeof(float), values.data(),
                  values.size() * sizeof(float));
    }
    co_return;
  }
  std::vector<TensorRun> all;
  for (const TensorRun& run : runs) {
    const std::vector<TensorRun> its = whole_runs(params_[from.param].part, run);
    all.insert(all.end(), its.begin(), its.end());
  }
  co_await whole_.read(from.tensor, all, array);
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_loader.cc: which tensor of the source each array comes from, and how.
#include "core/checkpoint/state_loader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "core/checkpoint/tensor_values.h"
#include "core/sharding/tensor_part.h"
#include "optimizer/eight_bit.h"
#include "optimizer/state_format.h"
#include "optimizer/state_values.h"

namespace ziggurat {
namespace {

constexpr std::size_t kFreshShown = 8;  // names in a note

/// Returns the code of a moment.
EightBitCode code_of(OptimizerKind kind, const std::string& array) {
  const std::optional<std::size_t> index = find_state(kind, array);
  const bool sign = !index || *index == 0 || has_sign(kind, *index - 1);
  return sign ? EightBitCode::kSigned : EightBitCode::kUnsigned;
}

std::uint64_t last_value(std::span<const TensorRun> runs) {
  std::uint64_t end = 0;
  for (const TensorRun& run : runs) end = std::max(end, run.at + run.count);
  return end;
}

}  // namespace

StateLoader::StateLoader(Reactor& reactor, Workers& workers, const ChunkTable& table,
                         StateSource& source, LoadOptions options, float initial_accumulator)
    : reactor_(reactor),
      workers_(workers),
      table_(table),
      source_(source),
      options_(std::move(options)),
      initial_accumulator_(initial_accumulator),
      runs_(table),
      sources_(runs_.tensors().size(), -1),
      arrays_(runs_.arrays().size()) {
  require_optimizer();
  find_scales();
  match();
}

std::uint64_t StateLoader::step() const noexcept {
  return options_.weights_only ? 0 : source_.content().step;
}

void StateLoader::require_optimizer() const {
  const StateContent& content = source_.content();
  if (options_.weights_only) return;
  if (!content.state) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has weights but no optimizer state: load its weights alone, which "
                            "begins training at step 0",
                            source_.place()));
  }
  const OptimizerKind saved = content.state->optimizer;
  const OptimizerKind wanted = table_.state().optimizer;
  if (state_names(saved) == state_names(wanted)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the state in {} is of the optimizer {}, but this run's optimizer is {}: "
                          "give `optimizer={}`, or load its weights alone",
                          source_.place(), to_string(saved), to_string(wanted), to_string(saved)));
}

/// Returns true if blocks of scales begin at the same elements in the source and in this table.
bool StateLoader::units_alike() const {
  std::vector<StateUnit> there = source_.content().units;
  std::vector<StateUnit> here = runs_.units();
  std::ranges::sort(there, {}, &StateUnit::name);
  std::ranges::sort(here, {}, &StateUnit::name);
  return there == here;
}

StateLoader::ByName StateLoader::source_tensors() const {
  const std::vector<StateTensor>& tensors = source_.content().tensors;
  std::vector<bool> used(options_.renames.size());
  ByName found;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::string owner = tensors[i].owner;
    const bool of_unit = tensors[i].array.ends_with(".scale");
    for (std::size_t r = 0; !of_unit && r < options_.renames.size(); ++r) {
      const std::optional<std::string> renamed = options_.renames[r].of(owner);
      if (!renamed) continue;
      used[r] = true;
      owner = *renamed;
      break;
    }
    const auto [at, is_new] = found.insert({{tensors[i].array, owner}, static_cast<int>(i)});
    if (is_new) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "{}: '{}' and '{}' would both be loaded as '{}': change the rules of `load_rename`",
            source_.place(), tensors[static_cast<std::size_t>(at->second)].name, tensors[i].name,
            owner));
  }
  for (std::size_t r = 0; r < used.size(); ++r) {
    if (used[r]) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has no parameter called '{}', which a rule of `load_rename` names",
                            source_.place(), options_.renames[r].from));
  }
  return found;
}

void StateLoader::match() {
  match_tensors();
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    if (a == 0 || !options_.weights_only) match_array(a);
  }
  if (!options_.weights_only) note_fresh_arrays();
}

/// Finds the source's tensor for each tensor of this table.
void StateLoader::match_tensors() {
  const std::vector<StateTensor>& saved = source_.content().tensors;
  const std::string& master = runs_.arrays()[0].name;
  ByName found = source_tensors();
  std::vector<std::string> misshapen;
  for (std::size_t t = 0; t < runs_.tensors().size(); ++t) {
    const StateTensor& tensor = runs_.tensors()[t];
    const auto its = found.find({tensor.array, tensor.owner});
    if (its == found.end()) {
      if (tensor.array == master) missing_.insert(tensor.owner);
      continue;
    }
    const int index = its->second;
    found.erase(its);
    if (options_.weights_only && tensor.array != master) continue;
    const StateTensor& there = saved[static_cast<std::size_t>(index)];
    // Scales of other units may have another shape; they are read where values are decoded.
    if (there.shape != tensor.shape && tensor.owner == tensor.name) {
      misshapen.push_back(fmt::format("'{}' has the shape [{}] there and [{}] in this model",
                                      tensor.name, fmt::join(there.shape, ", "),
                                      fmt::join(tensor.shape, ", ")));
    }
    sources_[t] = index;
  }
  std::vector<std::string> unexpected;
  for (const auto& [name, index] : found) {
    if (name.first == master) unexpected.push_back(saved[static_cast<std::size_t>(index)].name);
  }
  const bool strict = !options_.initialize;
  std::vector<std::string> wrong;
  if (!missing_.empty())
    wrong.push_back(fmt::format("the source lacks '{}'", fmt::join(missing_, "', '")));
  if (!unexpected.empty())
    wrong.push_back(
        fmt::format("this model lacks the source's '{}'", fmt::join(unexpected, "', '")));
  if (misshapen.empty() && (wrong.empty() || !strict)) {
    if (!missing_.empty()) wrong.front() += ", which keep their initial values";
    for (std::string& note : wrong) notes_.push_back(std::move(note));
    return;
  }
  wrong.insert(wrong.end(), misshapen.begin(), misshapen.end());
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the parameters in {} are not this model's: {}. Use `load_rename` for "
                          "parameters that have other names, or `load_partial` to load those that "
                          "fit; other shapes cannot be loaded",
                          source_.place(), fmt::join(wrong, "; ")));
}

/// Decides how an array comes from the source.
void StateLoader::match_array(std::size_t a) {
  const std::vector<StateTensor>& saved = source_.content().tensors;
  const StateArray& array = runs_.arrays()[a];
  bool same = true;
  std::set<std::string> types;
  TensorType wanted = TensorType::kF32;
  for (std::size_t t = 0; t < runs_.tensors().size(); ++t) {
    const StateTensor& tensor = runs_.tensors()[t];
    if (tensor.array != array.name || sources_[t] < 0) continue;
    const TensorType its = saved[static_cast<std::size_t>(sources_[t])].type;
    same = same && its == tensor.type;
    types.insert(std::string(to_string(its)));
    wanted = tensor.type;
  }
  const bool codes = array.element == StateElement::kCode || array.is_scale();
  if (codes && !units_alike()) same = false;
  arrays_[a].way = same ? Way::kSame : Way::kConverted;
  if (same || array.is_scale()) return;
  const bool widened = wanted == TensorType::kF32;
  arrays_[a].note = fmt::format("{}: {} to {}, {}", array.name, fmt::join(types, " and "),
                                to_string(wanted), widened ? "exactly" : "rounded");
  notes_.push_back(arrays_[a].note);
}

/// Names the parameters that come without optimizer state: the source's run had frozen them, or
/// they are parts of nothing that it has.
void StateLoader::note_fresh_arrays() {
  std::set<std::string_view> known;
  std::vector<std::string_view> owners;  // in the model's order
  for (std::size_t t = 0; t < sources_.size(); ++t) {
    const StateTensor& tensor = runs_.tensors()[t];
    if (sources_[t] >= 0 || tensor.owner == tensor.name || missing_.contains(tensor.owner))
      continue;
    const auto array = std::ranges::find(runs_.arrays(), tensor.array, &StateArray::name);
    if (!array->is_scale() && known.insert(tensor.owner).second) owners.push_back(tensor.owner);
  }
  if (owners.empty()) return;
  const std::size_t shown = std::min(owners.size(), kFreshShown);
  notes_.push_back(fmt::format(
      "the source has no optimizer state of '{}'{}, which therefore begins with its initial values",
      fmt::join(std::span(owners).first(shown), "', '"),
      shown < owners.size() ? fmt::format(" and {} more", owners.size() - shown) : ""));
}

std::vector<std::string> StateLoader::notes() const { return notes_; }

Task<> StateLoader::load(ChunkId id, std::span<std::byte> record) {
  const std::vector<ChunkRuns::OfTensor> all = runs_.of(id);
  if (!fills(id, all, record)) {
    const std::function<void()> begin = [&] { begin_record(id, record); };
    co_await workers_.run(reactor_, {"begin record", record.size()}, begin);
  }
  std::set<std::size_t> converted;
  for (const ChunkRuns::OfTensor& of : all) {
    if (sources_[of.tensor] < 0) continue;
    // A constant record holds fp32, as its tensor does, so its bytes are copied.
    if (arrays_[of.array].way == Way::kSame) co_await copy(of, id, record);
    if (arrays_[of.array].way == Way::kConverted && !runs_.arrays()[of.array].is_scale())
      converted.insert(of.array);
  }
  for (const std::size_t array : converted) co_await convert(array, all, id, record);
}

/// Returns true if every byte of the record comes unchanged from the source: the record has no
/// padding, and nothing is missing.
bool StateLoader::fills(ChunkId id, std::span<const ChunkRuns::OfTensor> all,
                        std::span<const std::byte> record) const {
  const bool constant = table_.chunk(id).constant;
  const std::size_t arrays = constant ? kConstantArrays : arrays_.size();
  std::vector<std::uint64_t> missing;
  std::uint64_t padding = record.size();
  for (std::size_t a = 0; a < arrays; ++a) {
    missing.push_back(constant ? record.size()
                               : state_array_in(table_.state(id), a, record).size());
    padding -= missing.back();
  }
  if (padding != 0) return false;
  for (const ChunkRuns::OfTensor& of : all) {
    if (sources_[of.tensor] < 0 || arrays_[of.array].way != Way::kSame) return false;
    const std::uint64_t size = size_bytes(runs_.tensors()[of.tensor].type);
    for (const TensorRun& run : of.runs) missing[of.array] -= run.count * size;
  }
  return std::ranges::all_of(missing, [](std::uint64_t bytes) { return bytes == 0; });
}

/// Fills the record with what stays where nothing is loaded over it: zeros, or initial values if
/// the source lacks parameters.
void StateLoader::begin_record(ChunkId id, std::span<std::byte> record) const {
  const Chunk& chunk = table_.chunk(id);
  const bool initial = !missing_.empty();
  if (chunk.constant && !initial) {
    std::ranges::fill(record, std::byte{});
    return;
  }
  std::vector<float> masters(chunk.count);
  if (initial)
    options_.initialize(chunk.unit, chunk.begin, std::span(masters).first(table_.real_count(id)));
  if (chunk.constant) {
    std::memcpy(record.data(), masters.data(), record.size());
  } else {
    write_record(table_.state(id), masters, record, initial_accumulator_);
  }
}

Task<> StateLoader::copy(const ChunkRuns::OfTensor& of, ChunkId id, std::span<std::byte> record) {
  const StateArray& array = runs_.arrays()[of.array];
  const bool constant = table_.chunk(id).constant;
  const TensorType type = runs_.tensors()[of.tensor].type;
  const std::uint32_t in_record =
      constant ? static_cast<std::uint32_t>(sizeof(float)) : array.element_bytes();
  if (size_bytes(type) != in_record) {
    // A constant parameter is fp32, but this chunk's record is not constant and holds another type.
    std::vector<ChunkRuns::OfTensor> one{of};
    co_await convert(of.array, one, id, record);
    co_return;
  }
  const auto source = static_cast<std::size_t>(sources_[of.tensor]);
  const std::span<std::byte> whole =
      constant ? record : state_array_in(table_.state(id), of.array, record);
  if (!whole.empty()) {
    co_await source_.read(source, of.runs, whole);
    co_return;
  }
  const AlignedBytes bytes = memory_.take(last_value(of.runs) * in_record);
  co_await source_.read(source, of.runs, bytes.span());
  const std::function<void()> job = [&] {
    for (const TensorRun& run : of.runs) {
      const auto its = bytes.span().subspan(run.at * in_record, run.count * in_record);
      write_state_array(table_.state(id), of.array, its, run.at, record);
    }
  };
  co_await workers_.run(reactor_, {"copy state", 2 * bytes.span().size()}, job);
}

/// Returns the parts of a chunk in which 8-bit values are encoded: parameters that have blocks of
/// their own, or all at once.
std::vector<TensorRun> StateLoader::parts_of(ChunkId id) const {
  if (!table_.state(id).own_blocks) return {{.first = 0, .count = table_.real_count(id), .at = 0}};
  std::vector<TensorRun> parts;
  for (const ParamRun& run : table_.param_runs(id))
    parts.push_back({.first = run.first, .count = run.count, .at = run.begin});
  return parts;
}

/// Converts all of the chunk's values of an array at once, because 8-bit values are encoded in
/// blocks.
Task<> StateLoader::convert(std::size_t array, std::span<const ChunkRuns::OfTensor> all, ChunkId id,
                            std::span<std::byte> record) {
  std::vector<float> values(table_.real_count(id));
  const bool constant = table_.chunk(id).constant;
  const StateKind state = table_.state(id);
  const std::vector<TensorRun> parts = parts_of(id);
  if (constant) {
    std::memcpy(values.data(), record.data(), values.size() * sizeof(float));
  } else {
    for (const TensorRun& part : parts) {
      const std::span<float> its = std::span(values).subspan(part.at, part.count);
      read_state_values(state, array, record, part.at, its);
    }
  }
  for (const ChunkRuns::OfTensor& of : all) {
    if (of.array == array && sources_[of.tensor] >= 0) co_await read_values(of, values);
  }
  const std::function<void()> job = [&] {
    if (constant) {
      std::memcpy(record.data(), values.data(), values.size() * sizeof(float));
    } else if (!state.own_blocks) {
      write_state_values(state, array, values, record);
    } else {
      for (const TensorRun& part : parts) {
        const auto its = std::span<const float>(values).subspan(part.at, part.count);
        write_state_values(state, array, part.at, its, record);
      }
    }
  };
  co_await workers_.run(reactor_, {"convert state", 2 * values.size() * sizeof(float)}, job);
}

Task<> StateLoader::read_values(const ChunkRuns::OfTensor& of, std::span<float> values) {
  const auto index = static_cast<std::size_t>(sources_[of.tensor]);
  const StateTensor& saved = source_.content().tensors[index];
  const AlignedBytes bytes = memory_.take(last_value(of.runs) * size_bytes(saved.type));
  co_await source_.read(index, of.runs, bytes.span());
  if (saved.type == TensorType::kU8) {
    co_await decode(index, of, bytes.span(), values);
    co_return;
  }
  const std::size_t size = size_bytes(saved.type);
  for (const TensorRun& run : of.runs) {
    widen(saved.type, bytes.span().subspan(run.at * size, run.count * size),
          values.subspan(run.at, run.count));
  }
}

/// Finds the scales of codes. Their blocks are counted from the beginning of the source's unit.
void StateLoader::find_scales() {
  const StateContent& content = source_.content();
  const auto is_scale = [](const StateTensor& tensor) { return tensor.array.ends_with(".scale"); };
  using OwnersArray = std::pair<std::string_view, std::string_view>;
  std::map<OwnersArray, std::size_t> by_owner;
  std::unordered_map<std::string_view, std::uint64_t> counts;  // of parameters
  for (std::size_t t = 0; t < content.tensors.size(); ++t) {
    const StateTensor& tensor = content.tensors[t];
    if (is_scale(tensor)) by_owner.emplace(OwnersArray(tensor.owner, tensor.array), t);
    if (tensor.name == tensor.owner) counts.emplace(tensor.name, tensor.count());
  }
  struct Place {
    std::string_view unit;
    std::uint64_t begin;
  };
  std::unordered_map<std::string_view, Place> places;  // of parameters
  for (const StateUnit& unit : content.units) {
    std::uint64_t at = 0;
    for (const std::string& param : unit.params) {
      places[param] = {unit.name, at};
      if (const auto its = counts.find(param); its != counts.end()) at += its->second;
    }
  }
  for (std::size_t t = 0; t < content.tensors.size(); ++t) {
    const StateTensor& codes = content.tensors[t];
    const auto place = places.find(codes.owner);
    if (codes.type != TensorType::kU8 || place == places.end()) continue;
    const std::string array = codes.array + ".scale";
    const auto its = by_owner.find(OwnersArray(place->second.unit, array));
    if (its != by_owner.end()) scales_[t] = {its->second, place->second.begin};
  }
}

/// Decodes codes with the scales of their blocks.
Task<> StateLoader::decode(std::size_t codes, const ChunkRuns::OfTensor& of,
                           std::span<const std::byte> bytes, std::span<float> values) {
  const StateTensor& tensor = source_.content().tensors[codes];
  const auto found = scales_.find(codes);
  if (found == scales_.end()) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: '{}' is in 8 bits, but has no scales to read it with",
                            source_.place(), tensor.name));
  }
  const auto [scales, before] = found->second;
  const std::array<float, 256>& table =
      eight_bit_values(code_of(table_.state().optimizer, tensor.array));
  for (const TensorRun& run : of.runs) {
    const std::uint64_t first = (before + run.first) / kEightBitBlock;
    const std::uint64_t last = (before + run.first + run.count - 1) / kEightBitBlock;
    std::vector<float> its(last - first + 1);
    const TensorRun wanted{.first = first, .count = its.size(), .at = 0};
    co_await source_.read(scales, std::span(&wanted, 1), std::as_writable_bytes(std::span(its)));
    for (std::uint64_t i = 0; i < run.count; ++i) {
      const auto code = static_cast<std::uint8_t>(bytes[run.at + i]);
      values[run.at + i] = table[code] * its[(before + run.first + i) / kEightBitBlock - first];
    }
  }
}

}  // namespace ziggurat

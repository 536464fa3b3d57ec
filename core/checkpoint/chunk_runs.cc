// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/chunk_runs.cc: turns places in a part's unit into places in whole parameters.
#include "core/checkpoint/chunk_runs.h"

#include <algorithm>
#include <cstring>

#include "core/sharding/tensor_part.h"
#include "optimizer/eight_bit.h"
#include "optimizer/state_values.h"

namespace ziggurat {
namespace {

TensorType type_of(StateElement element) {
  switch (element) {
    case StateElement::kBF16: return TensorType::kBF16;
    case StateElement::kCode: return TensorType::kU8;
    case StateElement::kF32: break;
  }
  return TensorType::kF32;
}

/// Returns the scales of elements of a parameter whose blocks are its own: each has the place of
/// its block's first element.
std::vector<TensorRun> own_scales(const TensorRun& elements) {
  std::vector<TensorRun> runs;
  for (std::uint64_t i = 0; i < elements.count; i += kEightBitBlock) {
    runs.push_back({.first = (elements.first + i) / kEightBitBlock,
                    .count = 1,
                    .at = (elements.at + i) / kSharedRecordStep});
  }
  return runs;
}

}  // namespace

ChunkRuns::ChunkRuns(const ChunkTable& table)
    : table_(table), arrays_(state_arrays(table.state())) {
  const ModelSpec whole = whole_of(table.model(), table.sharding().tensor.ranks);
  for (UnitId unit = 0; unit < whole.units.size(); ++unit) add_unit(unit, whole.units[unit]);
}

void ChunkRuns::add_unit(UnitId unit, const UnitSpec& whole) {
  params_.emplace_back();
  scales_.emplace_back(arrays_.size(), -1);
  for (const ParamSpec& param : whole.params) {
    std::vector<int>& of = params_.back().emplace_back(arrays_.size(), -1);
    std::size_t held = param.constant ? kConstantArrays : arrays_.size();
    if (!param.stored()) held = 0;
    for (std::size_t a = 0; a < held; ++a) {
      if (arrays_[a].is_scale()) {
        if (whole.own_blocks) of[a] = add_scale(arrays_[a], param.name, param.count());
        continue;
      }
      of[a] = static_cast<int>(tensors_.size());
      tensors_.push_back(
          {.name = a == 0 ? param.name : state_tensor_name(arrays_[a].name, param.name),
           .owner = param.name,
           .array = arrays_[a].name,
           // A constant record has fp32 masters, whatever other records have.
           .type = param.constant ? TensorType::kF32 : type_of(arrays_[a].element),
           .shape = param.shape});
    }
  }
  if (whole.constant() || whole.own_blocks) return;
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    if (arrays_[a].is_scale()) scales_[unit][a] = add_scale(arrays_[a], whole.name, whole.count());
  }
}

/// Adds the tensor of the scales of a unit's, or a parameter's, `count` elements.
int ChunkRuns::add_scale(const StateArray& array, const std::string& owner, std::uint64_t count) {
  tensors_.push_back({.name = state_tensor_name(array.name, owner),
                      .owner = owner,
                      .array = array.name,
                      .type = TensorType::kF32,
                      .shape = {static_cast<std::int64_t>(array.values_of(count))}});
  return static_cast<int>(tensors_.size()) - 1;
}

std::vector<StateUnit> ChunkRuns::units() const {
  std::vector<StateUnit> units;
  for (const UnitSpec& unit : table_.model().units) {
    if (!unit.stored()) continue;
    if (!unit.own_blocks) units.push_back({.name = unit.name, .params = {}});
    for (const ParamSpec& param : unit.params) {
      if (unit.own_blocks) units.push_back({.name = param.name, .params = {}});
      units.back().params.push_back(param.name);
    }
  }
  return units;
}

int ChunkRuns::tensor(std::size_t array, UnitId unit, std::size_t param) const {
  const int of_unit = scales_[unit][array];
  return of_unit >= 0 ? of_unit : params_[unit][param][array];
}

std::vector<ChunkRuns::OfTensor> ChunkRuns::of(ChunkId chunk) const {
  std::vector<OfTensor> all;
  if (table_.real_count(chunk) == 0) return all;
  add_params(chunk, all);
  if (!table_.chunk(chunk).constant) add_scales(chunk, all);
  return all;
}

void ChunkRuns::add_params(ChunkId id, std::vector<OfTensor>& all) const {
  const Chunk& chunk = table_.chunk(id);
  const UnitSpec& unit = table_.model().units[chunk.unit];
  const TensorPart part = table_.sharding().tensor;
  const std::uint64_t end = chunk.begin + table_.real_count(id);
  const std::span<const std::uint64_t> begins = table_.param_begins(chunk.unit);
  const auto first = std::ranges::upper_bound(begins, chunk.begin) - begins.begin() - 1;
  for (auto p = static_cast<std::size_t>(first); p < unit.params.size() && begins[p] < end; ++p) {
    const ParamSpec& param = unit.params[p];
    const std::uint64_t begin = begins[p];
    const std::uint64_t from = std::max(begin, chunk.begin);
    const std::uint64_t to = std::min(begin + param.count(), end);
    if (from >= to) continue;
    const UnitSpec alone{.name = unit.name, .params = {param}};
    std::vector<TensorRun> runs;
    for_each_run(alone, part, from - begin, to - from, [&](const PartRun& run) {
      runs.push_back(
          {.first = run.whole_begin, .count = run.count, .at = begin + run.begin - chunk.begin});
    });
    const std::size_t held = chunk.constant ? kConstantArrays : arrays_.size();
    for (std::size_t a = 0; a < held; ++a) {
      const int tensor = params_[chunk.unit][p][a];
      if (tensor < 0) continue;
      all.push_back({.tensor = static_cast<std::size_t>(tensor), .array = a, .runs = runs});
      if (arrays_[a].is_scale())
        all.back().runs =
            own_scales({.first = from - begin, .count = to - from, .at = from - chunk.begin});
    }
  }
}

void ChunkRuns::add_scales(ChunkId id, std::vector<OfTensor>& all) const {
  const Chunk& chunk = table_.chunk(id);
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    const int tensor = scales_[chunk.unit][a];
    if (tensor < 0) continue;
    all.push_back({.tensor = static_cast<std::size_t>(tensor),
                   .array = a,
                   .runs = {{.first = chunk.begin / arrays_[a].block,
                             .count = arrays_[a].values_of(table_.real_count(id)),
                             .at = 0}}});
  }
}

std::span<const std::byte> array_in(const ChunkRecord& record, ArrayAs as) {
  if (record.table.chunk(record.chunk).constant) return record.bytes;
  const StateKind state = record.table.state(record.chunk);
  if (size_bytes(as.type) != state_arrays(state)[as.array].element_bytes()) return {};
  return state_array_in(state, as.array, record.bytes);
}

void take_array(const ChunkRecord& record, ArrayAs as, std::uint64_t first,
                std::span<std::byte> out) {
  const std::uint64_t size = size_bytes(as.type);
  const StateKind state = record.table.state(record.chunk);
  if (const std::span<const std::byte> whole = array_in(record, as); !whole.empty()) {
    const std::span<const std::byte> its = whole.subspan(first * size, out.size());
    std::memcpy(out.data(), its.data(), its.size());
  } else if (size == state_arrays(state)[as.array].element_bytes()) {
    read_state_array(state, as.array, record.bytes, first, out);
  } else {
    // A constant parameter's tensor is fp32, but this chunk's record holds it in bf16.
    std::vector<float> values(first + out.size() / size);
    read_state_values(state, as.array, record.bytes, values);
    std::memcpy(out.data(), values.data() + first, out.size());
  }
}

}  // namespace ziggurat

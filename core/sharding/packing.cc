// SPDX-License-Identifier: Apache-2.0
// core/sharding/packing.cc: chooses which parameters share a unit.
#include "core/sharding/packing.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "optimizer/eight_bit.h"

namespace ziggurat {
namespace {

/// Returns where a parameter of `count` elements begins, if those before it end at `end`.
std::uint64_t next_begin(std::uint64_t end, std::uint64_t count, bool own_blocks) {
  if (!own_blocks) return end;
  const std::uint64_t begin = round_up(end, kSharedRecordStep);
  const bool fits = begin % kEightBitBlock + count <= kEightBitBlock;
  return fits ? begin : round_up(begin, kEightBitBlock);
}

}  // namespace

std::vector<std::uint64_t> param_begins(const UnitSpec& unit) {
  std::vector<std::uint64_t> begins;
  std::uint64_t end = 0;
  for (const ParamSpec& param : unit.params) {
    begins.push_back(next_begin(end, param.count(), unit.own_blocks));
    end = begins.back() + param.count();
  }
  begins.push_back(end);
  return begins;
}

ModelSpec numbered_model(ModelSpec lent) {
  for (std::size_t u = 0; u < lent.units.size(); ++u) {
    for (ParamSpec& param : lent.units[u].params) {
      param.lent = static_cast<ParamId>(u);
      param.constant = param.frozen;
    }
  }
  return lent;
}

ModelSpec packed_model(const ModelSpec& lent, StateFormat format) {
  ModelSpec model{.name = lent.name, .units = {}, .dtype = lent.dtype};
  add_packed(model, lent.units, format);
  return model;
}

void add_packed(ModelSpec& model, std::span<const UnitSpec> lent,
                std::optional<StateFormat> format) {
  // Parameters of one type share a unit if all are lent, or if the trainer acquires all together;
  // and if all are stored, or none is.
  using Key = std::tuple<bool, std::optional<std::uint32_t>, DType>;
  std::map<Key, UnitId> open;         // the unit of each key to which the next parameter is added
  std::map<Key, std::uint64_t> ends;  // of the last parameter in each of them
  const auto named = [&](UnitId id) {
    UnitSpec& unit = model.units[id];
    if (unit.params.size() > 1)
      unit.name = fmt::format("{} and {} more", unit.name, unit.params.size() - 1);
  };
  for (const UnitSpec& unit : lent) {
    const Key key{unit.stored(), unit.params.front().streamed, unit.dtype.value_or(model.dtype)};
    const std::uint64_t count = unit.count();
    const bool in_blocks = unit.stored() && format && has_codes(*format);
    if (count >= kPackedBelow) {
      model.units.push_back(unit);
      continue;
    }
    const std::uint64_t end = next_begin(ends[key], count, in_blocks) + count;
    if (open.contains(key) && end > kPackElementsMax) {
      named(open[key]);
      open.erase(key);
    }
    if (open.contains(key)) {
      model.units[open[key]].params.push_back(unit.params.front());
      model.units[open[key]].own_blocks = in_blocks;
      ends[key] = end;
      continue;
    }
    open[key] = static_cast<UnitId>(model.units.size());
    ends[key] = count;
    model.units.push_back(unit);
  }
  for (const auto& [key, id] : open) named(id);
}

ModelSpec unpacked_model(const ModelSpec& packed) {
  struct Place {
    const UnitSpec* unit = nullptr;
    const ParamSpec* param = nullptr;
  };
  std::size_t count = 0;
  for (const UnitSpec& unit : packed.units) count += unit.params.size();
  std::vector<Place> all(count);
  std::vector<Place> others;  // those without a number, in their order
  for (const UnitSpec& unit : packed.units) {
    for (const ParamSpec& param : unit.params) {
      if (!param.lent) {
        others.push_back({&unit, &param});
        continue;
      }
      if (*param.lent >= count || all[*param.lent].param != nullptr) {
        throw Error(ErrorCode::kDataLoss,
                    fmt::format("the store's layout: parameter '{}' has the number {}, which is "
                                "another's or beyond its {} parameters",
                                param.name, *param.lent, count));
      }
      all[*param.lent] = {&unit, &param};
    }
  }
  auto next = others.begin();
  ModelSpec model{.name = packed.name, .units = {}, .dtype = packed.dtype};
  for (Place& place : all) {
    if (place.param == nullptr) place = *next++;
    model.units.push_back(
        {.name = place.param->name, .params = {*place.param}, .dtype = place.unit->dtype});
  }
  return model;
}

}  // namespace ziggurat

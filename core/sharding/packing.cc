// SPDX-License-Identifier: Apache-2.0
// core/sharding/packing.cc: chooses which parameters share a unit.
#include "core/sharding/packing.h"

#include <fmt/format.h>

#include <map>
#include <utility>
#include <vector>

#include "base/error.h"

namespace ziggurat {

ModelSpec packed_model(const ModelSpec& lent, StateFormat format) {
  ModelSpec model{.name = lent.name, .units = {}, .dtype = lent.dtype};
  std::map<DType, UnitId> open;  // the unit of each type to which the next parameter is added
  std::map<DType, std::uint64_t> counts;
  const auto close = [&](DType dtype) {
    const auto found = open.find(dtype);
    if (found == open.end()) return;
    UnitSpec& unit = model.units[found->second];
    if (unit.params.size() > 1)
      unit.name = fmt::format("{} and {} more", unit.name, unit.params.size() - 1);
    open.erase(found);
  };
  for (const UnitSpec& unit : lent.units) {
    const DType dtype = unit.dtype.value_or(lent.dtype);
    const std::uint64_t count = unit.count();
    if (count >= kPackedBelow || format == StateFormat::k8Bit) {
      model.units.push_back(unit);
      continue;
    }
    if (open.contains(dtype) && counts[dtype] + count > kPackElementsMax) close(dtype);
    if (open.contains(dtype)) {
      model.units[open[dtype]].params.push_back(unit.params.front());
      counts[dtype] += count;
      continue;
    }
    open[dtype] = static_cast<UnitId>(model.units.size());
    counts[dtype] = count;
    model.units.push_back(unit);
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) close(dtype);
  return model;
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

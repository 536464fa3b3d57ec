// SPDX-License-Identifier: Apache-2.0
// core/sharding/packing.cc: chooses which parameters share a unit.
#include "core/sharding/packing.h"

#include <fmt/format.h>

#include <map>
#include <utility>

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

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/plan/models/model_units.cc: counts from model_shape.h, one unit after the other.
#include "core/plan/models/model_units.h"

#include <fmt/format.h>

namespace ziggurat {
namespace {

UnitSpec unit_with(const std::string& name, std::int64_t count) {
  return {.name = name, .params = {{.name = name + ".weight", .shape = {count}}}};
}

}  // namespace

ModelSpec model_units(const ModelShape& shape, DType dtype) {
  const ParameterCount count = count_parameters(shape);
  ModelSpec model{.name = shape.name, .units = {}, .dtype = dtype};
  std::int64_t rest = count.total - count.embedding;
  model.units.push_back(unit_with("embedding", count.embedding));
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const std::int64_t its = layer_parameters(shape, layer);
    model.units.push_back(unit_with(fmt::format("layer{}", layer), its));
    rest -= its;
  }
  model.units.push_back(unit_with(shape.tied ? "norm" : "head", rest));
  return model;
}

}  // namespace ziggurat

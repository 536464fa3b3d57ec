// SPDX-License-Identifier: Apache-2.0
// tests/core/equal_units.h: a model of units that are alike, one matrix each.
#pragma once

#include <cstdint>
#include <string>

#include "core/sharding/chunk_table.h"

namespace ziggurat::testing {

/// `count` units of `rows` x 128 elements: eight tiles each, padded unless `rows` is 1,024.
inline ModelSpec equal_units(const char* name, std::size_t count, std::int64_t rows) {
  ModelSpec model{.name = name, .units = {}};
  for (std::size_t u = 0; u < count; ++u) {
    const std::string unit = "unit" + std::to_string(u);
    model.units.push_back(
        {.name = unit,
         .params = {{.name = unit + ".weight", .shape = {rows, 128}, .decay = true}}});
  }
  return model;
}

}  // namespace ziggurat::testing

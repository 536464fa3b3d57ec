// SPDX-License-Identifier: Apache-2.0
// tests/core/streamed_model.h: the model of tests of streamed parameters.
#pragma once

#include <vector>

#include "core/engine/lent_engine.h"
#include "tests/core/lent_trainer.h"

namespace ziggurat::testing {

/// Small ones that share a record, one of several chunks, and two that stay the trainer's.
inline const std::vector<std::int64_t> kStreamedCounts{1,       105, 16'384, 16'385,
                                                       300'000, 7,   40'000, 500};
inline const std::vector<int> kUnitOfParam{-1, 0, 0, 1, 1, 1, -1, 2};  // -1: lent
inline constexpr StreamedUnit kStreamedUnits = 3;

inline ModelSpec streamed_model(DType dtype) {
  ModelSpec model = lent_model(kStreamedCounts, dtype);
  for (std::size_t p = 0; p < kUnitOfParam.size(); ++p) {
    if (kUnitOfParam[p] >= 0)
      model.units[p].params[0].streamed = static_cast<StreamedUnit>(kUnitOfParam[p]);
  }
  return model;
}

/// The same, and each unit of several parameters has two types.
inline ModelSpec mixed_streamed_model() {
  ModelSpec model = streamed_model(DType::kFloat32);
  for (const std::size_t p : {1U, 3U, 5U}) model.units[p].dtype = DType::kBFloat16;
  return model;
}

}  // namespace ziggurat::testing

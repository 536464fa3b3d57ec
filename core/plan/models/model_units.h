// SPDX-License-Identifier: Apache-2.0
// core/plan/models/model_units.h: a model's shape as the units that our own trainers make of it:
// the tables of the embedding, each layer, and the head with the last norm. Pure functions; any
// thread.
#pragma once

#include "core/plan/models/model_shape.h"
#include "core/sharding/model_spec.h"

namespace ziggurat {

/// Returns the units in forward order. A head that is tied to the embedding is part of it, and the
/// last norm is then a unit of its own. A layer is one parameter of as many elements as it has, and
/// so are tables: how a unit is cut does not depend on its parameters.
ModelSpec model_units(const ModelShape& shape, DType dtype = DType::kBFloat16);

}  // namespace ziggurat

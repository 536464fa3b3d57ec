// SPDX-License-Identifier: Apache-2.0
// integrations/c/saved_tensors.cc: names, types and shapes of what a checkpoint has.
#include "integrations/c/saved_tensors.h"

#include <utility>

namespace ziggurat {
namespace {

TensorType type_of(const StateArray& array) {
  switch (array.element) {
    case StateElement::kBF16: return TensorType::kBF16;
    case StateElement::kCode: return TensorType::kU8;
    case StateElement::kF32: break;
  }
  return TensorType::kF32;
}

}  // namespace

SavedTensors::SavedTensors(const std::vector<EmbeddedSave::Param>& params, const StateKind& kind)
    : arrays_(state_arrays(kind)), of_(params.size()) {
  for (std::size_t p = 0; p < params.size(); ++p) add(p, params[p]);
}

void SavedTensors::add(std::size_t p, const EmbeddedSave::Param& param) {
  const std::size_t count = param.trained ? arrays_.size() : std::size_t{1};
  for (std::size_t a = 0; a < count; ++a) {
    const StateArray& array = arrays_[a];
    StateTensor tensor{.name = a == 0 ? param.name : state_tensor_name(array.name, param.name),
                       .owner = param.name,
                       .array = array.name,
                       .type = type_of(array),
                       .shape = param.shape};
    if (!param.trained) tensor.type = param.type;
    if (array.is_scale()) {
      const std::uint64_t blocks = (tensor.count() + array.block - 1) / array.block;
      tensor.shape = {static_cast<std::int64_t>(blocks)};
    }
    of_[p].push_back(static_cast<std::uint32_t>(all_.size()));
    all_.push_back(std::move(tensor));
  }
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/sharding/piece_layout.h: what the layout of a store of pieces says of the whole tensors to
// which its pieces belong, so that the stores of all ranks together are the whole tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/sharding/model_spec.h"

namespace ziggurat {

/// Marks `layout` as layout_of_pieces(layout) does. If each parameter of `model`, the layout's own,
/// has a place (ParamSpec::whole), the layout says all of them.
std::string layout_of_pieces(const std::string& layout, const ModelSpec& model);
/// Returns the place of each parameter of `model`, the layout's own, in the order of its units;
/// nothing if the layout does not say them. Errors: kDataLoss for places that no piece can have.
std::optional<std::vector<WholePlace>> places_in(const std::string& layout, const ModelSpec& model);
/// Throws kInvalidArgument if `param` says that it lies where it cannot.
void require_place(const ParamSpec& param);
/// Returns the places of the parameters of `model`; nothing if any has none.
std::optional<std::vector<WholePlace>> places_of(const ModelSpec& model);

}  // namespace ziggurat

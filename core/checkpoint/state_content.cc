// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_content.cc: how arrays are named.
#include "core/checkpoint/state_content.h"

#include <fmt/format.h>

namespace ziggurat {

std::string state_tensor_name(const std::string& array, const std::string& owner) {
  return fmt::format("optimizer.{}.{}", array, owner);
}

}  // namespace ziggurat

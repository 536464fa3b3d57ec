// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/manifest_rules.h: what a manifest may say, whoever made it. Private to
// core/checkpoint.
#pragma once

#include <string>

#include "core/checkpoint/manifest.h"

namespace ziggurat {

/// The first rule that it breaks, naming the tensor or the file; empty: none.
std::string broken_rule(const Manifest& manifest);

}  // namespace ziggurat

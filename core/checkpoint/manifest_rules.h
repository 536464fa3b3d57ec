// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/manifest_rules.h: the rules of a manifest, whoever made it. Private to
// core/checkpoint.
#pragma once

#include <string>

#include "core/checkpoint/manifest.h"

namespace ziggurat {

/// Returns what breaks the first broken rule, naming the tensor or the file; empty if no rule is
/// broken.
std::string broken_rule(const Manifest& manifest);

}  // namespace ziggurat

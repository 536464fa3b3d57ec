// SPDX-License-Identifier: Apache-2.0
// base/closest.h: what somebody who mistyped a word probably meant.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ziggurat {

/// The word of `words` with the fewest edits from `word`, if they are few enough (a third of its
/// length, or two); else "".
std::string closest(std::string_view word, std::span<const std::string> words);

}  // namespace ziggurat

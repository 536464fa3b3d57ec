// SPDX-License-Identifier: Apache-2.0
// base/closest.h: guesses which word was meant by a mistyped one.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ziggurat {

/// Returns the word of `words` with the fewest edits from `word`, if the edits are few enough (a
/// third of its length, or two); otherwise "".
std::string closest(std::string_view word, std::span<const std::string> words);

}  // namespace ziggurat

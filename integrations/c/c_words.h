// SPDX-License-Identifier: Apache-2.0
// integrations/c/c_words.h: turns names of settings in a library's messages into words of a C
// caller. Only this file knows these words.
//
// A library's message has `slots` or `slots=2`. If ziggurat_engine_open()'s settings have that key,
// the C caller reads "slots" or "slots": 2. A setting that a C caller gives elsewhere is named by
// its call or its field. Advice that no C caller can follow is left out: the part of a sentence
// from ": ", "; ", ", " or ". " to the next of these. Words in backticks that are no settings, like
// `ziggurat plan`, stay.
#pragma once

#include <string>
#include <string_view>

namespace ziggurat {

std::string in_c(std::string_view message);

/// Returns true if in_c() knows the setting `name`, either as one of C's or as one to leave out.
bool is_known_to_c(std::string_view name);

}  // namespace ziggurat

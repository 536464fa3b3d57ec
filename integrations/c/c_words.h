// SPDX-License-Identifier: Apache-2.0
// integrations/c/c_words.h: what a library says in names of settings, in what a C caller has: the
// one place where that is written.
//
// A library's message has `slots` or `slots=2`. Where ziggurat_engine_open()'s settings have the
// key, that is "slots" or "slots": 2; what a C caller says elsewhere is named by the call or the
// field. Advice that no C caller can follow is left out: the tail of a sentence that a ": ", "; ",
// ", " or ". " begins, as far as the next one. What stands in such quotes and is no setting, like
// `ziggurat plan`, stays.
#pragma once

#include <string>
#include <string_view>

namespace ziggurat {

std::string in_c(std::string_view message);

/// Whether `name` is a setting that in_c() knows: one of C's, or one that it leaves out.
bool is_known_to_c(std::string_view name);

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// integrations/cli/flag_words.h: what a library says in names of settings, in flags: the one place
// where they get their dashes.
//
// A library's message has `zero_stage` or `zero_stage=3`; on a command line that is --zero-stage or
// --zero-stage 3. What stands in such quotes and is no setting, like `ziggurat plan`, stays.
#pragma once

#include <string>
#include <string_view>

namespace ziggurat::cli {

std::string in_flags(std::string_view message);

}  // namespace ziggurat::cli

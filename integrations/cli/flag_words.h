// SPDX-License-Identifier: Apache-2.0
// integrations/cli/flag_words.h: writes the names of settings in a library's message as flags. No
// other place adds the dashes.
//
// A library's message names a setting as `zero_stage` or `zero_stage=3`; on a command line that is
// --zero-stage or --zero-stage 3. Other words in backticks, like `ziggurat plan`, stay as they are.
#pragma once

#include <string>
#include <string_view>

namespace ziggurat::cli {

std::string in_flags(std::string_view message);

}  // namespace ziggurat::cli

// SPDX-License-Identifier: Apache-2.0
// integrations/cli/output_file.h: writes the files that a command puts its result into, if the user
// names one. An empty path means no file.
#pragma once

#include <string>

namespace ziggurat::cli {

/// Checks that `path` can be written, before minutes are spent on a result that cannot be kept.
/// Makes nothing yet, so that an interrupted run leaves no file. Errors: system errors naming the
/// path.
void require_writable(const std::string& path);
void write_output(const std::string& path, const std::string& text);

}  // namespace ziggurat::cli

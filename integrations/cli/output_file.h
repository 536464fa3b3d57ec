// SPDX-License-Identifier: Apache-2.0
// integrations/cli/output_file.h: files that a command writes its result to, when the user names
// one. An empty path is no file.
#pragma once

#include <string>

namespace ziggurat::cli {

/// Asked before minutes are spent on a result that cannot be kept. Nothing is made yet: an
/// interrupted run leaves no file. Errors: errno's, naming the path.
void require_writable(const std::string& path);
void write_output(const std::string& path, const std::string& text);

}  // namespace ziggurat::cli

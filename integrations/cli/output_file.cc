// SPDX-License-Identifier: Apache-2.0
// integrations/cli/output_file.cc: checks that a file can be written, and writes it in one go.
#include "integrations/cli/output_file.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace ziggurat::cli {

void require_writable(const std::string& path) {
  if (path.empty()) return;
  const std::string folder = std::filesystem::absolute(path).parent_path().string();
  const bool there = ::access(path.c_str(), F_OK) == 0;
  if (::access(there ? path.c_str() : folder.c_str(), W_OK) != 0)
    throw system_error(errno, "cannot write " + path);
}

void write_output(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw system_error(errno, "cannot write " + path);
}

}  // namespace ziggurat::cli

// SPDX-License-Identifier: Apache-2.0
// tests/support/scratch_directory.h: a directory of a test's own, beside the tests.
#pragma once

#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace ziggurat::testing {

/// A directory that is gone afterwards.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string name = (std::filesystem::current_path() / "store-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace ziggurat::testing

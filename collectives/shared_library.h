// SPDX-License-Identifier: Apache-2.0
// collectives/shared_library.h: a library that is opened at run time, so that a program starts on
// machines without it.
#pragma once

#include <string>
#include <vector>

namespace ziggurat {

class SharedLibrary {
 public:
  /// Opens the first of `names` (paths, or names for the loader to find) that can be opened. The
  /// library stays open, because its threads and handlers may live until the process ends. Errors:
  /// kUnavailable, with the loader's reason for each name; `fix` is the end of the message.
  static SharedLibrary open(const std::vector<std::string>& names, const std::string& fix);

  /// Returns a function of the library. Errors: kUnavailable if the library lacks it.
  template <class Function>
  Function function(const char* name) const {
    return reinterpret_cast<Function>(address(name));
  }
  /// Returns the path at which the library was found.
  const std::string& path() const noexcept { return path_; }

 private:
  SharedLibrary(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}
  void* address(const char* name) const;

  void* handle_;
  std::string path_;
};

/// Returns where a library of this project may be: in ../lib beside the program's folder, in that
/// folder, and wherever the loader looks.
std::vector<std::string> own_library_names(const std::string& file);

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// collectives/shared_library.h: a library that is opened at run time, so that a program starts on
// machines without it.
#pragma once

#include <string>
#include <vector>

namespace ziggurat {

class SharedLibrary {
 public:
  /// The first of `names` (paths, or names for the loader to find) that opens. It stays open: what
  /// such libraries start, threads and handlers, outlives any wish to unload them. Errors:
  /// kUnavailable, with what the loader said of each; `fix` is the end of the message.
  static SharedLibrary open(const std::vector<std::string>& names, const std::string& fix);

  /// Errors: kUnavailable for a library that lacks it.
  template <class Function>
  Function function(const char* name) const {
    return reinterpret_cast<Function>(address(name));
  }
  /// Where it was found.
  const std::string& path() const noexcept { return path_; }

 private:
  SharedLibrary(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}
  void* address(const char* name) const;

  void* handle_;
  std::string path_;
};

/// Where a library of this project may be: beside the program's folder (../lib), in it, and
/// wherever the loader looks.
std::vector<std::string> own_library_names(const std::string& file);

}  // namespace ziggurat

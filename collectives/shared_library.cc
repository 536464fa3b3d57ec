// SPDX-License-Identifier: Apache-2.0
// collectives/shared_library.cc: calls dlopen and reports its errors.
#include "collectives/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>

#include <filesystem>

#include "base/error.h"

namespace ziggurat {

SharedLibrary SharedLibrary::open(const std::vector<std::string>& names, const std::string& fix) {
  std::vector<std::string> answers;
  for (const std::string& name : names) {
    // RTLD_GLOBAL, because MPIs open parts of themselves that look up symbols in the rest.
    if (void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
      link_map* map = nullptr;
      const bool known = ::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0';
      return {handle, known ? map->l_name : name};
    }
    // dlerror() returns the reason only once.
    const char* const why = ::dlerror();
    answers.emplace_back(why != nullptr ? why : name + ": no reason given");
  }
  throw Error(ErrorCode::kUnavailable, fmt::format("{}; {}", fmt::join(answers, "; "), fix));
}

void* SharedLibrary::address(const char* name) const {
  void* const found = ::dlsym(handle_, name);
  if (found == nullptr) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("the library {} has no function {}, so it must be another version",
                            path_, name));
  }
  return found;
}

std::vector<std::string> own_library_names(const std::string& file) {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return {folder.parent_path() / "lib" / file, folder / file, file};
}

}  // namespace ziggurat

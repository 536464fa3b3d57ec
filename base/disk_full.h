// SPDX-License-Identifier: Apache-2.0
// base/disk_full.h: the error of a file that has no room: a full filesystem, a quota, or a limit on
// the size of files. It names the file, because the fix depends on whose file it is.
#pragma once

#include <string>
#include <utility>

#include "base/error.h"

namespace ziggurat {

/// The code is always kResourceExhausted; native() is ENOSPC, EDQUOT or EFBIG.
class DiskFull : public Error {
 public:
  DiskFull(std::string path, const std::string& message, int native)
      : Error(ErrorCode::kResourceExhausted, message, native), path_(std::move(path)) {}

  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// base/disk_full.h: the error of a file that has no room: a full filesystem, a quota, a limit on
// the size of files. It names the file, since what helps depends on whose it is.
#pragma once

#include <string>
#include <utility>

#include "base/error.h"

namespace ziggurat {

/// Always kResourceExhausted; native() is ENOSPC, EDQUOT or EFBIG.
class DiskFull : public Error {
 public:
  DiskFull(std::string path, const std::string& message, int native)
      : Error(ErrorCode::kResourceExhausted, message, native), path_(std::move(path)) {}

  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// base/error.cc: names of error codes and errnos.
#include "base/error.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

namespace ziggurat {

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kResourceExhausted: return "resource exhausted";
    case ErrorCode::kUnavailable: return "unavailable";
    case ErrorCode::kDeadlineExceeded: return "deadline exceeded";
    case ErrorCode::kDataLoss: return "data loss";
    case ErrorCode::kCancelled: return "cancelled";
    case ErrorCode::kUnimplemented: return "unimplemented";
    case ErrorCode::kNotFinite: return "not finite";
  }
  return "unknown";
}

std::string errno_text(int error_number) {
  const char* name = ::strerrorname_np(error_number);
  const char* text = ::strerrordesc_np(error_number);
  if (name == nullptr || text == nullptr) return fmt::format("errno {}", error_number);
  return fmt::format("{} ({})", name, text);
}

Error system_error(int error_number, const std::string& what_failed) {
  ErrorCode code = ErrorCode::kUnavailable;
  if (error_number == ENOSPC || error_number == ENOMEM || error_number == EDQUOT ||
      error_number == EMFILE || error_number == EFBIG) {
    code = ErrorCode::kResourceExhausted;
  } else if (error_number == EINVAL || error_number == ENOENT || error_number == ENOTDIR ||
             error_number == EISDIR) {
    code = ErrorCode::kInvalidArgument;
  }
  return {code, fmt::format("{}: {}", what_failed, errno_text(error_number)), error_number};
}

}  // namespace ziggurat

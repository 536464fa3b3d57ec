// SPDX-License-Identifier: Apache-2.0
// base/error.h: how all of Ziggurat reports failure: an exception with a code and, if there is one,
// an errno.
//
// The code says what the caller does next; the message names parameter, tier, path, errno and the
// fix. A broken invariant is not an Error: see base/check.h.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace ziggurat {

/// What the caller does next.
enum class ErrorCode {
  kInvalidArgument,    ///< fix the call or the configuration
  kResourceExhausted,  ///< free something, or give a larger budget
  kUnavailable,        ///< rebuild the peer, file or device
  kDeadlineExceeded,   ///< wait longer: the allowed time has passed
  kDataLoss,           ///< restore from a generation or a checkpoint
  kCancelled,          ///< stop: somebody asked for it
  kUnimplemented,      ///< take the other path
  kNotFinite,          ///< skip the step: its gradients overflowed or are NaN
};

std::string_view to_string(ErrorCode code) noexcept;

class Error : public std::runtime_error {
 public:
  /// `native` is the errno, cudaError_t or ncclResult_t behind the failure, or 0 if there is none.
  Error(ErrorCode code, const std::string& message, int native = 0)
      : std::runtime_error(message), code_(code), native_(native) {}

  ErrorCode code() const noexcept { return code_; }
  int native() const noexcept { return native_; }

 private:
  ErrorCode code_;
  int native_;
};

/// Makes an Error of a failed system call: appends ": NAME (text)" for `error_number` (an errno,
/// positive) and chooses the code by it: kResourceExhausted for ENOSPC, ENOMEM and EDQUOT,
/// kInvalidArgument for EINVAL, kUnavailable for the rest.
Error system_error(int error_number, const std::string& what_failed);

/// Formats an errno: "ENOSPC (No space left on device)".
std::string errno_text(int error_number);

}  // namespace ziggurat

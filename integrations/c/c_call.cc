// SPDX-License-Identifier: Apache-2.0
// integrations/c/c_call.cc: turns errors into statuses, and keeps the open runtimes.
#include "integrations/c/c_call.h"

#include <algorithm>
#include <cstring>

#include <exception>
#include <new>

#include "base/error.h"
#include "integrations/c/c_words.h"

namespace ziggurat {
namespace {

ziggurat_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return ZIGGURAT_INVALID_ARGUMENT;
    case ErrorCode::kResourceExhausted: return ZIGGURAT_RESOURCE_EXHAUSTED;
    case ErrorCode::kUnavailable: return ZIGGURAT_UNAVAILABLE;
    case ErrorCode::kDeadlineExceeded: return ZIGGURAT_DEADLINE_EXCEEDED;
    case ErrorCode::kDataLoss: return ZIGGURAT_DATA_LOSS;
    case ErrorCode::kCancelled: return ZIGGURAT_CANCELLED;
    case ErrorCode::kUnimplemented: return ZIGGURAT_UNIMPLEMENTED;
    case ErrorCode::kNotFinite: return ZIGGURAT_NOT_FINITE;
  }
  return ZIGGURAT_INTERNAL;
}

ziggurat_status failed(ziggurat_status status, const char* message) noexcept {
  try {
    last_error() = {.in_settings = message, .in_c = in_c(message)};
  } catch (...) {
    last_error() = {};  // no memory for the message: only the status is returned
  }
  return status;
}

}  // namespace

Handles<Runtime>& runtimes() {
  static auto& all = *new Handles<Runtime>("runtime");
  return all;
}

LastError& last_error() {
  thread_local LastError its;
  return its;
}

ziggurat_status status_of_thrown() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return failed(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(ZIGGURAT_RESOURCE_EXHAUSTED,
                  "the call failed because no memory is left: free some memory");
  } catch (const std::exception& error) {
    return failed(ZIGGURAT_INTERNAL, error.what());
  } catch (...) {
    return failed(ZIGGURAT_INTERNAL, "the library threw an error of an unknown kind");
  }
}

void give_text(const std::string& its, char* text, std::uint64_t capacity_bytes,
               std::uint64_t* needed_bytes) {
  if (needed_bytes != nullptr) *needed_bytes = its.size() + 1;
  if (text == nullptr || capacity_bytes == 0) return;
  const std::size_t shown = std::min<std::size_t>(its.size(), capacity_bytes - 1);
  std::memcpy(text, its.data(), shown);
  text[shown] = '\0';
}

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// integrations/c/c_call.h: what every C function does: it checks what a caller wrote, and turns
// what was thrown into a status and a message. Private to the library.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/engine/runtime.h"
#include "integrations/c/handles.h"
#include "integrations/c/wrong.h"
#include "integrations/c/ziggurat.h"

namespace ziggurat {

/// Returns the open runtimes. They are never destroyed: what a program leaves open ends with the
/// program, whatever its threads do then.
Handles<Runtime>& runtimes();

struct LastError {
  std::string in_settings{};  ///< the message as the library wrote it
  std::string in_c{};
};
/// Returns the last error of this thread.
LastError& last_error();
/// Returns the status of the exception that is being handled, and makes its message the last error.
ziggurat_status status_of_thrown() noexcept;

/// Makes a call, and keeps everything that it throws from reaching the C caller.
template <class Call>
ziggurat_status guarded(const Call& call) noexcept {
  try {
    call();
    return ZIGGURAT_OK;
  } catch (...) {
    return status_of_thrown();
  }
}

template <class Pointer>
Pointer required(Pointer pointer, const char* what) {
  if (pointer == nullptr) throw wrong(fmt::format("{} is null", what));
  return pointer;
}

inline std::span<const std::byte> bytes_of(const void* given, std::uint64_t size_bytes,
                                           const char* what) {
  if (size_bytes == 0) return {};
  return {static_cast<const std::byte*>(required(given, what)), size_bytes};
}
inline std::span<std::byte> room_of(void* given, std::uint64_t size_bytes, const char* what) {
  if (size_bytes == 0) return {};
  return {static_cast<std::byte*>(required(given, what)), size_bytes};
}

/// Writes as much of the text as there is room for, and a zero.
void give_text(const std::string& its, char* text, std::uint64_t capacity_bytes,
               std::uint64_t* needed_bytes);

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// integrations/c/handles.h: objects behind the numbers that a C caller has. A number whose object
// is gone or of another kind is an error, not a crash.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/error.h"

namespace ziggurat {

/// Thread-safe. A number is never used twice.
template <class Object>
class Handles {
 public:
  /// `kind` names the objects in messages, such as "engine".
  explicit Handles(const char* kind) : kind_(kind) {}

  std::uint64_t add(std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t handle = ++last_;
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  /// Returns the object. A call keeps it until its end, because another thread may close it
  /// meanwhile. Errors: kInvalidArgument if there is none.
  std::shared_ptr<Object> find(std::uint64_t handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) throw unknown(handle);
    return found->second;
  }
  /// Returns the object, and removes it so that nobody finds it any more. Errors: those of find().
  std::shared_ptr<Object> take(std::uint64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) throw unknown(handle);
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  /// Removes the object. If somebody holds it, returns false and leaves it. Errors: those of
  /// find().
  bool remove_if_unused(std::uint64_t handle) {
    std::shared_ptr<Object> last;  // destroyed when the lock is free again
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) throw unknown(handle);
    if (found->second.use_count() > 1) return false;
    last = std::move(found->second);
    objects_.erase(found);
    return true;
  }

 private:
  Error unknown(std::uint64_t handle) const {
    return {
        ErrorCode::kInvalidArgument,
        fmt::format("there is no {} {}: it was closed before, or was never opened", kind_, handle)};
  }

  const char* kind_;
  mutable std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Object>> objects_;
};

}  // namespace ziggurat

// SPDX-License-Identifier: Apache-2.0
// core/schedule/param_uses.h: keeps those who read a parameter's values at home apart from the one
// who writes them.
//
//   ParamUses::Use reading = co_await uses.read(param);  the values stay until `reading` ends
//
// Reactor's thread only.
#pragma once

#include <map>
#include <utility>

#include "base/runtime/async.h"
#include "core/sharding/model_spec.h"

namespace ziggurat {

class ParamUses {
 public:
  explicit ParamUses(CancelScope& cancel) : ended_(cancel) {}

  /// Ends with its scope.
  class Use {
   public:
    Use(ParamUses& uses, ParamId param, int step) : uses_(&uses), param_(param), step_(step) {}
    Use(Use&& other) noexcept
        : uses_(std::exchange(other.uses_, nullptr)), param_(other.param_), step_(other.step_) {}
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (uses_ != nullptr) uses_->end(param_, step_);
    }

   private:
    ParamUses* uses_;
    ParamId param_;
    int step_;
  };

  /// Waits while the parameter is written.
  Task<Use> read(ParamId param) {
    while (count_[param] < 0) co_await any_end();
    ++count_[param];
    co_return Use(*this, param, 1);
  }
  /// Waits until nobody reads or writes the parameter.
  Task<Use> write(ParamId param) {
    while (count_[param] != 0) co_await any_end();
    --count_[param];
    co_return Use(*this, param, -1);
  }

 private:
  Task<> any_end() {
    ended_.reset();
    co_await ended_.wait();
  }
  void end(ParamId param, int step) {
    if ((count_[param] -= step) == 0) count_.erase(param);
    ended_.set();
  }

  std::map<ParamId, int> count_;  // of readers; -1: it is written
  Signal ended_;                  // some use has
};

}  // namespace ziggurat

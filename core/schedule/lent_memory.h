// SPDX-License-Identifier: Apache-2.0
// core/schedule/lent_memory.h: the parameters and gradients that a trainer lends, and a count of
// the jobs that use them, so that the trainer knows when it may use its memory again. Changed on
// the reactor's thread only; jobs read it while they count as a use.
//
// A job runs to its end, whatever has failed meanwhile. So before the trainer is told that the
// engine has ended, the engine waits for the jobs under way, and no other job begins. Nobody waits
// for transfers: they use only the engine's own memory, and a drive may hang.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/runtime/async.h"
#include "base/typed_span.h"
#include "core/sharding/model_spec.h"

namespace ziggurat {

class LentMemory {
 public:
  LentMemory(Reactor& reactor, const CancelScope& cancel) : cancel_(cancel), idle_(reactor) {
    idle_.set();
  }

  /// Takes the memory of all parameters, by ParamSpec::lent. Streamed ones may have none.
  void lend(std::span<const TypedSpan<std::byte>> params) {
    params_.assign(params.begin(), params.end());
    gradients_.resize(params.size());
  }
  /// Takes the new memory of a parameter, which the trainer has moved. No update of it may be under
  /// way.
  void lend(ParamId param, TypedSpan<std::byte> values) noexcept { params_[param] = values; }
  /// Takes a parameter's gradient, which has no padding; it may be empty. The engine may use the
  /// memory until the parameter is updated.
  void lend_gradient(ParamId param, TypedSpan<const std::byte> gradient) noexcept {
    gradients_[param] = gradient;
  }
  TypedSpan<std::byte> param(ParamId param) const noexcept { return params_[param]; }
  TypedSpan<const std::byte> gradient(ParamId param) const noexcept { return gradients_[param]; }

  /// Marks that a job uses lent memory, for as long as this object lives. Errors: the scope's, once
  /// that is cancelled.
  class Use {
   public:
    explicit Use(LentMemory& of) : of_(of) {
      of.cancel_.check();
      if (of.count_++ == 0) of.idle_.reset();
    }
    ~Use() {
      if (--of_.count_ == 0) of_.idle_.set();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    LentMemory& of_;
  };

  /// Returns when no job uses lent memory. If the scope is cancelled, no job ever begins
  /// afterwards.
  Task<> idle() {
    while (count_ > 0) co_await idle_.wait();  // another job may have begun before this resumed
  }

 private:
  const CancelScope& cancel_;
  std::vector<TypedSpan<std::byte>> params_;           // by ParamSpec::lent
  std::vector<TypedSpan<const std::byte>> gradients_;  // by ParamSpec::lent
  std::size_t count_ = 0;
  Signal idle_;
};

}  // namespace ziggurat

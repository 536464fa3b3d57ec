// SPDX-License-Identifier: Apache-2.0
// core/engine/state_copy.h: an interface for the state of one step, which is copied while an engine
// makes later steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>

#include "aio/aligned_bytes.h"
#include "base/runtime/async.h"
#include "core/sharding/model_spec.h"

namespace ziggurat {

struct CopyOptions {
  /// Copies codes of 8 bits as the fp32 values that they represent, because their blocks belong to
  /// a piece and not to the whole parameter.
  bool widen_codes = false;
  /// The longest time that steps wait for the copy in all. Then the copy is given up.
  double stall_max_s = std::numeric_limits<double>::infinity();
  std::uint64_t bandwidth_bytes_per_s = 0;  ///< the most that is copied; 0 if there is no limit
  /// Memory for records that a step would change before they are saved. Without it the step waits
  /// for them.
  std::uint64_t spare_bytes = 0;
};

/// Reactor's thread. It may outlive its engine; then run() fails.
class StateCopy {
 public:
  virtual ~StateCopy() = default;
  /// Takes elements from `first` on of one of `param`'s arrays, as numbered by state_arrays(), bit
  /// for bit. Neither training nor the end of the engine waits for it.
  using Take = std::function<Task<>(ParamId param, std::size_t array, std::uint64_t first,
                                    std::shared_ptr<const AlignedBytes> values)>;
  /// Returns how many bytes after a multiple of AlignedBytes::kAlignment the values should begin
  /// that `take` gets for the same elements.
  using Lead = std::function<std::uint64_t(ParamId param, std::size_t array, std::uint64_t first)>;
  /// Gives every array of every parameter to `take`, in no certain order, several at a time. Called
  /// once. Errors: those of reading records and of `take`; kDeadlineExceeded if steps have waited
  /// too long; kCancelled if the engine is closed before the copy is complete.
  virtual Task<> run(Take take, Lead lead) = 0;
  /// Lets the steps go on that wait for the copy, so that run() fails with `why`.
  virtual void give_up(std::exception_ptr why) = 0;
  /// Ends the copy; no step waits for it any more. Called when run() has returned, or instead of
  /// it.
  virtual void end() = 0;
  /// Whether nothing is copied because the bandwidth forbids it.
  virtual bool waits_for_time() const noexcept = 0;
};

}  // namespace ziggurat

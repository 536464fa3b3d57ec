// SPDX-License-Identifier: Apache-2.0
// optimizer/record_slice.h: describes a record as the slice that kernels take, and goes through the
// runs that share their settings. No byte of the record is read: it may be on a device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>

#include "optimizer/slice.h"
#include "optimizer/update.h"
#include "tiers/store/record_format.h"

namespace ziggurat::internal {

constexpr std::size_t tiles_of(std::size_t count) {
  return (count + kTileElements - 1) / kTileElements;
}

/// Returns how many elements of the record the trainer has.
std::size_t elements_of(const RecordView& view);

/// Returns how many elements a step updates: the trainer's elements to the end of their last block
/// of codes, or all of a record whose parameter was not read. Padding beyond stays as it is,
/// because a step without gradient does not change zeros or Adagrad's sum.
std::size_t stepped_of(const RecordView& view);

/// Checks that sizes, types and runs fit together. If not, the caller has a bug.
void check_update(StepView steps, const RecordView& view, const RecordFormat& format,
                  std::span<const DecayRun> runs);

/// Returns where a record's own arrays are, padding included: a slice without gradient, parameter
/// and settings.
Slice arrays_of(const StateKind& state, std::span<std::byte> record);
Slice arrays_of(const StateKind& state, const RecordFormat& format, std::span<std::byte> record);

/// Returns the slice of the whole record, including padding; `grad` and `param` may not have its
/// last elements. The caller sets decay and noise.
Slice slice_of(OptimizerKind kind, const RecordView& view, const RecordFormat& format);

/// Goes through the runs of a record from front to back.
class Runs {
 public:
  /// With `one_key`, a part never has elements under several noise keys of a parameter; such a run
  /// is cut into several parts.
  Runs(StepView steps, std::span<const DecayRun> runs, bool one_key)
      : steps_(steps), run_(runs.begin()), one_key_(one_key) {}

  struct Part {
    std::size_t begin, end;
    const OptimizerStep& step;
    float decay;
    /// The place of its first element. Its key cannot be used if the part has elements under
    /// several keys.
    std::optional<ParamPlace> place;
    bool skipped;
  };
  /// Returns the part from the end of the last one to `end`, or to the end of the run if that is
  /// nearer.
  Part next(std::size_t end) {
    const std::size_t begin = at_;
    at_ = std::min(end, run_end());
    const OptimizerStep& step = steps_[run_->group];
    std::optional<ParamPlace> place = run_->place;
    if (place) {
      place->first += begin - run_->begin;
      if (one_key_) at_ = std::min<std::size_t>(at_, begin + place->together(0));
    }
    return {begin, at_, step, run_->decay ? step.decay : step.no_decay, place, run_->skipped};
  }
  std::size_t at() const { return at_; }
  /// Returns where the run of the next part ends.
  std::size_t run_end() {
    while (run_->end <= at_) ++run_;
    return run_->end;
  }

 private:
  StepView steps_;
  std::span<const DecayRun>::iterator run_;
  bool one_key_;
  std::size_t at_ = 0;
};

}  // namespace ziggurat::internal

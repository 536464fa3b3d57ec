// SPDX-License-Identifier: Apache-2.0
// optimizer/record_slice.h: a record as the slice that a kernel is told of, and the walk over the
// runs that share their settings. No byte of the record is read: it may be on a device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>

#include "optimizer/slice.h"
#include "optimizer/update.h"
#include "tiers/record_format.h"

namespace ziggurat::internal {

constexpr std::size_t tiles_of(std::size_t count) {
  return (count + kTileElements - 1) / kTileElements;
}

/// What the trainer has of the record.
std::size_t elements_of(const RecordView& view);

/// What a step goes over: the trainer's elements to the end of their last block of codes. Padding
/// beyond stays as it is, since a step of no gradient leaves zeros, or Adagrad's sum, as they are;
/// but all of a record whose parameter was not read.
std::size_t stepped_of(const RecordView& view);

/// Sizes, types and runs that do not go together are a bug of the caller's.
void check_update(StepView steps, const RecordView& view, const RecordFormat& format,
                  std::span<const DecayRun> runs);

/// All of it, padding included, of whose elements `grad` and `param` may not have the last. Decay
/// and noise are for the caller to set.
Slice slice_of(OptimizerKind kind, const RecordView& view, const RecordFormat& format);

/// Walks the runs of a record from front to back.
class Runs {
 public:
  /// `one_key`: what lies under several keys of a parameter's noise is walked in as many parts.
  Runs(StepView steps, std::span<const DecayRun> runs, bool one_key)
      : steps_(steps), run_(runs.begin()), one_key_(one_key) {}

  struct Part {
    std::size_t begin, end;
    const OptimizerStep& step;
    float decay;
    /// The place of its first element. Its key cannot be used where the part lies under several.
    std::optional<ParamPlace> place;
  };
  /// From where the last one ended up to `end`, or to the end of the run if that is nearer.
  Part next(std::size_t end) {
    while (run_->end <= at_) ++run_;
    const std::size_t begin = at_;
    at_ = std::min(end, run_->end);
    const OptimizerStep& step = steps_[run_->group];
    std::optional<ParamPlace> place = run_->place;
    if (place) {
      place->first += begin - run_->begin;
      if (one_key_) at_ = std::min<std::size_t>(at_, begin + place->together(0));
    }
    return {begin, at_, step, run_->decay ? step.decay : step.no_decay, place};
  }
  std::size_t at() const { return at_; }

 private:
  StepView steps_;
  std::span<const DecayRun>::iterator run_;
  bool one_key_;
  std::size_t at_ = 0;
};

}  // namespace ziggurat::internal

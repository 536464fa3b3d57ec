// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_flow.h: a unit's gradient from the trainer's fp32 accumulator to
// its home, chunk by chunk, rounded once to the model's type; squares are summed in passing, per
// tile, so that the norm depends on neither chunks, threads nor placement. Among several ranks the
// sum over them comes in between (gradient_reducer.h). Reactor's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/gradients/gradient_norm.h"
#include "core/schedule/gradients/gradient_reducer.h"
#include "core/schedule/homes.h"
#include "core/schedule/params/param_cache.h"
#include "core/schedule/spare_buffers.h"

namespace ziggurat {

class GradientFlow {
 public:
  /// `accumulators_max`: accumulators of the largest unit's size set aside at once, while the
  /// device is not yet cut up; with two, a gradient leaves while the next unit's is computed.
  /// Errors: kResourceExhausted if not even one fits, or the reduction's buckets.
  GradientFlow(Context& context, ParamCache& cache, GradHome& home, std::size_t accumulators_max,
               const ReductionSettings& reduction);

  /// A unit so small that an accumulator of the largest size would be wasted on it (an embedding's
  /// stays for the whole backward) takes one of its own size.
  static constexpr bool takes_own_accumulator(std::uint64_t size_bytes,
                                              std::uint64_t largest_bytes) noexcept {
    return size_bytes * 2 <= largest_bytes;
  }

  /// Host memory that the norm takes beside its sums: for copies of what the CPU sums run by run,
  /// where it cannot reach the device. 0: none.
  static std::uint64_t copies_bytes(const ChunkTable& table, const ReductionSettings& reduction);

  struct Accumulator {
    DeviceSpan<float> values;
    Event zeroed;  ///< who adds waits for it
  };
  /// `unit`'s accumulator: zeroed when this step first asks for it. Waits for device memory. The
  /// unit's gradient must not be finished in this step.
  Task<Accumulator> accumulator(UnitId unit);
  /// Sends `unit`'s gradient on its way, as part of the step that makes `generation`; returns at
  /// once. What Context::compute does from now on comes after all that was added (Compute::after).
  /// A constant unit needs no accumulator, and nothing is sent.
  void finish(UnitId unit, std::uint64_t generation);

  bool finished(UnitId unit) const noexcept { return stages_[unit] == Stage::kFinished; }

  /// Every unit was finished and has arrived. Errors: kInvalidArgument naming a unit without a
  /// gradient.
  Task<> all_arrived();
  /// After all_arrived() it has this rank's slices. The messages of other ranks are for the caller
  /// to exchange.
  GradientNorm& norm() noexcept { return norm_; }

  /// The step is over: gradients of the next one may be asked for.
  void begin_step();

 private:
  Task<> flow(UnitId unit, Need need, std::shared_ptr<GradientReducer::Reduction> reduction);
  Task<> flow_chunk(ChunkId chunk, DeviceSpan<float> accumulator, Need need, Signal* reduced);
  Task<> round(ChunkId chunk, DeviceSpan<float> accumulator);
  Task<> sum_copies(ChunkId chunk, TypedDeviceSpan<const std::byte> rounded);
  Task<DeviceBuffer> take_accumulator(std::uint64_t size_bytes);
  Task<DeviceBuffer> one_more(std::uint64_t size_bytes);

  enum class Stage : std::uint8_t { kNone, kAccumulating, kFinished };
  Context& context_;
  ParamCache& cache_;
  GradHome& home_;
  std::vector<Stage> stages_;          // per unit
  std::vector<DeviceBuffer> buffers_;  // per unit
  std::vector<Event> zeroed_;          // per unit
  std::vector<DeviceBuffer> spare_;    // accumulators set aside and free
  Signal spare_returned_;
  Lease norm_memory_;
  GradientNorm norm_;
  std::unique_ptr<SpareBuffers> copies_;      // where copies_bytes() says so
  std::unique_ptr<GradientReducer> reducer_;  // among several ranks
  std::uint64_t finished_units_ = 0;
  std::size_t units_under_way_ = 0;
  Signal idle_;
};

}  // namespace ziggurat

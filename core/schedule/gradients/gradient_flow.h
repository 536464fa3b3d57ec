// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_flow.h: brings a unit's gradient from the trainer's fp32
// accumulator to its home, chunk by chunk. The gradient is rounded once to the model's type. In the
// same pass its squares are summed per tile, so that the norm does not depend on chunks, threads or
// placement. With several ranks, the gradient is first summed over them (gradient_reducer.h).
// Reactor's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/gradients/gradient_norm.h"
#include "core/schedule/gradients/gradient_reducer.h"
#include "core/schedule/homes/grad_home.h"
#include "core/schedule/params/residency.h"
#include "core/schedule/spare_buffers.h"

namespace ziggurat {

class GradientFlow {
 public:
  /// How many accumulators there are at most: those of the largest unit's size, which are set
  /// aside, and those of small units, if each unit's gradient is finished before the next one's
  /// begins. With two, one gradient can leave while the next unit's is computed.
  struct Most {
    std::size_t set_aside = 1;
    std::size_t own = 1;
  };
  /// Sets accumulators aside before other buffers divide the device's memory. Errors:
  /// kResourceExhausted if not even one fits, or if the reduction's buckets do not.
  GradientFlow(Context& context, Residency& residency, UnitGradHome& home, const Most& most,
               const ReductionSettings& reduction);

  /// Whether a unit takes an accumulator of its own size, because it is so small that one of the
  /// largest size would be wasted on it. (The accumulator of an embedding stays for the whole
  /// backward.)
  static constexpr bool takes_own_accumulator(std::uint64_t size_bytes,
                                              std::uint64_t largest_bytes) noexcept {
    return size_bytes * 2 <= largest_bytes;
  }

  /// Returns how much host memory the norm needs beside its sums, if the CPU cannot reach the
  /// device: for copies of gradients that the CPU sums run by run. 0 if none.
  static std::uint64_t copies_bytes(const ChunkTable& table, const ReductionSettings& reduction);

  struct Accumulator {
    DeviceSpan<float> values;
    Event zeroed;  ///< happens when `values` are zero; work that adds must wait for it
  };
  /// Returns `unit`'s accumulator, which is set to zero when a step first asks for it. Waits for
  /// device memory. The unit's gradient must not be finished in this step.
  Task<Accumulator> accumulator(UnitId unit);
  /// Sends `unit`'s gradient on its way, as part of the step that makes `generation`; returns at
  /// once. The caller must have made Context::compute wait for everything that was added
  /// (Compute::after). A constant unit needs no accumulator, and nothing is sent for it.
  void finish(UnitId unit, std::uint64_t generation);

  /// Keeps the gradient of an optional unit until it is known which of them have one on some rank.
  void keep(UnitId unit);
  /// Notes that an optional unit has no gradient in this step on any rank; waits until its last one
  /// was used.
  Task<> leave_out(UnitId unit);

  bool finished(UnitId unit) const noexcept { return stages_[unit] == Stage::kFinished; }
  bool kept(UnitId unit) const noexcept { return stages_[unit] == Stage::kKept; }

  /// Throws kInvalidArgument, naming the unit, if one has no gradient and is not optional, or has
  /// one that is not finished.
  void require_gradients() const;
  /// Waits until every gradient has arrived. Every unit was finished or left out.
  Task<> all_arrived();
  /// Returns the norm. After all_arrived() it has this rank's slices; the caller must exchange the
  /// messages of the ranks.
  GradientNorm& norm() noexcept { return norm_; }

  /// Ends the step, so that gradients of the next one may be asked for.
  void begin_step();

 private:
  void set_absent(UnitId unit, bool absent);
  Task<> flow(UnitId unit, Need need, std::shared_ptr<GradientReducer::Reduction> reduction);
  Task<> flow_chunk(ChunkId chunk, DeviceSpan<float> accumulator, Need need, Signal* reduced);
  Task<> round(ChunkId chunk, DeviceSpan<float> accumulator);
  Task<> sum_copies(ChunkId chunk, TypedDeviceSpan<const std::byte> rounded);
  Task<DeviceBuffer> take_accumulator(std::uint64_t size_bytes);
  Task<DeviceBuffer> one_more(std::uint64_t size_bytes);
  bool is_own(const DeviceBuffer& accumulator) const;

  enum class Stage : std::uint8_t { kNone, kAccumulating, kKept, kFinished };
  Context& context_;
  Residency& residency_;
  UnitGradHome& home_;
  std::vector<Stage> stages_;          // per unit
  std::vector<DeviceBuffer> buffers_;  // per unit
  std::vector<Event> zeroed_;          // per unit
  std::vector<DeviceBuffer> spare_;    // accumulators that are set aside and free
  Signal spare_returned_;
  Lease norm_memory_;
  GradientNorm norm_;
  std::unique_ptr<SpareBuffers> copies_;      // null if copies_bytes() is 0
  std::unique_ptr<GradientReducer> reducer_;  // null if there is only one rank
  std::uint64_t finished_units_ = 0;
  std::size_t units_under_way_ = 0;
  std::size_t own_most_;         // accumulators of their own size
  std::size_t own_leaving_ = 0;  // those of them whose gradients are under way
  Signal idle_;
};

}  // namespace ziggurat

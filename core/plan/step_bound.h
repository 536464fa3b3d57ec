// SPDX-License-Identifier: Apache-2.0
// core/plan/step_bound.h: computes the least time that a step can take, from its bytes, the
// bandwidths of the links and what must wait for what.
//
// The bound follows the dependencies, not only the bytes. The optimizer's sweep over NVMe-placed
// records may run
//   - without clipping: as soon as gradients arrive, so anywhere in the step:
//         bound = max(forward + backward, all work of the drive, the work of each copy link)
//   - with clipping: only after the norm, which needs the whole backward. It then runs during the
//     next forward, which cannot overtake it, and during backward only as far as leases hold
//     records (read before the norm, or written after forward's end):
//         bound = min over h in [0, leased]:  max(backward, drive work of backward + h)
//                                           + max(forward, drive work of forward + sweep - h)
//     Moving h seconds of work into backward's idle drive time is free, and moving more does not
//     help, so h = clamp(backward - its drive work, 0, leased).
// The time of compute is measured on the workers. Optimizer tiles that ran between compute tiles
// are part of it, so the optimizer's processor time is not added again. Reads and writes share the
// drive, so its bandwidth is the one measured with a mix of both. The result is a bound under the
// schedule's dependencies, not a prediction of one run. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

namespace ziggurat {

/// The work of one step. Bytes are those of one rank.
struct StepWork {
  double forward_s = 0;   ///< compute alone, without any waiting
  double backward_s = 0;  ///< includes the recomputation of activations
  double other_s = 0;  ///< work that overlaps with neither, such as loading data and calling step()

  /// Bytes of the records that the sweep reads and writes, and of other state that it moves.
  std::uint64_t sweep_nvme_bytes = 0;
  std::uint64_t forward_nvme_bytes = 0;  ///< parameters that are read for forward
  /// Parameters that are read again, and gradients that are written.
  std::uint64_t backward_nvme_bytes = 0;
  std::uint64_t host_to_device_bytes = 0;
  std::uint64_t device_to_host_bytes = 0;

  bool sweep_waits_for_norm = true;  ///< clipping is on
  /// Host memory that can hold records while the sweep may not run.
  std::uint64_t leased_bytes = 0;
};

/// Bandwidths in bytes per second. A link with 0 was not used or not measured, and limits nothing.
struct LinkSpeeds {
  double nvme = 0;  ///< measured with the step's mix of reads and writes
  double host_to_device = 0;
  double device_to_host = 0;
};

enum class StepLimit : std::uint8_t {
  kCompute,       ///< forward + backward
  kNvme,          ///< the drive works all the time
  kNvmeForward,   ///< the sweep takes longer than the forward it hides in
  kNvmeBackward,  ///< moving parameters and gradients takes longer than backward's compute
  kHostToDevice,
  kDeviceToHost,
};

/// Describes the limit: "compute", "NVMe (the sweep waits for the norm and outlasts the forward it
/// hides in)", ...
std::string to_string(StepLimit limit);

struct StepBound {
  double seconds = 0;
  StepLimit limit = StepLimit::kCompute;
  double compute_s = 0;             ///< forward + backward + other
  double nvme_s = 0;                ///< the time of the drive's work if nothing else limited it
  double hidden_in_backward_s = 0;  ///< h above
};

StepBound step_bound(const StepWork& work, const LinkSpeeds& links) noexcept;

}  // namespace ziggurat

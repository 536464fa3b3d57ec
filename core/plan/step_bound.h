// SPDX-License-Identifier: Apache-2.0
// core/plan/step_bound.h: the least time a step can take, from its bytes, the links' bandwidths and
// what must wait for what.
//
// The bound follows the dependencies, not only the bytes. The optimizer's sweep over NVMe-placed
// records may run
//   - without clipping: from the moment gradients come, so anywhere in the step:
//         bound = max(forward + backward, all of the drive's work, each copy link's work)
//   - with clipping: only after the norm, which needs the whole backward. It then hides in the next
//     forward, which cannot outrun it, and in backward only as far as leases hold records (read
//     ahead of the norm, or written after forward's end):
//         bound = min over h in [0, leased]:  max(backward, drive work of backward + h)
//                                           + max(forward, drive work of forward + sweep - h)
//     Moving h into backward's slack is free, and moving more gains nothing, so
//     h = clamp(backward - its drive work, 0, leased).
// Compute is what the workers were measured to need; optimizer tiles that ran between compute tiles
// are inside it, so the optimizer's own processor time is not added again. Reads and writes share
// the drive: its bandwidth is that of the mix. Pure functions; any thread. It is a bound under the
// schedule's dependencies, not a prediction of one run.
#pragma once

#include <cstdint>
#include <string>

namespace ziggurat {

/// Work of one step. Bytes are those of one rank.
struct StepWork {
  double forward_s = 0;   ///< compute alone, nothing waited for
  double backward_s = 0;  ///< recomputation of activations included
  double other_s = 0;     ///< what overlaps with neither: data, the step's own call

  /// Records read and written, and what the sweep itself reads and writes beside them.
  std::uint64_t sweep_nvme_bytes = 0;
  std::uint64_t forward_nvme_bytes = 0;   ///< parameters read for forward
  std::uint64_t backward_nvme_bytes = 0;  ///< parameters read again, gradients written
  std::uint64_t host_to_device_bytes = 0;
  std::uint64_t device_to_host_bytes = 0;

  bool sweep_waits_for_norm = true;  ///< clipping is on
  /// Host memory that can hold records while the sweep may not run.
  std::uint64_t leased_bytes = 0;
};

/// Bytes per second; 0 where a link was not used or not measured: it then bounds nothing.
struct LinkSpeeds {
  double nvme = 0;  ///< of the step's mix of reads and writes
  double host_to_device = 0;
  double device_to_host = 0;
};

enum class StepLimit : std::uint8_t {
  kCompute,       ///< forward + backward
  kNvme,          ///< the drive works all the time
  kNvmeForward,   ///< the sweep outlasts the forward it hides in
  kNvmeBackward,  ///< parameters and gradients outlast backward's compute
  kHostToDevice,
  kDeviceToHost,
};

/// "compute", "NVMe (the sweep waits for the norm and outlasts the forward it hides in)", ...
std::string to_string(StepLimit limit);

struct StepBound {
  double seconds = 0;
  StepLimit limit = StepLimit::kCompute;
  double compute_s = 0;             ///< forward + backward + other
  double nvme_s = 0;                ///< the drive's work, were it alone
  double hidden_in_backward_s = 0;  ///< h above
};

StepBound step_bound(const StepWork& work, const LinkSpeeds& links) noexcept;

}  // namespace ziggurat

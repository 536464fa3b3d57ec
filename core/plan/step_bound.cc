// SPDX-License-Identifier: Apache-2.0
// core/plan/step_bound.cc: evaluates the header's formula and says which of its terms is the
// largest.
#include "core/plan/step_bound.h"

#include <algorithm>

namespace ziggurat {
namespace {

double seconds(std::uint64_t size_bytes, double bytes_per_second) noexcept {
  return bytes_per_second > 0 ? static_cast<double>(size_bytes) / bytes_per_second : 0;
}

void raise(StepBound& bound, double at_least_s, StepLimit limit) noexcept {
  if (at_least_s <= bound.seconds) return;
  bound.seconds = at_least_s;
  bound.limit = limit;
}

}  // namespace

std::string to_string(StepLimit limit) {
  switch (limit) {
    case StepLimit::kCompute: return "compute";
    case StepLimit::kNvme: return "NVMe (the drive works all through the step)";
    case StepLimit::kNvmeForward:
      return "NVMe (the sweep waits for the norm and outlasts the forward it hides in)";
    case StepLimit::kNvmeBackward:
      return "NVMe (parameters and gradients outlast backward's compute)";
    case StepLimit::kHostToDevice: return "host to device link";
    case StepLimit::kDeviceToHost: return "device to host link";
  }
  return "?";
}

StepBound step_bound(const StepWork& work, const LinkSpeeds& links) noexcept {
  const double sweep_s = seconds(work.sweep_nvme_bytes, links.nvme);
  const double forward_io_s = seconds(work.forward_nvme_bytes, links.nvme);
  const double backward_io_s = seconds(work.backward_nvme_bytes, links.nvme);

  StepBound bound;
  bound.compute_s = work.forward_s + work.backward_s + work.other_s;
  bound.nvme_s = sweep_s + forward_io_s + backward_io_s;
  bound.seconds = bound.compute_s;

  if (work.sweep_waits_for_norm) {
    const double leased_s = std::min(sweep_s, seconds(work.leased_bytes, links.nvme));
    bound.hidden_in_backward_s = std::clamp(work.backward_s - backward_io_s, 0.0, leased_s);
    const double forward_drive_s = forward_io_s + sweep_s - bound.hidden_in_backward_s;
    const double backward_drive_s = backward_io_s + bound.hidden_in_backward_s;
    const double forward_s = std::max(work.forward_s, forward_drive_s);
    const double backward_s = std::max(work.backward_s, backward_drive_s);
    const bool forward_limits =
        forward_drive_s - work.forward_s >= backward_drive_s - work.backward_s;
    raise(bound, forward_s + backward_s + work.other_s,
          forward_limits ? StepLimit::kNvmeForward : StepLimit::kNvmeBackward);
  }
  raise(bound, bound.nvme_s, StepLimit::kNvme);
  raise(bound, seconds(work.host_to_device_bytes, links.host_to_device), StepLimit::kHostToDevice);
  raise(bound, seconds(work.device_to_host_bytes, links.device_to_host), StepLimit::kDeviceToHost);
  return bound;
}

}  // namespace ziggurat

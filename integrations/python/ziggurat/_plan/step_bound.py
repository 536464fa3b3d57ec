# SPDX-License-Identifier: Apache-2.0
"""Computes the least time that a step can take, from its bytes and what must wait for what
(core/plan/step_bound.h)."""

from __future__ import annotations

from dataclasses import dataclass

from ziggurat._plan.traffic import StepBytes

COMPUTE = "compute"
DRIVE = "the drive, which works all the time"
DRIVE_IN_FORWARD = "the drive in forward: the update takes longer than the forward it hides in"
DRIVE_IN_BACKWARD = "the drive in backward: parameters and gradients take longer than compute"


@dataclass(frozen=True)
class StepBound:
    """The least time of a step, and what sets it."""

    seconds: float
    limit: str
    compute_s: float
    drive_s: float  #: the drive's work, if nothing else limited it


def step_bound(
    step: StepBytes, forward_s: float, backward_s: float, bytes_per_s: float, leased_bytes: int
) -> StepBound:
    """Returns the bound of a step whose forwards and backwards compute so long, on a drive of that
    rate, with reads and writes together. The update waits for the last backward, and runs during the
    next forward. It gets ahead by what records `leased_bytes` of host memory can take."""
    update_s = step.in_update / bytes_per_s
    in_forward_s = step.in_forward / bytes_per_s
    in_backward_s = step.in_backward / bytes_per_s
    compute_s = forward_s + backward_s
    drive_s = update_s + in_forward_s + in_backward_s
    leased_s = min(update_s, leased_bytes / bytes_per_s)
    hidden_s = min(max(backward_s - in_backward_s, 0.0), leased_s)
    drive_forward_s = in_forward_s + update_s - hidden_s
    drive_backward_s = in_backward_s + hidden_s
    in_turn_s = max(forward_s, drive_forward_s) + max(backward_s, drive_backward_s)
    limit = COMPUTE
    if in_turn_s > compute_s:
        in_forward = drive_forward_s - forward_s >= drive_backward_s - backward_s
        limit = DRIVE_IN_FORWARD if in_forward else DRIVE_IN_BACKWARD
        if in_turn_s <= drive_s:
            limit = DRIVE
    return StepBound(max(in_turn_s, drive_s), limit, compute_s, drive_s)

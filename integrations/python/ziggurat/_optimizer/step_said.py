# SPDX-License-Identifier: Apache-2.0
"""Says on standard error, by plan()'s arithmetic, what memory an offloaded model's run takes and what a step
moves over the drive: when its engine was opened, and once more where a step has several backwards and sums
its gradients there."""

from __future__ import annotations

import contextlib
import functools
import weakref

from ziggurat._library.native import ZigguratError
from ziggurat._library.standard_error import stderr
from ziggurat._memory.memory import size_text
from ziggurat._optimizer.opened import Opened
from ziggurat._plan.asked_of import asked_of
from ziggurat._plan.plan_page import Plan
from ziggurat._streaming.streaming import Streaming


def say_step(streaming: Streaming, opened: Opened) -> None:
    """Says it of a step of one backward."""
    if opened.sums is not None and opened.sums_in_files:
        opened.sums.on_second = functools.partial(_say_several, weakref.ref(streaming))
    with contextlib.suppress(ZigguratError):  # it is only said
        plan = _plan_of(streaming, 1)
        read, written = plan.step.read, plan.step.written
        moved = (
            f"; a step of one backward reads {size_text(read)} from the drive and writes {size_text(written)}, at "
            "most"
        )
        print(
            f"ziggurat: offload(): the run takes {size_text(sum(plan.in_host_memory.values()))} of memory without "
            f"activations{moved if read + written else ''} (plan() says for what)",
            file=stderr(),
        )


def _say_several(this: weakref.ref[Streaming]) -> None:
    """Called where a second backward of a step is added to a gradient on the drive, for the first time."""
    streaming = this()
    if streaming is None:
        return
    with contextlib.suppress(ZigguratError):
        one, two = (_plan_of(streaming, backwards).step for backwards in (1, 2))
        alone = one.read + one.written
        print(
            f"ziggurat: offload(): several backwards make a step, and each after the first moves "
            f"{size_text(two.read + two.written - alone)} more over the drive: with a larger micro-batch, or by "
            f"ziggurat.torch.micro_batches(), a step moves about {size_text(alone)}",
            file=stderr(),
        )


def _plan_of(streaming: Streaming, backwards: int) -> Plan:
    return asked_of(streaming, backwards, clips=False).plan(has_room=True)

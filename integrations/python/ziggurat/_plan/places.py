# SPDX-License-Identifier: Apache-2.0
"""Where a run's bytes are, by what they are: in host memory, on the drive and on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat._exchange.exchange import BUCKET_BYTES, Sent, planned_bytes
from ziggurat._library.native import HostMemoryPlan
from ziggurat._library.packing import TILE
from ziggurat._memory.file_memory import LARGE_BYTES
from ziggurat._plan.from_ranks import Wire, brought_from
from ziggurat._plan.plan_page import ACTIVATIONS, GRADIENTS, NOT_SENT
from ziggurat._units.units import UnitPart

if TYPE_CHECKING:
    from ziggurat._plan.asked import Asked

IN_SLOTS = "optimizer state, in two slots"
IN_USE = "units that are in use"


class Places:
    """Rows of bytes, in the order in which a plan shows them."""

    def __init__(self, asked: Asked, budget: HostMemoryPlan, grads_on_drive: bool) -> None:
        self.in_memory: dict[str, int] = {}
        self.on_drive: dict[str, int] = {}
        self.on_gpu: dict[str, int] = {}
        self._asked, self._budget, self._grads_on_drive = asked, budget, grads_on_drive
        self._there = self.in_memory if asked.gpu is None else self.on_gpu  # where the model computes
        self._homes_here = asked.homes.params == "host"
        self._trained = asked.parts(True)
        self._kept = [part for part in (*self._trained, *asked.parts(False)) if not part.added]
        self._tables = [part for part in self._trained if self._has_grad_in_file(part)]
        self._wide = 4 if asked.accumulation > 1 else 0  # bytes of an element of a sum
        stay = asked.lives_in_units or (asked.ranks > 1 and asked.division.stays(asked.memory_bytes))
        self._unit_bytes = asked.division.taken_by_engine(asked.memory_bytes, stay)
        self._put_units()
        self._put_gradients()
        self._put_parameters()
        self._put_what_is_beside_units()
        self._put_state()
        self._put_gradients_in_files()

    def _put_units(self) -> None:
        asked = self._asked
        units = sum(unit.bytes_in_files for unit in asked.division.units)
        if not asked.lives_in_units:  # or what is used there is what is kept there
            units += self._unit_bytes
        if units:
            self._there[IN_USE] = min(asked.memory_bytes, units)
        if asked.division.prints_bytes:
            self._there["sums that tell of writes to units in use"] = asked.division.prints_bytes

    def _put_gradients(self) -> None:
        asked, here = self._asked, self.in_memory
        if asked.ranks > 1:
            here["gradients: sums of slices, and what is sent"] = self._exchanged()
            here[NOT_SENT] = self._not_sent()
        else:
            here[GRADIENTS] = sum(
                part.elements * max(part.itemsize, self._wide)
                for part in self._trained
                if not (self._grads_on_drive and part.elements >= TILE)
                # A sum in the gradient's own type is made where the first summand lies.
                and (part not in self._tables or self._wide > part.itemsize)
            )
        clipped = self._read_to_clip() if self._grads_on_drive else 0
        if clipped:
            here["largest gradient, while clipping reads it"] = clipped
        if asked.gpu is not None:
            largest = max((part.whole_bytes for part in self._trained), default=0)
            self._there["largest gradient, until it leaves"] = largest

    def _put_parameters(self) -> None:
        asked = self._asked
        if asked.gpu is not None and asked.lives_in_units:
            self._there["parameters"] = self._unit_bytes
        homes = self._home_bytes()
        if homes or asked.gpu is None:
            (self.in_memory if self._homes_here else self.on_drive)["parameters"] = homes
        if asked.hpz is not None and asked.ranks > 1:
            copies = homes * (asked.ranks - asked.hpz) // asked.hpz
            self.in_memory["copies of other ranks' parameters (hpz)"] = self._as_sent(copies)

    def _home_bytes(self) -> int:
        """Returns what parameters take where they are kept, but on the GPU."""
        by_rows = sum(part.home_bytes for part in self._kept if part.by_rows)
        if not self._homes_here:
            return self._budget.params_file_bytes + by_rows
        if self._asked.lives_in_units:
            return by_rows + (self._unit_bytes if self._asked.gpu is None else 0)
        return sum(part.home_bytes for part in self._kept)

    def _put_what_is_beside_units(self) -> None:
        asked, here = self._asked, self.in_memory
        if asked.buffer_bytes:
            self._there["buffers"] = asked.buffer_bytes
        if asked.activation_bytes:
            here[ACTIVATIONS] = asked.activation_bytes
        added = sum(param.nbytes for _, param in asked.added)
        if asked.added:
            self._there["parameters that came after offload()"] = added
        if asked.added and asked.gpu is not None:
            here["copies of parameters that came after offload()"] = added
        if asked.staged_bytes:
            here["units that are put together for the GPU"] = asked.staged_bytes

    def _put_state(self) -> None:
        asked = self._asked
        size_bytes = self._budget.budget_bytes - asked.staged_bytes
        if self._homes_here and not asked.lives_in_units:  # the engine's budget has them too
            size_bytes -= sum(part.home_bytes for part in self._kept if not part.by_rows)
        if asked.state_on_drive:
            self.in_memory["optimizer state that stays or is on its way"] = size_bytes
            self.on_drive[IN_SLOTS] = self._budget.store_bytes
        else:
            self.in_memory["optimizer state"] = size_bytes

    def _put_gradients_in_files(self) -> None:
        sums = self._budget.sums_file_bytes if self._grads_on_drive else 0
        files = 2 if self._wide and not self._grads_on_drive else 1  # what is added, and to what
        in_files = files * sum(part.elements * part.itemsize for part in self._tables)
        if sums + in_files:
            self.on_drive[GRADIENTS] = sums + in_files

    def _has_grad_in_file(self, part: UnitPart) -> bool:
        """Returns whether backward makes its gradient in a file, as _streaming/table_rows.py and
        _streaming/tiled_linear.py do."""
        is_large = part.elements * part.itemsize >= LARGE_BYTES
        return part.by_rows and is_large and self._asked.homes.params == "nvme"

    def _as_sent(self, size_bytes: int) -> int:
        """Returns what parameters take as they travel that take `size_bytes`."""
        asked = self._asked
        sized = asked.sized()
        sent, own = (brought_from(sized, asked.ranks, wire).given for wire in (asked.wire, Wire()))
        return size_bytes * sent // max(1, own)

    def _read_to_clip(self) -> int:
        """Returns what the norm of the largest gradient in a file takes, which is read whole. A 16-bit
        one is widened beside itself, and a sum is in fp32 already."""
        if not self._asked.clips:
            return 0
        large = [part for part in self._trained if part.members == 1 and part.elements >= TILE]
        again = 0 if self._asked.accumulation > 1 or self._asked.ranks > 1 else 2
        return max((part.elements * (4 + again * (part.itemsize < 4)) for part in large), default=0)

    def _exchanged(self) -> int:
        """Returns what gradients take among several ranks where they are sent and summed."""
        asked = self._asked
        params = [param for _, param in asked.trained()]
        return planned_bytes(
            [Sent(param.numel(), param.element_size(), param.element_size()) for param in params],
            asked.ranks * asked.replicas,
            in_files=self._grads_on_drive,
            replicas=asked.replicas,
            in_codes=asked.wire.gradient_bits is not None,
            adds=asked.accumulation > 1,
        )

    def _not_sent(self) -> int:
        """Returns what backward makes of a bucket before it is sent."""
        sizes = [param.nbytes for _, param in self._asked.trained()]
        return min(BUCKET_BYTES + max(sizes), sum(sizes))

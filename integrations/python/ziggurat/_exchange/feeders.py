# SPDX-License-Identifier: Apache-2.0
"""Decides when gradients are exchanged: during backward, by our hooks or by
DistributedDataParallel's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ziggurat._exchange.exchange import Bucket, GradientExchange, Sent, in_buckets, planned_bytes
from ziggurat._gradients.engine_content import EngineSums
from ziggurat._gradients.gradient import dense
from ziggurat._gradients.gradient_content import Content, Slot, Taken
from ziggurat._gradients.lent_gradient import LentGradient
from ziggurat._gradients.shared_content import SharedContent
from ziggurat._gradients.shared_in_file import SharedInFile
from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._pytorch.torch_private import at_end_of_backward, backward_number, in_backward
from ziggurat._ranks.ranks import Ranks

if TYPE_CHECKING:
    from ziggurat._pytorch.accelerator import Accelerator


def _shared(param: torch.Tensor) -> SharedContent | None:
    grad = param.grad
    content = grad._content if isinstance(grad, LentGradient) and not grad.is_view else None
    return content if isinstance(content, SharedContent) else None


class Feeder:
    """Gives gradients to an exchange, and puts what comes back into ``param.grad``."""

    def __init__(
        self,
        ranks: Ranks,
        param_of: Callable[[Slot], torch.Tensor],
        slots: Callable[[], Sequence[Slot]],
        accelerator: Accelerator | None = None,
    ) -> None:
        """`slots()` returns the slots of all parameters, in the model's order. `accelerator`: as
        GradientExchange's."""
        self.ranks = ranks
        self.exchange = GradientExchange(ranks, self._received, self._contents, accelerator)
        self._param_of = param_of
        self._slots = slots
        #: returns where slices of a slot's gradient are summed in files, and the parameter's index there
        self.place_of: Callable[[Slot], tuple[EngineSums, int] | None] = lambda slot: None

    def _made(self, slot: Slot, like: torch.Tensor) -> SharedContent:
        place = self.place_of(slot)
        if place is None:
            return SharedContent(slot, like, self.exchange)
        return SharedInFile(slot, like, self.exchange, *place)

    def _contents(self) -> list[SharedContent]:
        found = (_shared(self._param_of(slot)) for slot in self._slots())
        return [content for content in found if content is not None]

    def _content(self, slot: Slot) -> SharedContent:
        param = self._param_of(slot)
        content = _shared(param)
        if content is None:
            content = self._made(slot, param)
            param.grad = LentGradient(content)
        return content

    def _received(self, slot: Slot, total: torch.Tensor) -> None:
        self._content(slot).receive(total)

    def content(self, slot: Slot, grad: torch.Tensor) -> Content:
        """Returns the content of a gradient that backward has just made, or that was assigned."""
        return Content(slot, grad)

    def attach(self, slot: Slot) -> None:
        """Called when the optimizer gets a parameter."""

    def arrived(self, slot: Slot) -> None:
        """Called in backward when the parameter has a gradient."""

    def check_sent(self) -> None:
        """Checks at a step that gradients were exchanged. Errors: InvalidArgument if not."""

    def forget_failed(self) -> None:
        """Forgets backwards that have ended with an error, where that is harmless."""

    def together(self, backwards: int) -> contextlib.AbstractContextManager[None]:
        """Exchanges what the `backwards` inside add, once where that is possible."""
        return contextlib.nullcontext()

    def planned_bytes(self, params: Sequence[torch.Tensor]) -> int:
        """Returns the most memory that a rank takes to exchange `params` and their gradients."""
        sent = [Sent(p.numel(), self._wire(p).itemsize, p.element_size()) for p in params]
        in_files = any(self.place_of(slot) is not None for slot in self._slots())
        ranks, in_codes = self.ranks, self.ranks.codes is not None
        return planned_bytes(sent, ranks.size, ranks.line, in_files, ranks.replicas, in_codes)

    def _wire(self, param: torch.Tensor) -> torch.dtype:
        """Returns the type in which the parameter's gradient is sent."""
        return param.dtype

    def detach(self) -> None:
        pass


class BackwardFeeder(Feeder):
    """Exchanges by our own hooks, so that backward need not know of ranks."""

    def __init__(
        self,
        ranks: Ranks,
        param_of: Callable[[Slot], torch.Tensor],
        slots: Callable[[], Sequence[Slot]],
        reduce_dtype: torch.dtype | None,
        accelerator: Accelerator | None = None,
    ) -> None:
        super().__init__(ranks, param_of, slots, accelerator)
        self._reduce_dtype = reduce_dtype
        self._trained: list[Slot] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Slot, int] = {}
        # for each bucket, the slots whose gradient has not arrived since the bucket was last sent
        self._missing: list[set[Slot]] = []
        self._sent = 0  # number of buckets sent, over all rounds
        # ids of backwards that call flush() at their end, and what had been sent when each began
        self._ends: dict[int, int] = {}
        self._backwards = 1  # in which each gradient comes before it is sent
        self._came: Counter[Slot] = Counter()  # how often each has, if there are several
        self._syncing = True
        self._told_end = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backwards inside only accumulate."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextlib.contextmanager
    def whole_backward(self) -> Iterator[None]:
        """Counts all backwards inside as one, those of reentrant checkpointing too."""
        self._told_end = True
        try:
            yield
        finally:
            self._told_end = False
        if self._syncing:
            self.flush()

    @contextlib.contextmanager
    def together(self, backwards: int) -> Iterator[None]:
        """Counts the `backwards` inside, which come to each parameter in turn, as one."""
        self._backwards = backwards
        self._came.clear()
        try:
            with self.whole_backward():
                yield
        finally:
            self._backwards = 1

    def forget_failed(self) -> None:
        """Forgets backwards that have ended with an error before anything of them was sent."""
        if self._ends and set(self._ends.values()) == {self._sent}:
            self._ends.clear()
            self._missing = [set(bucket.slots) for bucket in self._buckets]

    def content(self, slot: Slot, grad: torch.Tensor) -> Content:
        if not in_backward():
            # the script assigned this gradient, so it is the same on every rank
            return Content(slot, grad)
        content = self._made(slot, grad)
        content.part = self.exchange.in_host_memory(grad)
        return content

    def arrived(self, slot: Slot) -> None:
        if not self._syncing:
            return
        if not self._told_end:
            backward = backward_number()
            if backward not in self._ends:
                self._ends[backward] = self._sent
                at_end_of_backward(functools.partial(self._ended, backward))
        self._begin_round()
        if self._backwards > 1:
            self._came[slot] += 1
            if self._came[slot] < self._backwards:
                return
        self._missing[self._bucket_of[slot]].discard(slot)
        while not self._missing[self._sent % len(self._buckets)]:
            self._send_next()

    def _ended(self, backward: int) -> None:
        self._ends.pop(backward, None)
        self.flush()

    def _begin_round(self) -> None:
        """Makes the buckets again if other parameters are trained now. That may change between two
        backwards, on all ranks alike."""
        if self._buckets and self._sent % len(self._buckets) != 0:
            return
        trained = [slot for slot in self._slots() if self._param_of(slot).requires_grad]
        if trained == self._trained:
            return
        self._trained = trained
        sized = [(slot, self._param_of(slot)) for slot in reversed(trained)]
        self._buckets = in_buckets(sized, self.ranks, self._wire)
        self._bucket_of = {
            slot: i for i, bucket in enumerate(self._buckets) for slot in bucket.slots
        }
        self._missing = [set(bucket.slots) for bucket in self._buckets]
        self._sent = 0

    def _wire(self, param: torch.Tensor) -> torch.dtype:
        """Each rank's gradient is rounded to this type once; the ranks' sum is not rounded."""
        return self._reduce_dtype or param.dtype

    def _send_next(self) -> None:
        at = self._sent % len(self._buckets)
        bucket = self._buckets[at]
        parts: list[Taken | None] = []
        for slot in bucket.slots:
            content = _shared(self._param_of(slot))
            parts.append(None if content is None else content.to_send())
        device = self.exchange.home_of(self._param_of(bucket.slots[0]).device)
        self._missing[at] = set(bucket.slots)
        self._sent += 1
        self.exchange.send(bucket, parts, device)

    def check_sent(self) -> None:
        self.forget_failed()
        if self._ends:
            raise InvalidArgument(
                "a backward ended with an error when a part of its gradients was with the other ranks already, so "
                "their sums are wrong: end the run on all ranks, and resume it"
            )
        slots = [slot for slot in self._slots() if slot.handle is None]
        # The answer is the same on all ranks. A backward in which only such parameters have
        # gradients has called no hook, so nothing was sent yet.
        if any(self._param_of(slot).requires_grad for slot in slots):
            self.flush()

    def _take_unhooked(self) -> None:
        """Takes the first gradients of parameters that were frozen until now and have no hook yet,
        because the step attaches their hooks."""
        for slot in self._trained:
            grad = self._param_of(slot).grad if slot.handle is None else None
            if grad is None or isinstance(grad, LentGradient) or grad.requires_grad:
                continue
            content = self._made(slot, grad)
            content.part = self.exchange.in_host_memory(dense(grad, slot))
            self._param_of(slot).grad = LentGradient(content)

    def _unsent(self) -> bool:
        contents = (_shared(self._param_of(slot)) for slot in self._trained)
        return any(content is not None and content.part is not None for content in contents)

    def flush(self) -> None:
        """Sends until no rank has anything left to send, and waits for what comes back."""
        self._begin_round()
        self._take_unhooked()
        count = len(self._buckets)
        while count:
            rounds, rest = divmod(self._sent, count)
            wanted = (rounds + (rest > 0 or self._unsent())) * count
            [wanted] = map(int, self.ranks.largest([wanted], "the end of a backward"))
            if wanted == self._sent:
                break
            while self._sent < wanted:
                self._send_next()
        self.exchange.finish()


def _lies_as(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Returns a gradient of DDP's bucket in a dense parameter's own memory order. DDP stores it in
    that order, but PyTorch presents it in the order of indices, and so with values at wrong
    places."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(param.shape, param.stride(), strict=True))
    if param.is_contiguous() or reach != param.numel():
        return grad
    return grad.as_strided(param.shape, param.stride(), grad.storage_offset())


class DdpFeeder(Feeder):
    """Exchanges by DistributedDataParallel's buckets: ``model.register_comm_hook(optimizer,
    ddp_hook)``."""

    def __init__(
        self,
        ranks: Ranks,
        param_of: Callable[[Slot], torch.Tensor],
        slots: Callable[[], Sequence[Slot]],
        slot_of: Callable[[torch.Tensor], Slot | None],
        model: DistributedDataParallel,
    ) -> None:
        super().__init__(ranks, param_of, slots)
        self._slot_of = slot_of
        named = model.module.named_parameters()
        theirs = [param for name, param in named if name not in model.parameters_to_ignore]
        slots_of_theirs = (slot_of(param) for param in theirs)
        # The parameters that none of DDP's buckets has had yet. After a backward those are left
        # that were frozen when DDP wrapped the model: it does not exchange their gradients.
        self._frozen = {slot: None for slot in slots_of_theirs if slot is not None}
        self._buckets: dict[tuple[Slot, ...], list[Bucket]] = {}  # our buckets for each of DDP's
        # our buckets that the backward in progress has used
        self._used: dict[tuple[Slot, ...], list[Bucket]] = {}
        self._arrived: dict[Slot, torch.Tensor] = {}
        self._before: dict[Slot, LentGradient] = {}
        self._unsent: set[Slot] = set()
        self._handles: dict[Slot, Any] = {}

    def attach(self, slot: Slot) -> None:
        param = self._param_of(slot)
        if slot not in self._handles and param.requires_grad:
            hook = functools.partial(_begins_anew, weakref.ref(self), slot)
            self._handles[slot] = param.register_hook(hook)

    def check_sent(self) -> None:
        """Checks at a step that gradients were exchanged. Errors: InvalidArgument if not."""
        if self._unsent:
            raise InvalidArgument(
                f"the gradient of parameter '{next(iter(self._unsent)).name}' was not exchanged "
                "with the other ranks: leave no_sync() before the last backward of a step"
            )
        for slot in self._frozen if self._buckets else ():
            param = self._param_of(slot)
            if param.requires_grad and param.grad is not None:
                raise InvalidArgument(
                    f"parameter '{slot.name}' was frozen when the model was wrapped in "
                    "DistributedDataParallel, so DistributedDataParallel does not exchange its "
                    "gradient: wrap the model with find_unused_parameters=True while the parameter "
                    "is trained, and freeze the parameter afterwards"
                )

    def detach(self) -> None:
        for handle in self._handles.values():
            handle.remove()

    def take(self, bucket: Any) -> None:
        """Takes a bucket of gradients that DDP has filled in backward."""
        params = bucket.parameters()
        grads = [_lies_as(*one) for one in zip(bucket.gradients(), params, strict=True)]
        slots = tuple(self._known(param) for param in params)
        for slot in slots if self._frozen else ():
            self._frozen.pop(slot, None)
        # DDP's first bucket has all gradients, because DDP does not know their order yet.
        buckets = self._buckets.get(slots)
        if buckets is None:
            sized = zip(slots, grads, strict=True)
            buckets = in_buckets(sized, self.ranks, lambda grad: grad.dtype)
        self._used[slots] = buckets
        taken = iter([Taken(grad, 1.0) for grad in grads])
        for own in buckets:
            parts = list(itertools.islice(taken, len(own.slots)))
            self.exchange.send(own, parts, grads[0].device)
        if bucket.is_last():
            # Runs after the callback that DDP is about to queue, in which it writes every grad.
            at_end_of_backward(lambda: at_end_of_backward(self._ended))

    def _known(self, param: torch.Tensor) -> Slot:
        slot = self._slot_of(param)
        if slot is None:
            raise Unimplemented(
                f"DistributedDataParallel has a parameter of shape {tuple(param.shape)} that this "
                "optimizer does not have: give the optimizer every parameter that the model "
                "trains, or freeze the other parameters before the model is wrapped"
            )
        return slot

    def _received(self, slot: Slot, total: torch.Tensor) -> None:
        before = self._before.get(slot)
        content = None if before is None else before._content
        if isinstance(content, SharedContent) and not content.consumed:
            # frees each part at once, because both the part and its sum take memory
            content.receive(total)
        else:
            self._arrived[slot] = total

    def _ended(self) -> None:
        self.exchange.finish()
        used = {slot for slot in self._arrived if self._param_of(slot).grad is not None}
        for slot in used:  # `used` has the slots that had a gradient on some rank, as DDP found
            self._param_of(slot).grad = None
        for slot, before in self._before.items():
            self._param_of(slot).grad = before
        for slot in used:
            self._content(slot).receive(self._arrived[slot])
        self._before.clear()
        self._arrived.clear()
        self._unsent.clear()
        # After its first backward DDP makes new buckets. Our buckets for the old ones, and their
        # memory, are let go.
        self._buckets, self._used = self._used, {}


def _begins_anew(owner: weakref.ref[DdpFeeder], slot: Slot, _: torch.Tensor) -> None:
    """Called before backward adds to the grad. Takes the grad away, because DDP would take it for
    this rank's."""
    feeder = owner()
    if feeder is None:
        return
    feeder._unsent.add(slot)
    param = feeder._param_of(slot)
    if isinstance(param.grad, LentGradient):
        feeder._before[slot] = param.grad
        param.grad = None


def ddp_hook(owner: weakref.ref[DdpFeeder], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The communication hook that DistributedDataParallel calls."""
    feeder = owner()
    if feeder is None:
        raise InvalidArgument(
            "the optimizer of this model no longer exists: wrap the model in "
            "DistributedDataParallel again"
        )
    feeder.take(bucket)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())  # DDP writes it to each grad; _ended() replaces those
    return done


# the annotations are text here, and DDP compares them with classes
ddp_hook.__annotations__.clear()

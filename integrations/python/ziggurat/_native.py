# SPDX-License-Identifier: Apache-2.0
"""The C interface (integrations/c/ziggurat.h) as Python objects. Addresses are plain integers."""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ziggurat._abi import (
    ABI_VERSION,
    ALL_PARAMS,
    BLOB_FOLLOWS,
    DTYPES,
    HANDLE,
    MAXIMIZE,
    NESTEROV,
    UPDATE_AT_ONCE,
    DataLoss,
    GroupStruct,
    InvalidArgument,
    Memory,
    NotFinite,
    ParamStruct,
    ResourceExhausted,
    StateStruct,
    StepOptions,
    StepResult,
    Unavailable,
    Unimplemented,
    Words,
    ZigguratError,
    call,
    library,
    memory,
    sized,
    version,
)
from ziggurat._words import in_arguments, in_settings

__all__ = [
    "ABI_VERSION",
    "DTYPES",
    "DataLoss",
    "Engine",
    "Exchange",
    "GroupStep",
    "InvalidArgument",
    "NotFinite",
    "Param",
    "Ranks",
    "ResourceExhausted",
    "Runtime",
    "Ticket",
    "Unavailable",
    "Unimplemented",
    "ZigguratError",
    "library",
    "stored_params",
    "version",
]


@dataclass(frozen=True)
class Param:
    """A parameter, and where it is: its memory is lent to the engine."""

    name: str
    shape: Sequence[int]
    dtype: str  #: "fp32", "bf16" or "fp16"
    address: int
    group: int = 0

    @property
    def count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class GroupStep:
    """What a step does to the parameters of one group."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_decay: float = 0.0  #: a parameter's step t has lr / (1 + (t - 1) * lr_decay)
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class Ranks:
    """Which of the processes of a job this one is, and where they find each other."""

    rank: int
    world_size: int
    rendezvous: str = ""  #: "HOST:PORT", an address of rank 0's machine
    secret: str = ""  #: that all ranks know; may be empty where all are on this host
    connect_timeout_s: float = 300.0  #: for all ranks to come
    call_timeout_s: float = 600.0  #: what ends the job if no rank has finished any work meanwhile


class Runtime:
    """Workers, and the thread that decides; engines share them. Closed with the object."""

    def __init__(self, threads: int = 0, ranks: Ranks | None = None) -> None:
        """With `ranks` this process is one of several, and all of them are waited for."""
        handle = HANDLE()
        settings: dict[str, Any] = {"threads": threads}
        if ranks is not None:
            settings.update(asdict(ranks))
        call("ziggurat_runtime_create", json.dumps(settings).encode(), ctypes.byref(handle))
        self.handle = handle.value
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_runtime_destroy", handle.value, os.getpid()
        )

    def close(self) -> None:
        """Does nothing the second time."""
        close(self._ended)


def text_of(name: str, *arguments: int | bytes, words: Words = in_settings) -> str:
    """Of a function that is asked twice: for its length, and for itself."""
    needed = ctypes.c_uint64()
    call(name, *arguments, None, 0, ctypes.byref(needed), words=words)
    text = ctypes.create_string_buffer(needed.value)
    call(name, *arguments, text, needed.value, None, words=words)
    return text.value.decode()


def stored_params(
    runtime: Runtime, settings: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of what the store has that ``settings["store"]`` names, in its order: of this
    rank's file. Empty where there is none. Nothing is written or locked."""
    given = json.dumps(dict(settings)).encode()
    text = text_of("ziggurat_stored_params", runtime.handle, given, words=in_arguments)
    return [(one["name"], tuple(one["shape"])) for one in json.loads(text)]


def close(ended: weakref.finalize[..., Any]) -> None:
    # Does not call the finalizer: once it was called it is dead, even if the engine refused to
    # close.
    peeked = ended.peek()
    if peeked is not None:
        _, end, arguments, _ = peeked
        end(*arguments)
        ended.detach()


def end_handle(name: str, handle: int, owner: int, *kept: object) -> None:
    # What is `kept` stays until this was called. A forked child has no threads that would answer.
    if os.getpid() == owner:
        call(name, handle)


class Engine:
    """The state of a list of parameters: masters and moments, updated step by step."""

    def __init__(
        self,
        runtime: Runtime,
        params: Sequence[Param],
        settings: Mapping[str, Any],
        kept: object = None,
        load: tuple[int, Mapping[str, Any]] | None = None,
        words: Words = in_settings,
    ) -> None:
        """`kept` has memory that is lent, and stays until the engine is closed. `load`: the handle
        of a checkpoint whose state is a new store's, and what of it (ziggurat_engine_load()).
        `words`: in which errors give advice."""
        self._words = words
        self._params = list(params)
        structs = (ParamStruct * len(self._params))()
        for given, param in zip(structs, self._params, strict=True):
            given.struct_size = ctypes.sizeof(ParamStruct)
            given.group = param.group
            given.name = param.name.encode()
            given.shape = (ctypes.c_int64 * len(param.shape))(*param.shape)
            given.dimensions = len(param.shape)
            code, element_bytes = DTYPES[param.dtype]
            values = given.values  # in place: an object for each would be made only to be copied
            values.struct_size = ctypes.sizeof(Memory)
            values.dtype, values.address = code, param.address
            values.size_bytes = param.count * element_bytes
        handle = HANDLE()
        text = json.dumps(dict(settings)).encode()
        opening = (runtime.handle, structs, len(structs), text)
        if load is None:
            call("ziggurat_engine_open", *opening, ctypes.byref(handle), words=words)
        else:
            given = json.dumps(load[1]).encode()
            call(
                "ziggurat_engine_load",
                *opening,
                load[0],
                given,
                ctypes.byref(handle),
                words=words,
            )
        self.handle = handle.value
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_engine_close", handle.value, os.getpid(), runtime, kept
        )

    def lend_gradient(
        self, index: int, dtype: str, address: int, count: int, scale: float = 1.0
    ) -> None:
        """The gradient of parameter `index` in the step to come, times `scale`; it must stay as it is
        until wait(index) after the step."""
        self._call("ziggurat_lend_gradient", index, memory(dtype, address, count), scale)

    def lend_gradients(
        self,
        indices: Sequence[int],
        dtypes: Sequence[str],
        addresses: Sequence[int],
        scales: Sequence[float],
    ) -> None:
        """lend_gradient() of many parameters, all of each, in one call."""
        codes = {name: code for name, (code, _) in DTYPES.items()}
        arrays = (
            array("Q", indices),
            array("Q", addresses),
            array("i", [codes[dtype] for dtype in dtypes]),
            array("f", scales),
        )
        self._call(
            "ziggurat_lend_gradients", len(indices), *(one.buffer_info()[0] for one in arrays)
        )

    def add_gradient(
        self, index: int, dtype: str, address: int, count: int, scale: float = 1.0
    ) -> None:
        """Adds to it in memory of the engine's; the memory is free again on return."""
        self._call("ziggurat_add_gradient", index, memory(dtype, address, count), scale)

    def discard_gradients(self) -> None:
        """No parameter has a gradient in the step to come."""
        self._call("ziggurat_discard_gradients")

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of the step to come."""
        norm = ctypes.c_double()
        self._call("ziggurat_gradient_norm", ctypes.byref(norm))
        return norm.value

    def expect_gradients(self) -> None:
        """Gradients are being computed: records may be read meanwhile."""
        self._call("ziggurat_expect_gradients")

    def lend_param(self, index: int, dtype: str, address: int, count: int) -> None:
        """The parameter was moved there."""
        self._call("ziggurat_lend_param", index, memory(dtype, address, count))

    def param_written(self, index: int) -> None:
        """Before the next step its master is taken anew from the parameter."""
        self._call("ziggurat_param_written", index)

    def step(
        self,
        groups: Sequence[GroupStep],
        grad_scale: float = 1.0,
        blob: bytes = b"",
        blob_follows: bool = False,
        update_at_once: bool = False,
    ) -> int:
        """Begins the step, and returns its generation: parameters are written until wait().

        `update_at_once`: those whose state is in memory are updated when this returns.
        """
        settings = (GroupStruct * len(groups))(
            *(
                sized(
                    GroupStruct,
                    learning_rate=group.lr,
                    beta1=group.betas[0],
                    beta2=group.betas[1],
                    eps=group.eps,
                    weight_decay=group.weight_decay,
                    lr_decay=group.lr_decay,
                    dampening=group.dampening,
                    flags=NESTEROV * group.nesterov + MAXIMIZE * group.maximize,
                )
                for group in groups
            )
        )
        options = sized(
            StepOptions,
            group_count=len(groups),
            groups=settings,
            grad_scale=grad_scale,
            flags=BLOB_FOLLOWS * blob_follows + UPDATE_AT_ONCE * update_at_once,
            blob=blob or None,
            blob_bytes=len(blob),
        )
        result = sized(StepResult)
        self._call("ziggurat_step", ctypes.byref(options), ctypes.byref(result))
        return int(result.generation)

    def give_blob(self, blob: bytes) -> None:
        """That of the newest step, which was made with blob_follows."""
        self._call("ziggurat_give_blob", blob or None, len(blob))

    def wait(self, index: int | None = None) -> None:
        """Returns when parameter `index`, or every one, is that of the newest step."""
        self._call("ziggurat_wait", ALL_PARAMS if index is None else index)

    def steps_of(self, index: int) -> int:
        """Steps that the parameter has made."""
        steps = ctypes.c_uint64()
        self._call("ziggurat_param_steps", index, ctypes.byref(steps))
        return steps.value

    def state_names(self) -> list[str]:
        """What the optimizer keeps of a parameter: "master", and torch.optim's names of moments."""
        return self._text("ziggurat_state_names").split()

    def read_state(self, index: int, name: str, address: int, count: int) -> None:
        """Copies the parameter's array `name` of the newest step there, in fp32."""
        values = memory("fp32", address, count)
        self._call("ziggurat_read_state", index, name.encode(), values)

    def write_state(self, index: int, name: str, address: int, count: int) -> None:
        """The next step goes on from what is there, copied; durable with it."""
        values = memory("fp32", address, count)
        self._call("ziggurat_write_state", index, name.encode(), values)

    def pieces_of(self, rank: int) -> dict[str, int]:
        """What a rank has of the parameters, itself included: names, and numbers of elements."""
        pieces = {}
        for line in self._text("ziggurat_pieces_of", rank).splitlines():
            count, name = line.split("\t", 1)
            pieces[name] = int(count)
        return pieces

    def read_state_of(self, rank: int, param: str, name: str, address: int, count: int) -> None:
        """read_state() of a parameter that `rank` has, which calls nothing for it."""
        values = memory("fp32", address, count)
        self._call("ziggurat_read_state_of", rank, param.encode(), name.encode(), values)

    def set_steps(self, index: int, steps: int) -> None:
        """The parameter has made as many."""
        self._call("ziggurat_set_param_steps", index, steps)

    def make_durable(self) -> None:
        """Returns when every finished step would survive a crash."""
        self._call("ziggurat_make_durable")

    def _state(self) -> StateStruct:
        state = sized(StateStruct)
        self._call("ziggurat_engine_state", ctypes.byref(state))
        return state

    @property
    def resumed(self) -> bool:
        return bool(self._state().resumed)

    @property
    def generation(self) -> int:
        return int(self._state().generation)

    @property
    def durable_generation(self) -> int:
        return int(self._state().durable_generation)

    @property
    def blob(self) -> bytes:
        """What the step that this engine resumed at was given."""
        size = self._state().blob_bytes
        room = ctypes.create_string_buffer(size)
        self._call("ziggurat_read_blob", room, size)
        return room.raw[:size]

    def describe(self) -> str:
        """What was chosen and found when the engine opened."""
        return self._text("ziggurat_describe")

    def figures(self) -> dict[str, int]:
        """What was moved and waited for so far, by all engines of the runtime."""
        figures: dict[str, int] = json.loads(self._text("ziggurat_figures"))
        return figures

    def _call(self, name: str, *arguments: Any) -> None:
        call(name, self.handle, *arguments, words=self._words)

    def _text(self, name: str, *arguments: int) -> str:
        return text_of(name, self.handle, *arguments)

    def close(self) -> None:
        """Does nothing the second time. What is not durable is lost: make_durable() comes first."""
        close(self._ended)


class Exchange:
    """What ranks exchange in host memory, beside what their engines say.

    Every rank of the runtime opens it by the same name, at the same place among its engines and
    exchanges, and begins the same calls in the same order, from any thread. The memory of a call is
    the exchange's until its ticket is finished.
    """

    def __init__(self, runtime: Runtime, name: str) -> None:
        handle = HANDLE()
        call("ziggurat_exchange_open", runtime.handle, name.encode(), ctypes.byref(handle))
        self.handle = handle.value
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_exchange_close", handle.value, os.getpid(), runtime
        )

    def all_to_all(self, input_address: int, output_address: int, slice_bytes: int) -> Ticket:
        """Slice r of the input goes to rank r, slice r of the output comes from it."""
        return self._begin("ziggurat_begin_all_to_all", input_address, output_address, slice_bytes)

    def all_gather(self, input_address: int, output_address: int, input_bytes: int) -> Ticket:
        """Slice r of the output is rank r's input, which may lie there already."""
        return self._begin("ziggurat_begin_all_gather", input_address, output_address, input_bytes)

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Their sums over the ranks, taken in the order of ranks. For a few values."""
        sums = (ctypes.c_double * len(values))(*values)
        self._begin("ziggurat_begin_all_reduce_doubles", sums, len(sums)).finish()
        return list(sums)

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self._begin("ziggurat_begin_barrier").finish()

    def _begin(self, name: str, *arguments: Any) -> Ticket:
        number = ctypes.c_uint64()
        call(name, self.handle, *arguments, ctypes.byref(number))
        return Ticket(self, number.value)

    def close(self) -> None:
        """Does nothing the second time. Waits for what is under way."""
        close(self._ended)


class Ticket:
    """A call of an exchange that is under way."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._exchange = exchange
        self._number = number

    def finish(self) -> None:
        """Waits for it; once."""
        call("ziggurat_finish", self._exchange.handle, self._number)

# SPDX-License-Identifier: Apache-2.0
"""Offers the C interface (integrations/c/ziggurat.h) as Python objects. Addresses are plain
integers."""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ziggurat._library.abi import (
    DataLoss,
    InvalidArgument,
    NotFinite,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
    Words,
    ZigguratError,
    array_of,
    call,
    constant,
    element_types,
    library,
    memory,
    sized,
    version,
)
from ziggurat._library.words import in_arguments, in_settings

__all__ = [
    "DataLoss",
    "Device",
    "Engine",
    "Exchange",
    "GroupStep",
    "HostMemoryPlan",
    "InvalidArgument",
    "MemoryChoice",
    "NotFinite",
    "Param",
    "PlacementChoice",
    "Ranks",
    "ResourceExhausted",
    "Runtime",
    "Ticket",
    "Unavailable",
    "Unimplemented",
    "ZigguratError",
    "choose_memory",
    "choose_placement",
    "library",
    "plan_host_memory",
    "simulate",
    "stored_params",
    "version",
]


_TRIED_BYTES = 1 << 20  # of a GPU, to see whether it can be used


@dataclass(frozen=True)
class Param:
    """A parameter, and its memory, which is lent to the engine. Without an address the engine keeps
    the parameter, and Engine.acquire() brings it."""

    name: str
    shape: Sequence[int]
    dtype: str  #: "fp32", "bf16" or "fp16"
    address: int | None
    group: int = 0
    unit: int = 0  #: without an address: the unit with which it is acquired, from 0 on
    #: Never trained, and not in the store: written after each open. After all that are trained.
    frozen: bool = False
    optional: bool = False  #: without an address: some steps do not use its unit
    #: Without an address: where a new store, or a load from a checkpoint that lacks it, finds its
    #: values. They are read while the engine is opened. 0: nowhere, and it begins with zeros.
    begins_at: int = 0

    @property
    def count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Places:
    """Where parameters are in the engine's memory, as of the last Engine.find()."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = array("Q", indices)
        self.addresses = array("Q", bytes(8 * len(indices)))  #: in the order of `indices`
        self.arguments = (
            len(indices),
            _run_of(ctypes.c_uint64, self._indices),
            _run_of(ctypes.c_void_p, self.addresses),
        )


@dataclass(frozen=True)
class GroupStep:
    """The settings with which a step updates the parameters of one group."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_decay: float = 0.0  #: in a parameter's step t the rate is lr / (1 + (t - 1) * lr_decay)
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class Ranks:
    """Names this process's rank in a job, and where the ranks find each other."""

    rank: int
    world_size: int
    rendezvous: str = ""  #: "HOST:PORT", an address of rank 0's machine
    secret: str = ""  #: known to all ranks; may be empty if all are on this host
    connect_timeout_s: float = 300.0  #: how long to wait for all ranks to connect
    call_timeout_s: float = 600.0  #: the job ends if no rank has finished any work for so long


class Runtime:
    """The worker threads and the engine thread, which engines share. Closed with the object."""

    def __init__(self, threads: int = 0, ranks: Ranks | None = None) -> None:
        """Waits for all ranks if `ranks` is given, because this process is then one of several."""
        settings: dict[str, Any] = {"threads": threads}
        if ranks is not None:
            settings.update(asdict(ranks))
        self.handle: int = call("ziggurat_runtime_create", json.dumps(settings).encode())
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_runtime_destroy", self.handle, os.getpid()
        )

    def abort(self, reason: str) -> None:
        """Makes all calls among the ranks fail, on all of them, with `reason`."""
        call("ziggurat_ranks_abort", self.handle, reason.encode())

    def stay(self) -> None:
        """Leaves it open until the process ends."""
        self._ended.detach()

    def close(self) -> None:
        """Closes the runtime; does nothing the second time."""
        close(self._ended)


class Device:
    """Memory of a GPU for what an engine brings: the engine whose setting "device" is its handle.
    Closed with the object."""

    def __init__(self, runtime: Runtime, gpu: int, size_bytes: int) -> None:
        """Takes `size_bytes` of the GPU with CUDA's number `gpu`. Errors: Unavailable without a GPU or a
        driver that can be used; ResourceExhausted if less is free there."""
        its = sized(
            "ziggurat_device_memory", kind=constant("CUDA_MEMORY"), index=gpu, size_bytes=size_bytes
        )
        self.handle: int = call("ziggurat_device_open", runtime.handle, its)
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_device_close", self.handle, os.getpid(), runtime
        )

    def close(self) -> None:
        """Closes the device, whose engine is closed; does nothing the second time."""
        close(self._ended)


def require_gpu(gpu: int) -> None:
    """Errors: Unavailable, with the reason, if the engine cannot use the GPU with CUDA's number `gpu`."""
    runtime = Runtime(threads=1)
    Device(runtime, gpu, _TRIED_BYTES).close()
    runtime.close()


def stored_params(
    runtime: Runtime, settings: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns name and shape of each parameter in this rank's file of the store
    ``settings["store"]``, in the store's order. Empty if there is no store. Writes and locks
    nothing."""
    return [(one["name"], tuple(one["shape"])) for one in _stored(runtime, settings)]


def stored_wholes(
    runtime: Runtime, settings: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...]]] | None:
    """Returns name and shape of each whole parameter of which this rank's file of the store has a
    part, in the store's order. None if the store does not say it. Writes and locks nothing."""
    wholes = [one["whole"] for one in _stored(runtime, settings)]
    found = [(one["name"], tuple(one["shape"])) for one in wholes if one is not None]
    return found or None


def _stored(runtime: Runtime, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = json.dumps(dict(settings)).encode()
    text = call("ziggurat_stored_params", runtime.handle, given, words=in_arguments)
    stored: list[dict[str, Any]] = json.loads(text)
    return stored


def _structs(params: Sequence[Param]) -> Any:
    """Returns the parameters as an array of C structs."""
    structs = array_of("ziggurat_param", len(params))
    frozen, optional, streamed = (constant(name) for name in ("FROZEN", "OPTIONAL", "STREAMED"))
    for given, param in zip(structs, params, strict=True):
        given.struct_size = ctypes.sizeof(given)
        given.group = param.group
        given.name = param.name.encode()
        given.shape = (ctypes.c_int64 * len(param.shape))(*param.shape)
        given.dimensions = len(param.shape)
        given.unit = param.unit
        given.flags = frozen * param.frozen | optional * param.optional
        given.flags |= streamed * (param.begins_at != 0)
        code, element_bytes = element_types()[param.dtype]
        values = given.values  # filled in place: an object for each would only be copied
        values.struct_size = ctypes.sizeof(values)
        values.dtype, values.address = code, param.address or param.begins_at
        values.size_bytes = param.count * element_bytes if values.address else 0
    return structs


@dataclass(frozen=True)
class PlacementChoice:
    """What "placement": "auto" would choose (ziggurat_choose_placement())."""

    placement: str  #: "params=host,grads=host,optimizer=nvme"
    why: str  #: names settings in backticks
    state_bytes: int  #: memory that the optimizer's state takes
    #: host_memory with which a state on nvme keeps records in memory; 0 for what the engine takes
    beside_nvme_bytes: int


def choose_placement(
    params: Sequence[Param],
    settings: Mapping[str, Any],
    free_bytes: int,
    words: Words = in_settings,
) -> PlacementChoice:
    """Asks the engine what it would choose if `free_bytes` of memory are free. Opens nothing.
    Errors: those of an engine for which nothing fits."""
    structs = _structs(params)
    given = json.dumps(dict(settings)).encode()
    text = call(
        "ziggurat_choose_placement", structs, len(structs), given, free_bytes, words=words
    )
    return PlacementChoice(**json.loads(text))


@dataclass(frozen=True)
class MemoryChoice:
    """What "auto" gives a model whose units are brought (ziggurat_choose_memory())."""

    placement: str  #: "params=device,grads=host,optimizer=nvme"
    memory: int  #: for units
    host_memory: int  #: of a state on nvme; 0 of one in host memory
    takes_bytes: int  #: of memory, without activations
    drive_bytes: int  #: that a step reads and writes on the drive
    drive_s: float  #: at the measured rate; 0 if none was measured
    why: str
    tables_by_rows: int = 0  #: of how many tables rows are read where they lie, because nothing fits else


def choose_memory(params: Sequence[Param], settings: Mapping[str, Any], facts: Mapping[str, Any]) -> MemoryChoice:
    """Asks the engine's planner what it would take. Opens nothing. Errors: ResourceExhausted if nothing fits."""
    structs = _structs(params)
    its, known = (json.dumps(dict(given)).encode() for given in (settings, facts))
    text = call("ziggurat_choose_memory", structs, len(structs), its, known, words=in_arguments)
    return MemoryChoice(**json.loads(text))


@dataclass(frozen=True)
class HostMemoryPlan:
    """How an engine that makes a new store divides its host memory (ziggurat_plan_host_memory())."""

    budget_bytes: int  #: host_memory, or what the engine takes by itself
    smallest_bytes: int  #: the least that works, with records of such a size
    all_bytes: int  #: host_memory with which all records stay
    records: int  #: that the store has
    item_bytes: int  #: the most that a record takes while it is updated
    items: int  #: records that are updated at a time
    read_bytes: int  #: of the records that do not stay, so that each step reads them
    store_bytes: int  #: the store's file
    params_file_bytes: int  #: of streamed parameters, if they are on NVMe
    sums_file_bytes: int  #: of sums of gradients, if they are on NVMe


def plan_host_memory(
    params: Sequence[Param], settings: Mapping[str, Any], host_memory: int | None, on_gpu: bool
) -> HostMemoryPlan:
    """Asks the engine how it would divide so much host memory, or what it takes by itself. `on_gpu`: whether
    streamed parameters are brought to a GPU. Opens nothing."""
    structs = _structs(params)
    given = json.dumps(dict(settings)).encode()
    kind = constant("CUDA_MEMORY" if on_gpu else "HOST_MEMORY")
    text = call(
        "ziggurat_plan_host_memory", structs, len(structs), given, host_memory or 0, kind, words=in_arguments
    )
    return HostMemoryPlan(**json.loads(text))


@dataclass(frozen=True)
class SimulatedStep:
    """A step among many, as an engine that is not open plays it (ziggurat_simulate()). Seconds."""

    seconds: float
    compute_s: float
    params_s: float  #: in which the trainer waited for parameters
    gradients_s: float  #: in which it handed gradients over
    step_s: float  #: in the step's call
    copies_busy_s: float
    update_busy_s: float
    drive_busy_s: float
    read_bytes: float  #: over the drive
    written_bytes: float
    workers: int


def simulate(params: Sequence[Param], settings: Mapping[str, Any], recording: Mapping[str, Any]) -> SimulatedStep:
    """Plays an engine by a recording of a step, on this machine as it was measured. Opens nothing. Errors:
    InvalidArgument if it was not."""
    structs = _structs(params)
    its, known = (json.dumps(dict(given)).encode() for given in (settings, recording))
    text = call("ziggurat_simulate", structs, len(structs), its, known, words=in_arguments)
    return SimulatedStep(**json.loads(text))


def close(ended: weakref.finalize[..., Any]) -> None:
    # Does not call the finalizer, because a finalizer is dead once it was called, even if the
    # engine refused to close.
    peeked = ended.peek()
    if peeked is not None:
        _, end, arguments, _ = peeked
        end(*arguments)
        ended.detach()


def end_handle(name: str, handle: int, owner: int, *kept: object) -> None:
    # `kept` stays alive until this call. A forked child has no threads that would answer.
    if os.getpid() == owner:
        call(name, handle)


def end_engine(
    handle: int, owner: int, first: Sequence[weakref.finalize[..., Any]], *kept: object
) -> None:
    # Nobody calls close() on an engine that goes out of scope, so its saves are waited for here.
    try:
        for ended in first:
            if (peeked := ended.peek()) is not None:
                peeked[0].settle()
            elif ended.alive:  # the save is garbage too, and its turn would come later
                ended()
    finally:
        end_handle("ziggurat_engine_close", handle, owner, *kept)


def _run_of(kind: Any, values: array[Any]) -> Any:
    return (kind * len(values)).from_buffer(values)


class Engine:
    """The state of a list of parameters: masters and moments, which each step updates."""

    def __init__(
        self,
        runtime: Runtime,
        params: Sequence[Param],
        settings: Mapping[str, Any],
        kept: object = None,
        load: tuple[int, Mapping[str, Any]] | None = None,
        words: Words = in_settings,
        wholes: Sequence[Param] = (),
    ) -> None:
        """Opens the engine. `wholes` are those of the setting "wholes", whose indices follow those of
        `params`. `kept` owns memory that is lent, and stays until the engine is closed.
        `load` is the handle of a checkpoint from which a new store takes its state, and what to
        take (ziggurat_engine_load()). `words` turns an error's advice into the caller's words."""
        self._words = words
        self._process = os.getpid()
        structs = _structs(list(params))
        self._params = [*params, *wholes]
        text = json.dumps(dict(settings)).encode()
        opening = (runtime.handle, structs, len(structs), text)
        if load is None:
            self.handle: int = call("ziggurat_engine_open", *opening, words=words)
        else:
            given = json.dumps(load[1]).encode()
            self.handle = call("ziggurat_engine_load", *opening, load[0], given, words=words)
        # The finalizers of saves in the background, which end before the engine is closed.
        self._first: list[weakref.finalize[..., Any]] = []
        self._ended = weakref.finalize(
            self, end_engine, self.handle, self._process, self._first, runtime, kept
        )

    def end_first(self, ended: weakref.finalize[..., Any]) -> None:
        """Has the engine's end wait for a save, whose finalizer is `ended`."""
        self._first[:] = [one for one in self._first if one.alive] + [ended]

    def lend_gradient(
        self, index: int, dtype: str, address: int, count: int, scale: float = 1.0
    ) -> None:
        """Lends the gradient of parameter `index` for the next step, which multiplies it by
        `scale`. The memory must not change until wait(index) after the step."""
        self.call("lend_gradient", index, memory(dtype, address, count), scale)

    def lend_gradients(
        self,
        indices: Sequence[int],
        dtypes: Sequence[str],
        addresses: Sequence[int],
        scales: Sequence[float],
    ) -> None:
        """Lends the whole gradients of many parameters in one call."""
        codes = {name: code for name, (code, _) in element_types().items()}
        self.call(
            "lend_gradients",
            len(indices),
            _run_of(ctypes.c_uint64, array("Q", indices)),
            _run_of(ctypes.c_void_p, array("Q", addresses)),
            _run_of(ctypes.c_int32, array("i", [codes[dtype] for dtype in dtypes])),
            _run_of(ctypes.c_float, array("f", scales)),
        )

    def add_gradient(
        self, index: int, dtype: str, address: int, count: int, scale: float = 1.0
    ) -> None:
        """Adds to a parameter's gradient in the engine's own memory; the caller's memory is free on
        return."""
        self.call("add_gradient", index, memory(dtype, address, count), scale)

    def scale_gradient(self, index: int, scale: float) -> None:
        """Sets the factor by which the step to come multiplies a gradient; of a sum, after the last
        addition."""
        self.call("scale_gradient", index, scale)

    def discard_gradient(self, index: int) -> None:
        """Takes the gradient of a parameter for the next step away, if there is one."""
        self.call("discard_gradient", index)

    def discard_gradients(self) -> None:
        """Takes all gradients for the next step away."""
        self.call("discard_gradients")

    def gradient_norm(self) -> float:
        """Returns the 2-norm of all gradients for the next step."""
        norm: float = self.call("gradient_norm")
        return norm

    def expect_gradients(self) -> None:
        """Tells that gradients are being computed, so that the engine may read records
        meanwhile."""
        self.call("expect_gradients")

    def lend_param(self, index: int, dtype: str, address: int, count: int) -> None:
        """Tells where the parameter's memory is now."""
        self.call("lend_param", index, memory(dtype, address, count))

    def param_written(self, index: int) -> None:
        """Tells that somebody has written the parameter: the next step makes its master from it.
        If the engine keeps it, its unit is acquired, and what was written there goes home."""
        self.call("param_written", index)

    def acquire(self, unit: int, stream: int | None = None) -> None:
        """Returns when all parameters of `unit` are in memory, and keeps them there until
        release(). May wait for memory that another thread releases. On a GPU what is queued on
        `stream` from now on finds them."""
        self.call("acquire", unit, stream)

    def acquire_aside(self, unit: int, stream: int | None = None) -> None:
        """Does what acquire() does for other uses than a forward or backward: parameters that come rounded
        for these are as they are."""
        self.call("acquire_aside", unit, stream)

    def release(self, unit: int, stream: int | None = None) -> None:
        """Gives the unit's memory back, on a GPU once `stream` has done what it was given so far. All
        units are released before step()."""
        self.call("release", unit, stream)

    def expect_units(self, units: Sequence[int]) -> None:
        """Tells which units are acquired next, so that they may be brought ahead."""
        self.call("expect_units", (ctypes.c_uint32 * len(units))(*units), len(units))

    def address_of(self, index: int) -> int:
        """Returns where a parameter of an acquired unit is."""
        return int(self.call("param_memory", index).address)

    def find(self, places: Places) -> None:
        """Sets the addresses of parameters of acquired units, in one call."""
        self.call("param_addresses", *places.arguments)

    def read_param(self, index: int, address: int) -> None:
        """Copies a parameter that the engine keeps to `address`, in its own type."""
        self.call("read_param", index, self._memory_of(index, address))

    def write_param(self, index: int, address: int) -> None:
        """Copies the values at `address`, in its own type, into a parameter that the engine
        keeps."""
        self.call("write_param", index, self._memory_of(index, address))

    def read_gradient(self, index: int, address: int) -> bool:
        """Copies the gradient for the next step, times its scale, to `address` in fp32. Returns
        False, and copies nothing, if there is none."""
        values = memory("fp32", address, self._params[index].count)
        return bool(self.call("read_gradient", index, values))

    def _memory_of(self, index: int, address: int) -> Any:
        param = self._params[index]
        return memory(param.dtype, address, param.count)

    def step(
        self,
        groups: Sequence[GroupStep],
        grad_scale: float = 1.0,
        blob: bytes = b"",
        blob_follows: bool = False,
        update_at_once: bool = False,
    ) -> int:
        """Begins a step and returns its generation. The engine may write parameters until wait()
        returns.

        With `update_at_once` the parameters whose state is in memory are updated when this
        returns.
        """
        nesterov, maximize = constant("NESTEROV"), constant("MAXIMIZE")
        settings = array_of("ziggurat_group", len(groups))
        settings[:] = [
            sized(
                "ziggurat_group",
                learning_rate=group.lr,
                beta1=group.betas[0],
                beta2=group.betas[1],
                eps=group.eps,
                weight_decay=group.weight_decay,
                lr_decay=group.lr_decay,
                dampening=group.dampening,
                flags=nesterov * group.nesterov + maximize * group.maximize,
            )
            for group in groups
        ]
        flags = constant("BLOB_FOLLOWS") * blob_follows
        flags += constant("UPDATE_AT_ONCE") * update_at_once
        options = sized(
            "ziggurat_step_options",
            group_count=len(groups),
            groups=settings,
            grad_scale=grad_scale,
            flags=flags,
            blob=ctypes.cast(blob, ctypes.c_void_p),
            blob_bytes=len(blob),
        )
        return int(self.call("step", options).generation)

    def give_blob(self, blob: bytes) -> None:
        """Gives the blob of the newest step, which was made with blob_follows."""
        self.call("give_blob", blob or None, len(blob))

    def wait(self, index: int | None = None) -> None:
        """Returns when parameter `index`, or every parameter, has the value of the newest step."""
        self.call("wait", constant("ALL_PARAMS") if index is None else index)

    def steps_of(self, index: int) -> int:
        """Returns how many steps the parameter has made."""
        steps: int = self.call("param_steps", index)
        return steps

    def state_names(self) -> list[str]:
        """Returns the names of the arrays that the optimizer keeps: "master", and torch.optim's
        names of moments."""
        return str(self.call("state_names")).split()

    def read_state(self, index: int, name: str, address: int, count: int) -> None:
        """Copies array `name` of the parameter, as of the newest step, to `address`, in fp32."""
        values = memory("fp32", address, count)
        self.call("read_state", index, name.encode(), values)

    def write_state(self, index: int, name: str, address: int, count: int) -> None:
        """Copies the values into the parameter's array `name`. The next step uses them, and makes
        them durable."""
        values = memory("fp32", address, count)
        self.call("write_state", index, name.encode(), values)

    def pieces_of(self, rank: int) -> dict[str, int]:
        """Returns name and number of elements of each parameter that `rank`, which may be this
        rank, has a part of."""
        pieces = {}
        for line in self.call("pieces_of", rank).splitlines():
            count, name = line.split("\t", 1)
            pieces[name] = int(count)
        return pieces

    def read_state_of(self, rank: int, param: str, name: str, address: int, count: int) -> None:
        """Reads state as read_state() does, of a parameter that `rank` holds. That rank need not
        call anything."""
        values = memory("fp32", address, count)
        self.call("read_state_of", rank, param.encode(), name.encode(), values)

    def set_steps(self, index: int, steps: int) -> None:
        """Sets how many steps the parameter has made."""
        self.call("set_param_steps", index, steps)

    def make_durable(self) -> None:
        """Returns when every finished step would survive a crash."""
        self.call("make_durable")

    def _state(self) -> Any:
        return self.call("engine_state")

    @property
    def resumed(self) -> bool:
        return bool(self._state().resumed)

    @property
    def blob_ranks(self) -> int:
        """The number of ranks of whose rank 0 the blob is, if the store was divided among other
        ranks since; otherwise 0."""
        return int(self._state().blob_ranks)

    @property
    def generation(self) -> int:
        return int(self._state().generation)

    @property
    def durable_generation(self) -> int:
        return int(self._state().durable_generation)

    @property
    def blob(self) -> bytes:
        """The blob of the step at which this engine resumed."""
        size = self._state().blob_bytes
        room = ctypes.create_string_buffer(size)
        self.call("read_blob", room, size)
        return room.raw[:size]

    def describe(self) -> str:
        """Returns a text about what was chosen and found when the engine opened."""
        return str(self.call("describe"))

    def figures(self) -> dict[str, int]:
        """Returns counters of what all engines of the runtime have moved and waited for so far."""
        figures: dict[str, int] = json.loads(self.call("figures"))
        return figures

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls ziggurat_NAME of ziggurat.h for this engine, and returns the value, struct or text
        that it gives."""
        if os.getpid() != self._process:
            raise InvalidArgument(
                f"{name}() was called in a forked process, which has no engine: use the optimizer, and an "
                "offloaded model, only in the process that opened the engine"
            )
        return call(f"ziggurat_{name}", self.handle, *arguments, words=self._words)

    def close(self) -> None:
        """Closes the engine; does nothing the second time. State that is not durable is lost: call
        make_durable() first."""
        close(self._ended)


def quantized_bytes(bits: int, count: int) -> int:
    """Returns how many bytes `count` elements take in codes of so many bits."""
    size_bytes: int = call("ziggurat_quantized_bytes", bits, count)
    return size_bytes


def quantize(
    runtime: Runtime, bits: int, dtype: str, address: int, rows: int, count: int, codes: int, stride_bytes: int
) -> None:
    """Encodes `rows` rows of `count` elements at `address`; the codes of each begin `stride_bytes` after
    those of the row before."""
    values = memory(dtype, address, rows * count)
    call("ziggurat_quantize", runtime.handle, bits, values, rows, codes, stride_bytes)


def sum_quantized(
    runtime: Runtime, bits: int, codes: int, rows: int, stride_bytes: int, sums: int, count: int
) -> None:
    """Sums rows of codes in their order, in fp32, to `count` elements at `sums`."""
    call("ziggurat_sum_quantized", runtime.handle, bits, codes, rows, stride_bytes, memory("fp32", sums, count))


class Exchange:
    """Exchanges data in host memory among ranks, beside what their engines exchange.

    Every rank of the runtime opens the exchange by the same name, at the same place among its
    engines and exchanges, and begins the same calls in the same order, from any thread. A call's
    memory belongs to the exchange until the call's ticket is finished.
    """

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.handle: int = call("ziggurat_exchange_open", runtime.handle, name.encode())
        self._ended = weakref.finalize(
            self, end_handle, "ziggurat_exchange_close", self.handle, os.getpid(), runtime
        )

    def all_to_all(self, input_address: int, output_address: int, slice_bytes: int) -> Ticket:
        """Sends slice r of the input to rank r, and receives slice r of the output from rank r."""
        return self._begin("ziggurat_begin_all_to_all", input_address, output_address, slice_bytes)

    def all_gather(self, input_address: int, output_address: int, input_bytes: int) -> Ticket:
        """Gathers each rank's input into the output: slice r is rank r's, and may lie there
        already."""
        return self._begin("ziggurat_begin_all_gather", input_address, output_address, input_bytes)

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over the ranks, added in the order of ranks. Meant for a few values."""
        sums = (ctypes.c_double * len(values))(*values)
        self._begin("ziggurat_begin_all_reduce_doubles", sums, len(sums)).finish()
        return list(sums)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._begin("ziggurat_begin_barrier").finish()

    def _begin(self, name: str, *arguments: Any) -> Ticket:
        return Ticket(self, call(name, self.handle, *arguments))

    def close(self) -> None:
        """Waits for calls in progress, and closes; does nothing the second time."""
        close(self._ended)


class Ticket:
    """A call of an exchange that is in progress."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._exchange = exchange
        self._number = number

    def finish(self) -> None:
        """Waits for the call; may be called once."""
        call("ziggurat_finish", self._exchange.handle, self._number)

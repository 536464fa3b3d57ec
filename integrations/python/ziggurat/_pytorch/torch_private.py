# SPDX-License-Identifier: Apache-2.0
"""What this package calls of PyTorch that PyTorch keeps to itself, each with the reason.

No other file calls into ``torch._C`` or autograd's engine, and a test looks for that. What an optimizer uses without offload() is in
all versions since 2.4. What offload() needs beside it is looked for when offload() is first asked for, not here: importing this
needs none of it. The attributes of tensors (``_version``, ``_base``, ``_is_view()``), and names without an underscore of torch.utils'
private modules, are used where they are needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ziggurat._library.native import InvalidArgument, Unimplemented

_KNOWN = "2.12 and 2.13"  #: with which the tests of offload() have run
_NEEDED = (
    "UntypedStorage._swap_data_ptr_",
    "UntypedStorage._new_with_weak_ptr",
    "UntypedStorage._cdata",
    "Tensor._base",
    "Tensor._is_view",
    "Tensor._is_zerotensor",
    "Tensor._use_count",
    "Tensor._version",
    "autograd.Variable._execution_engine.queue_callback",
    "_C.DisableTorchFunctionSubclass",
    "_C._autograd._get_sequence_nr",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._construct_storage_from_data_pointer",
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._functorch.peek_interpreter_stack",
    "_C._has_storage",
    "_C._set_throw_on_mutable_data_ptr",
    "_C._storage_Use_Count",
    "_neg_view",
    "overrides._get_current_function_mode_stack",
    "overrides._pop_mode",
    "overrides._push_mode",
    "utils._python_dispatch._disable_current_modes",
    "utils._python_dispatch._get_current_dispatch_mode_stack",
    "utils._pytree.tree_iter",
)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_C: Any = torch._C
_CPU = torch.device("cpu")


def require_for_offload() -> None:
    """Errors: Unimplemented where PyTorch has not what offload() needs, which names it."""
    missing = [f"torch.{name}" for name in _NEEDED if not _has(name)]
    if not missing and not _numbers_nodes():
        missing = ["numbers of a graph's nodes that grow"]
    if not missing:
        return
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        raise Unimplemented(
            f"offload() needs PyTorch 2.12 or later, and this is {torch.__version__}: update "
            "PyTorch, or train without offload()"
        )
    raise Unimplemented(
        f"offload() needs {', '.join(missing)}, which PyTorch {torch.__version__} does not have: install a version "
        f"that is known to work, which {_KNOWN} are, or train without offload()"
    )


def _has(name: str) -> bool:
    try:
        functools.reduce(getattr, name.split("."), torch)
    except AttributeError:
        return False
    return True


def _numbers_nodes() -> bool:
    first = next_number()
    with torch.enable_grad():
        node = torch.zeros(1, device="cpu", requires_grad=True).clone().grad_fn
    return hasattr(node, "_sequence_nr") and first <= number_of(node) < next_number()


# -- the memory of a storage, which nothing public can exchange


def swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchanges the memory of two storages, with all that belongs to it."""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def over(address: int, size_bytes: int, device: torch.device = _CPU) -> torch.UntypedStorage:
    """Returns a storage whose memory is somebody else's. What is public (from_buffer, from_file) owns or maps its own."""
    made: torch.UntypedStorage = _C._construct_storage_from_data_pointer(address, device, size_bytes)
    return made


def read_as(tensor: torch.Tensor, its_bytes: torch.Tensor) -> torch.Tensor:
    """Returns bytes of a tensor as that one reads its own: conjugated or negated, which are bits of a tensor."""
    made = its_bytes.conj() if tensor.is_conj() else its_bytes
    return torch._neg_view(made) if tensor.is_neg() else made


def refuse_writes(tensor: torch.Tensor) -> None:
    """Lets each access for writing to the tensor's storage raise."""
    _C._set_throw_on_mutable_data_ptr(tensor)


def address_of(storage: torch.UntypedStorage) -> int:
    """Returns the address of the C++ object, which stays the storage's own wherever its memory is."""
    address: int = storage._cdata
    return address


def has_storage(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor has a storage, as sparse ones and those of transforms have not."""
    return bool(_C._has_storage(tensor))


def uses_of(storage: torch.UntypedStorage) -> int:
    """Returns how many tensors and objects of Python have the storage."""
    count: int = _C._storage_Use_Count(storage._cdata)
    return count


def uses_of_tensor(tensor: torch.Tensor) -> int:
    """Returns how many in C++ have the tensor, its object in Python being one."""
    its: Any = tensor
    return int(its._use_count())


def storage_of(weak: Any) -> torch.UntypedStorage | None:
    """Returns the storage of torch.multiprocessing's StorageWeakRef, or None if it is gone. Python's weak references
    are to one of the objects that stand for a storage, and it may outlive that one."""
    made: Any = torch.UntypedStorage
    storage: torch.UntypedStorage | None = made._new_with_weak_ptr(weak.cdata)
    return storage


# -- autograd: which backward runs, and in what order


def backward_number() -> int:
    """Returns the number of the backward that runs in this thread, or -1. Hooks are not told it."""
    number: int = _C._current_graph_task_id()
    return number


def in_backward() -> bool:
    return backward_number() != -1


def keeps_graph() -> bool:
    """Returns whether the backward that runs was called with retain_graph, or that is not known."""
    known = getattr(_C._autograd, "_get_current_graph_task_keep_graph", None)
    return known is None or bool(known())


def in_python_function() -> bool:
    """Returns whether the backward of a torch.autograd.Function runs, which may return any tensor as a gradient. What
    PyTorch's own nodes return is new."""
    return isinstance(_C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Lets the backward that runs call this at its end. A hook of a parameter may come before other gradients."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def next_number() -> int:
    """Returns the number that the next node of this thread's graphs gets. The larger is first in backward."""
    return int(_C._autograd._get_sequence_nr())


def number_of(node: Any) -> int:
    return int(node._sequence_nr())


def may_be_output(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor that a node saves may be what the node makes. PyTorch tells it to no hook."""
    node = tensor.grad_fn
    # PyTorch's own nodes are made right before they save. A Function is made before its forward, which may make others.
    its_own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return node is not None and (its_own or number_of(node) >= next_number() - 1)


def saved_tensors_hooks() -> Any:
    """Returns the innermost pair of hooks for saved tensors, or None: ours call those that a script has set."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def in_functional_transform() -> bool:
    """Returns whether torch.func computes: values are not known then, and hooks for saved tensors are refused."""
    return _C._functorch.peek_interpreter_stack() is not None


# -- what PyTorch's allocators give and take back, in order


@contextlib.contextmanager
def recorded_allocations(found: list[tuple[str, int]]) -> Iterator[None]:
    """Adds to `found`, when the block has ended, in order what the allocators gave (bytes) and took back (less than 0)
    in it, each with "", and the marks of mark(), each with 0. The profiler that is public has the same, but writes lines
    on standard error, and its events would have to be sorted by their time. Errors: InvalidArgument in another
    profiler's block."""
    if _C._autograd._profiler_enabled():
        raise InvalidArgument("plan() cannot record a step while another profiler records: call it outside of that block")
    profiler = _C._profiler
    with_memory = (False, True, False, False, False)  # without shapes, stacks, operations and modules
    config = profiler.ProfilerConfig(profiler.ProfilerState.CPU, *with_memory, profiler._ExperimentalConfig())
    _C._autograd._enable_profiler_legacy(config)
    try:
        yield
    finally:
        threads = [thread for thread in _C._autograd._disable_profiler_legacy() if thread]
        events = [event for thread in threads for event in thread]
        if len(threads) > 1:
            first = threads[0][0]
            events.sort(key=first.cpu_elapsed_us)
        for event in events:
            if event.kind() == "memory_alloc":
                found.append(("", event.cpu_memory_usage() + event.cuda_memory_usage()))
            elif event.kind() == "push" and event.name().startswith(_MARK):
                found.append((event.name()[len(_MARK) :], 0))


_MARK = "ziggurat: "


def mark(name: str) -> None:
    """Lets recorded_allocations() find this place. Unlike record_function() it allocates nothing."""
    with _C._profiler._RecordFunctionFast(_MARK + name):
        pass


# -- classes of tensors, and the compiler


def as_plain_tensors() -> Any:
    """Returns a context in which no __torch_function__ of a subclass is asked."""
    return _C.DisableTorchFunctionSubclass()


def no_torch_function() -> Any:
    """Returns the __torch_function__ that a class has whose operations give plain tensors, as Parameter's do."""
    return _C._disabled_torch_function_impl


def without_modes() -> Any:
    """Returns a context without the modes that a script has entered, which see each operation of this package too."""
    python_dispatch: Any = torch.utils._python_dispatch
    return python_dispatch._disable_current_modes()


def dispatch_modes() -> list[Any]:
    """Returns the modes that a script has entered in this thread, of which others know nothing."""
    python_dispatch: Any = torch.utils._python_dispatch
    return list(python_dispatch._get_current_dispatch_mode_stack())


def function_modes() -> list[Any]:
    """Returns this thread's modes that are asked before an operation, as a default device is one."""
    overrides: Any = torch.overrides
    return list(overrides._get_current_function_mode_stack())


@contextlib.contextmanager
def function_mode(mode: Any) -> Iterator[None]:
    """Enters a mode for this thread too, without its own __enter__, which may keep something for the thread that called it."""
    overrides: Any = torch.overrides
    overrides._push_mode(mode)
    try:
        yield
    finally:
        overrides._pop_mode()


def elements_overlap(tensor: torch.Tensor) -> bool:
    """Returns whether elements of the tensor are known to share memory, as an expanded one's do."""
    return torch._debug_has_internal_overlap(tensor) == 1


def uncompiled(function: _Function) -> _Function:
    """Keeps torch.compile out of a function. torch.compiler.disable() does it too, but imports the compiler at once."""
    kept: _Function = torch._disable_dynamo(function)
    return kept

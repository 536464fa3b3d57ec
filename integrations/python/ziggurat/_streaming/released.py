# SPDX-License-Identifier: Apache-2.0
"""The class of a parameter while it is away, which tells who uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from ziggurat._library.native import InvalidArgument
from ziggurat._pytorch.torch_private import as_plain_tensors

# What reads no values, by the name of the method or property. PyTorch's optimizers, clipping and
# backward need nothing else of a parameter.
_METADATA = frozenset(
    """
    __hash__ __len__ _backward_hooks _fix_weakref _is_view _post_accumulate_grad_hooks _version backward
    device dim dtype element_size get_device grad grad_dtype grad_fn has_names is_complex is_conj
    is_contiguous is_cpu is_cuda is_floating_point is_inference is_leaf is_meta is_mps is_mkldnn
    is_neg is_nested is_quantized is_signed is_sparse is_xla is_xpu itemsize layout name names
    nbytes ndim ndimension nelement numel output_nr register_hook
    register_post_accumulate_grad_hook requires_grad requires_grad_ retains_grad shape size
    storage_offset stride untyped_storage _cdata is_ipu is_maia is_vulkan is_mtia
    empty_like full_like ones_like rand_like randn_like zeros_like
    new_empty new_full new_ones new_zeros _has_compatible_shallow_copy_type _parse_to
    """.split()
)


class Released(torch.nn.Parameter):
    """A parameter whose values are away. Metadata is as ever; what else becomes of a use, that
    says which keeps the parameter: mostly an error."""

    #: called with a function, its name, the parameter and the arguments
    used: Callable[[Any, str, torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if reads_nothing(func):
            with as_plain_tensors():
                return func(*args, **kwargs)
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Released):
                return cls.used(func, _name_of(func), value, args, kwargs)
        return NotImplemented

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            values = Released.used(torch.Tensor.clone, "deepcopy", self, (self,), {})
            memo[id(self)] = torch.nn.Parameter(values, self.requires_grad)
        made: torch.Tensor = memo[id(self)]
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(away, shape={tuple(self.shape)}, dtype={self.dtype})"


# Functions that read no values; at first those to which parameters are only named. An optimizer asks
# for the gradient of each parameter, several times a step.
_known: set[Any] = {torch.autograd.grad, torch.autograd.backward}


def reads_nothing(func: Any) -> bool:
    """Returns whether a function or property needs no values of the parameters that it gets."""
    if func in _known:
        return True
    harmless = _name_of(func) in _METADATA
    if harmless:
        _known.add(func)
    return harmless


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(func.__self__, "__name__", name)
    return name


class NoAddress(InvalidArgument, NotImplementedError):
    """A parameter that is away was asked for its address. PEFT, which asks at the end of a merge, goes on
    as for all tensors that have none."""


# What modules call to convert parameters to a type or device, under the same names.
CONVERSIONS = frozenset({"to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16"})


def changes_nothing(func: Any, param: torch.Tensor, args: Any, kwargs: Any) -> bool:
    """Returns whether a conversion of the parameter would return it as it is."""
    if kwargs.get("memory_format") is not None:
        return False
    with as_plain_tensors():
        alike = torch.empty(0, dtype=param.dtype, device=param.device)
        try:
            return func(alike, *args[1:], **kwargs) is alike
        except (RuntimeError, AssertionError):  # there is no such device
            return False

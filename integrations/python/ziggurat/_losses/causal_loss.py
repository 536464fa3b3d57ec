# SPDX-License-Identifier: Apache-2.0
"""Lets a causal language model of transformers compute its loss without building its logits.

In a forward with labels and gradients the head returns a stand-in, from which the model's
loss_function makes the loss. offload() takes only a model whose forward can be seen to do nothing else
with its logits; what it or a script does with them nevertheless is an error.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from ziggurat._library.native import InvalidArgument, Unimplemented
from ziggurat._library.standard_error import stderr
from ziggurat._losses.chunked_loss import chunked_cross_entropy, default_chunk
from ziggurat._losses.forward_source import head_of_forward
from ziggurat._memory.memory import size_text
from ziggurat._pytorch.subclass import CHUNKED_LOSS, subclass
from ziggurat._pytorch.torch_private import uncompiled
from ziggurat._streaming.streaming import tiled_of

VOCABULARY_MIN = 16 << 10  #: the smallest vocabulary whose logits are not built unless asked

# hidden, and the weight and bias of the head
_MadeOf = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def find_head(model: torch.nn.Module, asked: bool | None) -> tuple[Any, str] | None:
    """Returns the causal language model in `model` and the name of its head, if the loss is to be
    computed in chunks, as is `asked` (None: where it can be, and matters). Errors: Unimplemented, which
    says why it cannot be."""
    if asked is False:
        return None
    try:
        causal, name = _understood(model)
    except Unimplemented:
        if asked:
            raise
        return None
    vocabulary = getattr(causal, name).out_features
    return (causal, name) if asked or vocabulary >= VOCABULARY_MIN else None


def compute_in_chunks(causal: Any, name: str) -> _Seam:
    """Makes forwards of `causal` with labels and gradients compute their loss without logits. Says it.
    Returns what belongs to the pass that runs: `made`."""
    head = getattr(causal, name)
    seam = _Seam(causal, name)
    causal.__dict__[CHUNKED_LOSS] = head.__dict__[CHUNKED_LOSS] = seam
    causal.__class__ = _made_model(type(causal))
    head.__class__ = _made_head(type(head))
    tiled = tiled_of(head.weight)
    words = head.out_features if tiled is None else tiled.rows  # that are computed at a time
    print(
        f"ziggurat: offload(): {seam.model} computes its loss {default_chunk(words)} tokens at "
        "a time, and with labels and gradients its output has no logits, which would take "
        f"{size_text(4 * head.out_features)} a token in fp32; chunked_loss=False builds them",
        file=stderr(),
    )
    return seam


class _Seam:
    """What the model, its head and its loss know of the forward that runs."""

    def __init__(self, causal: Any, name: str) -> None:
        self.model = type(causal).__name__
        own, head = weakref.ref(causal), weakref.ref(getattr(causal, name))
        self._has_head = lambda: getattr(own(), name, None) is head()
        names = list(inspect.signature(causal.forward).parameters)
        self._labels_at = names.index("labels")
        #: the stand-ins of the forward that runs; None: it builds logits, or none runs
        self.made: list[_Logits] | None = None

    # torch.compile does not know that two functions are the same.
    @uncompiled
    def is_wanted(self, loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether a forward with these arguments has no use for logits but transformers' own
        loss."""
        labels = kwargs.get("labels")
        if len(args) > self._labels_at:
            labels = args[self._labels_at]
        if not torch.is_grad_enabled() or labels is None or loss is not _causal_lm_loss():
            return False
        return self._has_head()  # an adapter that came later reads logits

    def run(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns what `forward` returns, whose head builds no logits."""
        made: list[_Logits] = []
        before, self.made = self.made, made
        try:
            return forward(*args, **kwargs)
        finally:
            for logits in made:
                logits.drop()
            self.made = before

    @uncompiled
    def stand_in(self, head: torch.nn.Linear, hidden: torch.Tensor) -> _Logits:
        logits = _Logits(self.model, (hidden, head.weight, head.bias))
        assert self.made is not None
        self.made.append(logits)
        return logits

    def loss(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: int | torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **ignored: Any,
    ) -> torch.Tensor:
        """As transformers' ForCausalLMLoss."""
        if not isinstance(logits, _Logits):
            whole: torch.Tensor = _causal_lm_loss()(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **ignored
            )
            return whole
        (hidden, weight, bias), changes = logits.take()
        if vocab_size != weight.shape[0]:
            raise InvalidArgument(
                f"{self.model}: its head has {weight.shape[0]} words, and the config's vocab_size is "
                f"{vocab_size}: make them equal, or give offload() chunked_loss=False"
            )
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return chunked_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            shift_labels.reshape(-1),
            bias=bias,
            ignore_index=ignore_index,
            num_items_in_batch=num_items_in_batch,
            **changes,
        )


class LogitsNotBuilt(InvalidArgument, AttributeError):
    """Logits were read of a forward that has computed its loss without them. An AttributeError too,
    so that hasattr() says that they have nothing."""


class _Logits:
    """Stands for the logits of a forward. In the forward they can be scaled, and limited by a softcap,
    as the loss takes them; all else is an error."""

    def __init__(self, model: str, made_of: _MadeOf) -> None:
        self._model = model
        self._made_of: _MadeOf | None = made_of
        self._scale = 1.0
        self._after_tanh: float | None = None  # what tanh was multiplied by

    def take(self) -> tuple[_MadeOf, dict[str, Any]]:
        """Returns what the logits would be made of, which is dropped here, and how they were changed."""
        made_of = self._present("loss_function")
        self.drop()
        if self._after_tanh is None:
            return made_of, {"logit_scale": self._scale}
        scale = self._scale * self._after_tanh
        return made_of, {"logit_scale": scale, "softcap": self._after_tanh}

    def drop(self) -> None:
        self._made_of = None

    def _present(self, use: str) -> _MadeOf:
        if self._made_of is None:
            self._refuse(use)
        return self._made_of

    def _refuse(self, use: str) -> NoReturn:
        raise LogitsNotBuilt(
            f"{use}: this forward of {self._model} had labels and gradients, and has computed its loss "
            "without building the logits: call it without labels or under torch.no_grad() for logits, "
            "or give offload() chunked_loss=False"
        )

    @property
    def device(self) -> torch.device:
        return self._present("device")[0].device

    def float(self) -> _Logits:
        self._present("float")
        return self

    def contiguous(self) -> _Logits:
        self._present("contiguous")
        return self

    def tanh(self) -> _Logits:
        self._present("tanh")
        if self._after_tanh is not None:
            self._refuse("tanh of tanh")
        self._after_tanh = 1.0
        return self

    def __mul__(self, factor: Any) -> _Logits:
        self._present("*")
        if not isinstance(factor, (int, float)) or (self._after_tanh is not None and factor <= 0):
            self._refuse(f"* {type(factor).__name__}")
        if self._after_tanh is None:
            self._scale *= factor
        else:
            self._after_tanh *= factor
        return self

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> _Logits:
        if not isinstance(divisor, (int, float)):
            self._refuse(f"/ {type(divisor).__name__}")
        return self * (1 / divisor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # What holds the stand-in may be a list, as for torch.stack().
        found = [one for one in _flat((args, kwargs)) if isinstance(one, cls)]
        if func is torch.tanh and len(args) == 1:
            return found[0].tanh()
        found[0]._refuse(getattr(func, "__name__", "PyTorch"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python and its libraries ask any object for
            raise AttributeError(name)
        self._refuse(name)

    def __repr__(self) -> str:
        return f"<logits that {self._model} has not built>"


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: _Logits, *_: Any) -> NoReturn:
        self._refuse(name)

    return refuse


for _name in (
    *("getitem", "setitem", "len", "iter", "contains", "array", "float", "int", "index"),
    *("add", "radd", "sub", "rsub", "rtruediv", "matmul", "rmatmul", "pow", "neg", "abs"),
    *("lt", "le", "gt", "ge"),
):
    setattr(_Logits, f"__{_name}__", _refused(_name))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for one in value:
        yield from _flat(one)


@functools.cache
def _made_model(original: Any) -> type[Any]:
    """Returns the subclass of a causal language model whose loss may come without logits."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seam = self.__dict__[CHUNKED_LOSS]
        if not seam.is_wanted(super(made, self).loss_function, args, kwargs):
            return original.forward(self, *args, **kwargs)
        return seam.run(original.forward, self, *args, **kwargs)

    functools.update_wrapper(forward, original.forward)
    # Accelerate takes what has a __wrapped__ off again; Trainer reads the signature.
    del forward.__wrapped__  # type: ignore[attr-defined]
    forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]

    def loss_function(self: Any) -> Any:
        seam = self.__dict__[CHUNKED_LOSS]
        theirs = super(made, self).loss_function
        return theirs if seam.made is None else seam.loss

    def set_loss_function(self: Any, loss: Any) -> None:
        original.loss_function.fset(self, loss)

    members = {"forward": forward, "loss_function": property(loss_function, set_loss_function)}
    made = subclass(original, members)
    return made


@functools.cache
def _made_head(original: Any) -> type[Any]:
    """Returns the subclass of a head that gives a stand-in to a forward that wants no logits."""

    def forward(self: Any, input: torch.Tensor) -> Any:
        seam = self.__dict__[CHUNKED_LOSS]
        return original.forward(self, input) if seam.made is None else seam.stand_in(self, input)

    return subclass(original, {"forward": forward})


def _causal_lm_loss() -> Any:
    """Returns transformers' loss, if it is loaded."""
    module = sys.modules.get("transformers.loss.loss_utils")
    return getattr(module, "ForCausalLMLoss", None)


def _understood(model: torch.nn.Module) -> tuple[Any, str]:
    """Returns the causal language model in `model`, and the name of its head. Errors: Unimplemented."""
    found = [one for one in model.modules() if _is_causal(one)]
    if len(found) != 1:
        raise _unsupported(
            f"offload() has found {len(found)} causal language models of transformers in the "
            f"{type(model).__name__}, and takes one"
        )
    causal: Any = found[0]
    what = type(causal).__name__
    if causal.loss_function is not _causal_lm_loss():
        raise _unsupported(f"{what} has another loss than transformers' ForCausalLMLoss")
    if "forward" in causal.__dict__:
        raise _unsupported(f"the forward of {what} was replaced")
    name = head_of_forward(type(causal))
    head = getattr(causal, name, None)
    if type(head) is not torch.nn.Linear or "forward" in head.__dict__:
        raise _unsupported(f"the head '{name}' of {what} is a {type(head).__name__}, no plain Linear")
    if head._forward_hooks:
        raise _unsupported(f"the head '{name}' of {what} has hooks, which would get no logits")
    return causal, name


def _is_causal(module: torch.nn.Module) -> bool:
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    named = type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return base is not None and named and isinstance(module, base)


def _unsupported(why: str) -> Unimplemented:
    return Unimplemented(
        f"chunked_loss=True: {why}: leave chunked_loss out, or compute the loss with "
        "ziggurat.torch.chunked_cross_entropy()"
    )

# SPDX-License-Identifier: Apache-2.0
"""Optimizers for PyTorch whose masters and moments the engine keeps in host memory or on NVMe.

    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-4, placement="nvme:/fast/run")
    for batch in loader:
        model(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

All of them take these arguments beside those of PyTorch's optimizers:

``placement``
    ``"host"``; ``"nvme:/path"``: a directory for the state, in which every finished step is
    durable; or ``"auto:/path"``: host memory if the state fits into ``host_memory``, or without
    that takes up to half of the memory that is free at the first step, else that directory. "auto"
    also takes the directory if it already has a store, and for ``Resume`` and ``state="store"``,
    which need one. ``"auto"`` alone is refused if the state does not fit. The choice is printed on
    standard error, and is in ``optimizer.placement``.
``state_format``
    How masters and moments are held: "fp32", "bf16-moments", "8bit", "split" or "bf16".
``state_rounding``, ``param_rounding``
    "nearest" or "stochastic", fixed for a store's life. ``state_rounding`` says how state in bf16
    is rounded (formats "bf16-moments" and "bf16"). A new store's default is stochastic, so that
    small updates are kept on average. ``param_rounding`` says how fp32 masters are rounded to bf16
    parameters; its default is nearest. Parameters that FSDP2 shards in another dimension than the
    first can only be rounded to nearest.
``threads``
    The number of workers. 0 takes as many as PyTorch computes with; with parameters on an
    accelerator, all cores of this process's share but one. Give fewer if ``DataLoader`` has
    workers.
``host_memory``
    The budget in bytes, or a text like "2GiB". By default, or with "auto", state in host memory takes what it
    needs. State on NVMe takes an eighth of the memory that is free when it is opened, or less if
    that holds all of it. What is kept in memory is written each step, but not read.
``state``
    What ``state_dict()`` has: "full", every parameter's state, as in PyTorch; or "store", the
    store's place and generation, which take no space and can be loaded while the store is at that
    generation.
``model``
    The model that computes: each of its modules waits for its own new parameters. A model in
    DistributedDataParallel or with FSDP2's units also says how ranks exchange gradients.
``group``
    Ranks of ``torch.distributed`` that train one model without DistributedDataParallel or FSDP2.
    Backward averages gradients over them, except within ``optimizer.no_sync()``, in
    ``reduce_dtype`` or the parameters' own type. Each rank keeps a slice of the state.
``shard_group``
    How many consecutive ranks divide the state, and an offloaded model's parameters, among them (FSDP's
    hybrid sharding; of a mesh of (replicate, shard) the size of the second). Each such group has a
    copy: units are put together within it, and gradients are averaged over all ranks, with the bits
    of as many ranks without groups. Its ranks should be those of a node. None: all ranks.
``hpz``
    How many consecutive ranks share copies of an offloaded model's parameters: what they have brought from
    others, each keeps a part of in host memory until a step changes it, so that a slice comes to them
    once in a step (hpZ of ZeRO++). Never changes a bit. For ranks of nodes with a slow link between them.
``quantized_weights``
    Whether the slices of an offloaded model's parameters come in 8 bits from other ranks for a forward or a
    backward (qwZ of ZeRO++): 1.016 bytes an element, and each element is within 0.40 % of the largest
    in its block of 256. All ranks compute with the same values, this rank's slices rounded too.
    Everything else has them as they are: masters, steps, :func:`gathered`, ``state_dict()`` and
    checkpoints. "frozen": of parameters that are not trained alone.
``quantized_gradients``
    8 or 4: in so many bits ranks send each other gradients (qgZ of ZeRO++): 1.016 or 0.516 bytes an element,
    each within 0.40 % or 7.2 % of the largest in its block of 256. Sums are in fp32, in the order of ranks. Not
    together with ``reduce_dtype``.
``ranks_per_node``
    How many consecutive ranks are a node for ``quantized_gradients``, as ``LOCAL_WORLD_SIZE`` says if it
    is not given. With several nodes the ranks of each sum first, and the sums are encoded again, so that
    less leaves a node. Bits depend on it.
``exchange``
    What carries tensors between ranks: "torch", or "ziggurat", the engine's own connections.
    Results are the same to the last bit. With FSDP2 on the CPU it also carries what FSDP2's units
    gather and reduce, except in subgroups of a mesh, which always use "torch", as groups of
    ``shard_group`` and their copies do among themselves.

The state is made from the parameters at the first ``step()``. ``state_dict()`` and
``load_state_dict()`` have PyTorch's format: ``torch.optim``'s optimizers load ours and ours
theirs. :func:`save_checkpoint` writes a checkpoint, in the background if you like, that
:func:`load_checkpoint` loads on any number of ranks; :func:`load_foreign_checkpoint` loads what DeepSpeed or PyTorch saved.

:func:`offload` lets the engine keep a model's parameters too, and brings them unit by unit while they
are used; :func:`gathered` brings them for other uses, and in :func:`streamed_init` a model is built
that memory has no room for. :func:`micro_batches` brings each unit once for all micro-batches of a
step. :func:`plan` says before what a run takes and moves, and ``optimizer.why_slow()`` what limits it.
On several ranks each keeps slices of them. It computes on the CPU. :func:`chunked_cross_entropy` is the loss of a large
vocabulary without its logits.

On the CPU gradients are read and parameters written where PyTorch has them: nothing is copied. On
an accelerator both have pinned copies in host memory, which PyTorch's streams fill and empty
beside the computation; that has not been run on a real accelerator yet. A parameter without a
gradient is left alone, as in PyTorch. ``step()`` returns when all new parameters are there. With
``model=model``, and state on NVMe or parameters on an accelerator, each module instead waits for
its own parameters in the next forward; so does each unit of an offloaded model with state on NVMe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ziggurat._checkpoint.background_save import BackgroundSave
from ziggurat._checkpoint.checkpoint import save_checkpoint
from ziggurat._checkpoint.checkpoint_load import LoadedCheckpoint, load_checkpoint
from ziggurat._checkpoint.resume import Resume
from ziggurat._foreign.load import ForeignCheckpoint, load_foreign_checkpoint
from ziggurat._library.native import GroupStep, InvalidArgument
from ziggurat._library.state_kinds import optimizers
from ziggurat._losses.chunked_loss import chunked_cross_entropy
from ziggurat._offload.micro_batches import micro_batches
from ziggurat._offload.offload import offload
from ziggurat._optimizer.optimizer import EngineOptimizer, from_zero, need
from ziggurat._optimizer.plain_optimizer import plain_optimizer
from ziggurat._plan.plan import plan
from ziggurat._plan.plan_page import Plan
from ziggurat._plan.why_slow import Slow
from ziggurat._streaming.gathered import gathered
from ziggurat._streaming.streamed_init import streamed_init

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BackgroundSave",
    "ForeignCheckpoint",
    "Lion",
    "LoadedCheckpoint",
    "Plan",
    "Resume",
    "Slow",
    "chunked_cross_entropy",
    "gathered",
    "load_checkpoint",
    "load_foreign_checkpoint",
    "micro_batches",
    "offload",
    "plan",
    "save_checkpoint",
    "streamed_init",
]


class AdamW(EngineOptimizer):
    """AdamW (Loshchilov & Hutter 2019), as in ``torch.optim.AdamW``, with fp32 masters."""

    _kind = "adamw"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **where: Any,
    ) -> None:
        need(not amsgrad, "amsgrad")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **where)


class Adam(AdamW):
    """Adam (Kingma & Ba 2015), as in ``torch.optim.Adam``: decay is added to the gradient."""

    _kind = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **where: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **where)


class Lion(EngineOptimizer):
    """Lion (Chen et al. 2023, Algorithm 2)."""

    _kind = "lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **where: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **where)


class Adagrad(EngineOptimizer):
    """Adagrad (Duchi et al. 2011), as in ``torch.optim.Adagrad``.

    Every parameter's sum of squares begins at the constructor's ``initial_accumulator_value``; a
    group's own value has no effect, as in PyTorch.
    """

    _kind = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **where: Any,
    ) -> None:
        from_zero(lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value)
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        defaults["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, defaults, **where)
        self._settings["initial_accumulator"] = float(initial_accumulator_value)

    def _group_step(self, group: dict[str, Any]) -> GroupStep:
        return replace(super()._group_step(group), lr_decay=float(group["lr_decay"]))


class SGD(EngineOptimizer):
    """Gradient descent with momentum or Nesterov's momentum, as in ``torch.optim.SGD``."""

    _kind = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **where: Any,
    ) -> None:
        from_zero(momentum=momentum)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InvalidArgument(
                f"momentum={momentum} and dampening={dampening} do not fit nesterov=True, which "
                "requires a momentum and zero dampening"
            )
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"dampening": dampening, "nesterov": nesterov}
        super().__init__(params, defaults, **where)


def __getattr__(name: str) -> Any:
    """Makes the class of an optimizer that the engine has and this module does not write out."""
    if name[:1].isupper():
        for its in optimizers().values():
            if its.title == name:
                return globals().setdefault(name, plain_optimizer(its))
    raise AttributeError(f"module 'ziggurat.torch' has no attribute '{name}'")

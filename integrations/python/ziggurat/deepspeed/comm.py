# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job: this process's place among them, and ``torch.distributed`` for all else.

``init_distributed()`` finds rank and address in the launcher's variables: those of torchrun, the
DeepSpeed launcher, Open MPI, MPICH, Intel MPI and Slurm. A process without a launcher is a job of
one rank, which opens no port.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ziggurat._library.native import InvalidArgument
from ziggurat.deepspeed.accelerator import get_accelerator

__all__ = ["get_local_rank", "init_distributed"]

# The variables of each launcher: rank, number of ranks, rank on its host, number of ranks on its
# host.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Only a step that srun started has the second variable: a shell inside an allocation has not.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


class Place(NamedTuple):
    """A process's place in its job."""

    launcher: str | None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None  # rank 0's


def place_of(environment: Mapping[str, str], distributed_port: int = 29500) -> Place:
    """Finds this process's place in its job. Errors: InvalidArgument if a launcher does not tell
    where rank 0 is."""
    started = (one for one, names in _LAUNCHERS.items() if set(names[:2]) <= environment.keys())
    launcher = next(started, None)
    if launcher is None:
        return Place(None)
    rank, world_size, local_rank, local_size = _LAUNCHERS[launcher]
    place = Place(launcher, int(environment[rank]), int(environment[world_size]))
    if local_rank in environment:
        place = place._replace(local_rank=int(environment[local_rank]))
    host = environment.get("MASTER_ADDR")
    if host is None and launcher == "srun":
        host = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if host is None and environment.get(local_size) == environment[world_size]:
        host = "127.0.0.1"  # all ranks are on this host
    if host is None and place.world_size > 1:
        raise InvalidArgument(
            f"{launcher} started {place.world_size} ranks, but MASTER_ADDR is not set: export "
            "MASTER_ADDR with the host of rank 0 to all of them (mpirun -x MASTER_ADDR=host)"
        )
    port = environment.get("MASTER_PORT", str(distributed_port))
    return place._replace(address=None if host is None else f"{host}:{port}")


def _first_host(nodes: str) -> str | None:
    """Returns the first host of Slurm's list: "node03" for "node[03-05,9],other"."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return None if found is None else found[1] + (found[2] or "")


def _address_given(world_size: int, distributed_port: int) -> str:
    host = os.environ.get("MASTER_ADDR")
    if host is None:
        raise InvalidArgument(
            f"init_distributed(): there are {world_size} ranks and no launcher, but MASTER_ADDR is "
            "not set: set MASTER_ADDR and MASTER_PORT on all ranks to the host of rank 0 and a free "
            "port there, or give init_method="
        )
    return f"{host}:{os.environ.get('MASTER_PORT', distributed_port)}"


def _local_rank_given(world_size: int) -> int:
    """Returns what a script without launcher has set as LOCAL_RANK. Ranks that did not set it would
    all take the first device of their host."""
    devices = get_accelerator().device_count()
    if "LOCAL_RANK" not in os.environ and world_size > 1 and devices > 1:
        raise InvalidArgument(
            f"init_distributed(): there are {world_size} ranks and no launcher, and this host has "
            f"{devices} devices, but LOCAL_RANK is not set: set LOCAL_RANK to the number of this "
            "rank on its host, from 0"
        )
    return get_local_rank()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the ranks of this job, unless that is done, and sets RANK, WORLD_SIZE and LOCAL_RANK,
    which scripts read. Without a launcher, `rank` and `world_size` say which rank of how many this
    process is, and MASTER_ADDR and MASTER_PORT where rank 0 is. Errors: InvalidArgument if what is
    needed is not set."""
    if torch.distributed.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")
        return
    if dist_init_required is False:
        raise InvalidArgument(
            "dist_init_required=False, but torch.distributed is not initialized: call "
            "torch.distributed.init_process_group() before, or leave the argument out"
        )
    backend = dist_backend or get_accelerator().communication_backend_name()
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    place = place_of(os.environ, distributed_port)
    if rank >= 0 and world_size >= 1:
        place = place._replace(rank=rank, world_size=world_size)
    if place.launcher is None:
        place = place._replace(local_rank=_local_rank_given(place.world_size))
    if place.world_size > 1 and place.address is None and init_method is None:
        place = place._replace(address=_address_given(place.world_size, distributed_port))
    os.environ["RANK"] = str(place.rank)
    os.environ["WORLD_SIZE"] = str(place.world_size)
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    get_accelerator().set_device(place.local_rank)
    if init_method is not None:
        options["init_method"] = init_method
    elif place.address is None:
        options["store"] = torch.distributed.HashStore()  # type: ignore[attr-defined]
    else:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.address.rsplit(":", 1)
    torch.distributed.init_process_group(
        backend, rank=place.rank, world_size=place.world_size, **options
    )


def get_local_rank() -> int:
    """Returns this process's number on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    return getattr(torch.distributed, name)

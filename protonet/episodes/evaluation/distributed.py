"""Share the work of one run among processes: ``torchrun --nproc-per-node 2 -m protonet.episodes ...``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

Gathered = TypeVar("Gathered")


class ProcessGroup(NamedTuple):
    """The processes that share the work of a run, and the index of this process among them."""

    rank: int = 0  #: The index of this process, in [0, world_size).
    world_size: int = 1  #: The number of processes.

    def all_gather(self, value: Gathered) -> list[Gathered]:
        """Send a value to all processes, and return the values of all processes in the order of their ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Gathered] = [value] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values


def get_process_device(name: str) -> torch.device:
    """Return the torch device of a name; for "cuda", the processes of torchrun are distributed over the GPUs."""
    rank = os.environ.get("LOCAL_RANK")
    return torch.device(f"cuda:{int(rank) % torch.cuda.device_count()}" if name == "cuda" and rank else name)


@contextmanager
def join_process_group(device: str = "cpu") -> Iterator[ProcessGroup]:
    """Join the group of processes that torchrun started, and leave it on exit; without torchrun, yield a group of one.

    A context manager, which yields the group. The processes communicate by nccl if ``device`` is a GPU, otherwise by
    gloo. Inside another `join_process_group`, the outer call's group is yielded: to leave and join again would fail
    while other processes still use it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ProcessGroup()
        return
    if torch.distributed.is_initialized():
        yield ProcessGroup(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield ProcessGroup(torch.distributed.get_rank(), torch.distributed.get_world_size())
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()

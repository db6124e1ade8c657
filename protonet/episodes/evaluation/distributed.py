"""Processes that share the work, started by torchrun: ``torchrun --nproc-per-node 2 -m protonet.episodes ...``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

Gathered = TypeVar("Gathered")


class ProcessGroup(NamedTuple):
    """The processes that share the work, and which of them this one is."""

    rank: int = 0  #: This process, in [0, world_size).
    world_size: int = 1  #: The number of processes.

    def gather(self, value: Gathered) -> list[Gathered]:
        """Exchange values: give one, and return those of all processes in the order of their ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Gathered] = [value] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values


def pick_device(name: str) -> torch.device:
    """Choose the device of a name; of "cuda", the GPU of this process: those that torchrun started take turns."""
    rank = os.environ.get("LOCAL_RANK")
    return torch.device(f"cuda:{int(rank) % torch.cuda.device_count()}" if name == "cuda" and rank else name)


@contextmanager
def join_group(device: str = "cpu") -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started, by gloo on a CPU and nccl on a GPU; without torchrun, be alone.

    ``device`` is where the tensors are that the processes exchange, such as "cpu" or "cuda". Yields the group, which is
    left at the end, once all processes are there; within a group that is joined, that one: a group cannot be left and
    joined again while other processes may still read from it.
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

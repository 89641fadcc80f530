"""Several processes that share the prompts: who this one is, and how rows come together. Without a launcher, one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from oval_core.errors import ConfigError

__all__ = ["Ranks", "ranks", "started_alone"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a run.

    Attributes:
        index: number of this one.
        count: how many there are.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one speaks for all."""
        return self.index == 0

    def share(self, items: Sequence[_T]) -> list[_T]:
        """Returns what this process does: every `count`-th, so that each gets some of every category."""
        return list(items[self.index :: self.count])

    def gather(self, items: list[_T]) -> list[_T]:
        """Returns the items of all processes, in the order of their numbers; all of them must call it."""
        if self.count == 1:
            return items
        found: list[list[_T]] = [[] for _ in range(self.count)]
        dist.all_gather_object(found, items)
        return [item for own in found for item in own]


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """Joins the processes that a launcher (`accelerate launch`, `torchrun`) started, and leaves them at the end."""
    count, index = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if count < 2:
        yield Ranks()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(_number("LOCAL_RANK", 0) % torch.cuda.device_count())
    dist.init_process_group("gloo")  # rows only, which lie in main memory
    try:
        yield Ranks(index, count)
    finally:
        dist.destroy_process_group()


def started_alone() -> bool:
    """Whether `accelerate launch --cpu` was asked for several processes and, without mpirun, started one."""
    return "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ and "RANK" not in os.environ  # fmt: skip


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(
            f"{name}: got {text!r} in the environment. Allowed: a whole number, as a launcher sets it. Unset it."
        )
    return int(text)

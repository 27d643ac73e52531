"""A process group of torch in which only this rank is real, and collectives move no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import distributed


@contextlib.contextmanager
def only_rank(rank: int, size: int) -> Iterator[None]:
    """Initialize torch's default group, and destroy it at the end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()

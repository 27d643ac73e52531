"""Worlds of 2, 3 and 4 real processes in which the tests of this folder run, one at a time for all of them.

``everywhere`` makes a test of a function that every rank calls with (rank, size). Ranks stay, because torch takes
seconds to start; what a test leaves broken is replaced before the next one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from harness.ranks import Ranks, store_to_be

SIZES = (3, *(pytest.param(size, marks=pytest.mark.nightly) for size in (2, 4)))
# cuda: needs as many GPUs as the largest world has ranks.
DEVICE = os.environ.get("CONFORMANCE_DEVICE", "cpu")
TEST_S = 20.0  # a longer test waits for something that will not happen
FORM_S = 60.0  # including the imports

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

Body = Callable[[int, int], Any]


class World:
    """``run(body)`` calls it on every rank. A failing test ends the world; the next test gets a new one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: Ranks | None = None

    def run(
        self, body: Callable[..., Any], *arguments: Any, timeout_s: float = TEST_S
    ) -> list[Any]:
        """Return the results of all ranks. Raises AssertionError with the tracebacks of those that raised."""
        ranks = self._started()
        try:
            ranks.start(body, *arguments)
        except OSError:
            self.close()
            raise AssertionError("a rank died between two tests") from None
        deadline = time.monotonic() + timeout_s
        results = [
            ranks.result(rank, max(0.1, deadline - time.monotonic())) for rank in range(self.size)
        ]
        failed = [f"rank {r}: {each}" for r, each in enumerate(results) if _failed(each)]
        if failed:
            self.close()
        assert not failed, "\n".join(failed)
        return results

    def close(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        ranks.kill()
        ranks.close()

    def _started(self) -> Ranks:
        if self._ranks is None:
            self._ranks = Ranks(self.size)
            form(self)
        return self._ranks


def shared_worlds(folder: Path) -> tuple[Any, Callable[..., None]]:
    """For a conftest: the fixture ``world``, one world for each size, and the hook that ends them after the last test
    of this folder: other tests count the children of this process.
    """
    opened: list[World] = []

    @pytest.fixture(scope="session")
    def world(request: pytest.FixtureRequest) -> Iterator[World]:
        made = World(request.param)
        opened.append(made)
        yield made
        made.close()
        opened.remove(made)

    def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is None or folder not in nextitem.path.parents:
            for each in opened:
                each.close()

    return world, pytest_runtest_teardown


def form(world: World) -> None:
    """Enter a new world on every rank, as after ``hvd.init()``."""
    world.run(_enter, store_to_be(), timeout_s=FORM_S)


def _enter(rank: int, size: int, address: Any) -> None:
    from elastic.runtime import lifecycle
    from harness.scripts import light  # noqa: F401

    if DEVICE == "cuda":  # tensors without an explicit device are on the rank's own GPU
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    lifecycle.init_static(rank, size, address)
    hvd.init(process_sets="dynamic")  # it is initialized; from now on sets can be added


def _failed(result: Any) -> bool:
    return isinstance(result, Exception)


def everywhere(*sizes: int) -> Callable[[Body], Callable[[World], None]]:
    """Decorate a test that runs in worlds of these sizes; by default of 3, and at night of 2 and 4."""

    def decorate(body: Body) -> Callable[[World], None]:
        @pytest.mark.parametrize("world", sizes or SIZES, indirect=True, ids="{}-ranks".format)
        def test(world: World) -> None:
            world.run(body)

        test.__name__ = body.__name__
        test.__doc__ = body.__doc__
        return test

    return decorate


# ---- in the ranks ------------------------------------------------------------------------------------------------


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], *texts: str
) -> Iterator[None]:
    """Expect the block to raise it, with every text (a regular expression) in its message."""
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert re.search(text, str(caught.value)), f"no {text!r} in: {caught.value}"


def works(size: int) -> None:
    """Check that collectives with and without names have the right results."""
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="still works").tolist() == [size, size]


def each(size: int, make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs of all ranks, so that a rank can compute the result itself."""
    return [make(rank) for rank in range(size)]

"""DistributedOptimizer among real processes over Gloo: equal to one process with the whole batch; never hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness.ranks import Died, Ranks, in_a_world


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield from in_a_world(3)


def test_three_ranks_train_like_one_with_the_whole_batch(ranks: Ranks):
    equal = {"dense": True, "accumulated": True, "sparse": True, "halves": True}
    assert ranks.run(train_in_all_ways) == [equal] * 3


def test_a_killed_rank_breaks_the_step_of_the_others_at_once(ranks: Ranks):
    ranks.start(killed)
    survivors = [ranks.result(rank) for rank in range(3)]
    assert isinstance(survivors.pop(1), Died)
    for raised, seconds in survivors:
        assert raised in ("PeerLost", "CollectiveFailed")
        assert seconds < 5.0


# ---- in the ranks ----------------------------------------------------------------------------------------------------


def model(*, sparse: bool = False) -> Any:
    import torch

    torch.manual_seed(0)
    if sparse:
        return torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 3))
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        torch.nn.BatchNorm2d(8, track_running_stats=False).eval(),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 300),
        torch.nn.Linear(300, 300),
        torch.nn.Linear(300, 3),
    )


def batch(number: int, *, sparse: bool = False) -> Any:
    import torch

    random = torch.Generator().manual_seed(number)
    if sparse:
        return torch.randint(50, (4, 7), generator=random)
    return torch.randn(4, 3, 8, 8, generator=random).to(memory_format=torch.channels_last)


def train(rank: int, size: int, *, passes: int = 1, sparse: bool = False, tolerance: float) -> bool:
    """Compares with a model whose gradients are the mean over all ranks' batches."""
    import torch

    from elastic.api.compression import Compression
    from elastic.optimizer import gradient_reducer
    from elastic.optimizer.distributed_optimizer import DistributedOptimizer

    gradient_reducer.FIRST_BYTES, gradient_reducer.FULL_BYTES = 4096, 65536  # several buckets
    ours, reference = model(sparse=sparse), model(sparse=sparse)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.05),
        ours.named_parameters(),
        backward_passes_per_step=passes,
        compression=Compression.fp16 if tolerance > 1e-4 else Compression.none,
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        plain.zero_grad()
        for turn in range(passes):
            numbers = [1000 * step + 100 * turn + each for each in range(size)]
            ours(batch(numbers[rank], sparse=sparse)).square().mean().backward()
            for number in numbers:
                loss = reference(batch(number, sparse=sparse)).square().mean() / size
                loss.backward()
        optimizer.step()
        plain.step()
    for mine, expected in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
    return True


def killed(rank: int, size: int) -> tuple[str, float]:
    import torch

    from elastic.errors import CollectiveFailed, PeerLost
    from elastic.optimizer.distributed_optimizer import DistributedOptimizer

    ours = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.05))
    began = time.monotonic()
    try:
        for step in range(100):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = ours(batch(step)).square().mean()
            began = time.monotonic()
            try:
                loss.backward()
                optimizer.synchronize()
            except (PeerLost, CollectiveFailed) as lost:
                return type(lost).__name__, time.monotonic() - began
            with optimizer.skip_synchronize():
                optimizer.step()
    except RuntimeError as error:
        return f"step raised {error}", time.monotonic() - began
    return "nothing", time.monotonic() - began


def train_in_all_ways(rank: int, size: int) -> dict[str, bool]:
    return {
        "dense": train(rank, size, tolerance=1e-5),
        "accumulated": train(rank, size, passes=2, tolerance=1e-5),
        "sparse": train(rank, size, sparse=True, tolerance=1e-5),
        "halves": train(rank, size, tolerance=1e-2),
    }

"""DistributedOptimizer among real processes over Gloo: equal to one process with the whole batch; never hangs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from harness.ranks import Died, Ranks, fixture, join

ranks = fixture(3, "function", enter=join)


def test_three_ranks_with_several_buckets_train_like_one_process_with_the_whole_batch(ranks: Ranks):
    assert ranks.run(train) == [True] * 3


def test_killed_rank_ends_the_step_of_surviving_ranks_at_once(ranks: Ranks):
    ranks.start(killed)
    survivors = [ranks.result(rank) for rank in range(3)]
    assert isinstance(survivors.pop(1), Died)
    for raised, seconds in survivors:
        assert raised in ("PeerLost", "CollectiveFailed")
        assert seconds < 5.0


# ---- in the ranks ----------------------------------------------------------------------------------------------------


def model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        torch.nn.BatchNorm2d(8, track_running_stats=False).eval(),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 300),
        torch.nn.Linear(300, 300),
        torch.nn.Linear(300, 3),
    )


def batch(number: int) -> Any:
    import torch

    random = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 8, 8, generator=random).to(memory_format=torch.channels_last)


def train(rank: int, size: int) -> bool:
    """Compares with a model whose gradients are the mean over all ranks' batches."""
    import torch

    from elastic.optimizer.distributed_optimizer import DistributedOptimizer
    from elastic.optimizer.gradients import gradient_reducer

    gradient_reducer.FIRST_BYTES, gradient_reducer.FULL_BYTES = 4096, 65536  # several buckets
    ours, reference = model(), model()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.05),
        ours.named_parameters(),
        backward_passes_per_step=2,
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        plain.zero_grad()
        for turn in range(2):
            numbers = [1000 * step + 100 * turn + each for each in range(size)]
            ours(batch(numbers[rank])).square().mean().backward()
            for number in numbers:
                (reference(batch(number)).square().mean() / size).backward()
        optimizer.step()
        plain.step()
    for mine, expected in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
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

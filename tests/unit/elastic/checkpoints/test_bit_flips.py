"""A bit changes, in the memory of one replica or in a file: it is found, and whose or which it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from elastic.checkpoints import catalog, commit_files
from elastic.checkpoints.files import manifest
from elastic.checkpoints.files.manifest import CommitName, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.driver.job.checkpoint_shares import (
    CheckpointShares,
    ReplicaCorrupted,
    ReplicasCorrupted,
)
from elastic.optimizer.gradients.not_finite import FirstNotFinite
from elastic.protocol.messages import Commit, NotFinite, ShareWritten, Worker
from elastic.state.snapshots.digest import WHOLE, digest
from elastic.state.state import hold
from elastic.state.torch_state import TorchState
from harness.golden import recorded

FLIPS = 150
WORKERS = [Worker("h", slot) for slot in range(3)]


def parts_of(seed: int) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Weights, moments, counters and buffers, as `commit_files.replica_digests` finds them; small and large."""
    made = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(dtype)

    weights = {
        "embedding": drawn(700, 61),
        "weight": drawn(64, 33),
        "half": drawn(50, dtype=torch.bfloat16),
    }
    return {
        "model": [*weights.items(), ("running_mean", drawn(64)), ("seen", torch.tensor(12))],
        "optimizer": [
            (f"{name}.{moment}", drawn(*value.shape))
            for name, value in weights.items()
            for moment in ("exp_avg", "exp_avg_sq")
        ]
        + [("weight.step", torch.tensor(12.0))],
    }


def flip(tensor: torch.Tensor, draw: random.Random) -> None:
    content = tensor.reshape(-1).view(torch.uint8)
    content[draw.randrange(content.numel())] ^= 1 << draw.randrange(8)


def digests(parts: dict[str, list[tuple[str, torch.Tensor]]]) -> dict[str, int]:
    return {part: digest(tensors) for part, tensors in parts.items()}


@pytest.mark.slow
def test_each_flip_in_one_of_three_replicas_is_found_and_its_worker_named():
    assert parts_of(0)["model"][0][1].nbytes > WHOLE  # one that is folded
    draw = random.Random(5)
    good = digests(parts_of(0))
    found = 0
    for number in range(FLIPS):
        shares = CheckpointShares()
        shares.world(1, WORKERS)
        for worker in WORKERS:
            shares.handle(worker, ShareWritten(1, 1, Commit(1, 1), good))
        culprit = draw.choice(WORKERS)
        damaged = parts_of(0)
        part = draw.choice([*damaged])
        flip(draw.choice(damaged[part])[1], draw)
        actions = []
        for worker in WORKERS:
            said = digests(damaged) if worker == culprit else good
            actions += shares.handle(worker, ShareWritten(1, 2, Commit(1, 2), said)) or []
        [named] = [action for action in actions if isinstance(action, ReplicaCorrupted)]
        assert (named.worker, named.parts, named.equal) == (culprit, [part], 2), f"flip {number}"
        found += 1
    assert found == FLIPS


def trained_to_nan(*, flipped: int | None, bad_batch: int | None) -> list[object]:
    """What the driver makes of replicas that are compared only when their gradients are NaN."""
    nets = [torch.nn.Linear(4, 1) for _ in WORKERS]
    firsts = [FirstNotFinite() for _ in WORKERS]
    for net in nets:
        net.load_state_dict(nets[0].state_dict())
    if flipped is not None:  # the highest bit of an exponent
        nets[flipped].weight.data.view(torch.int32)[0, 1] = 0x7F000000
    for _ in range(3):
        found = []
        for rank, net in enumerate(nets):
            batch = torch.full((2, 4), torch.inf if rank == bad_batch else 1.0 + rank)
            loss = net(batch).square().sum()
            found.append(torch.autograd.grad(loss, [*net.parameters()]))
        means = [torch.stack(each).mean(0) for each in zip(*found, strict=True)]
        for net, first in zip(nets, firsts, strict=True):
            first.look("0", means, net.named_parameters())
            with torch.no_grad():
                for parameter, mean in zip(net.parameters(), means, strict=True):
                    parameter.sub_(mean, alpha=0.01)
                    parameter.nan_to_num_(torch.nan, torch.nan, torch.nan)  # all are spoilt alike
    shares = CheckpointShares()
    shares.world(1, WORKERS)
    actions: list[object] = []
    for worker in WORKERS:
        shares.handle(worker, ShareWritten(1, 1, Commit(1, 1), {"model": 7}))
    for worker, first in zip(WORKERS, firsts, strict=True):
        assert first.lasts() and first.digest() is not None
        actions += shares.handle(worker, NotFinite(1, Commit(1, 2), first.digest())) or []
    return actions


def test_flip_that_corrupted_all_replicas_is_found_by_the_step_before():
    assert trained_to_nan(flipped=1, bad_batch=None) == [
        ReplicasCorrupted(1, Commit(1, 2), [WORKERS[1]], 2)
    ]


def test_no_worker_is_blamed_when_a_batch_made_all_replicas_nan():
    assert trained_to_nan(flipped=None, bad_batch=1) == []


GOOD, BAD = torch.ones(3), torch.tensor([1.0, -torch.inf, 1.0])
ZEROS, ONES = [("w", torch.zeros(2))], [("w", torch.ones(2))]


def test_first_non_finite_gradient_is_forgotten_once_all_are_finite():
    first = FirstNotFinite()
    first.look("0", [GOOD, BAD], ZEROS)
    found = first.digest()
    first.look("0", [GOOD, BAD], ONES)
    assert found is not None and first.digest() == found  # the first one counts
    first.look("0", [GOOD, GOOD], ONES)
    assert first.digest() is None and not first.lasts()


def test_first_non_finite_gradient_is_forgotten_by_a_restore_of_an_earlier_commit():
    first = FirstNotFinite()
    first.saved()
    first.look("0", [BAD], ZEROS)
    first.stepped_back()
    assert first.digest() is None
    first.look("0", [BAD], ZEROS)
    first.saved()
    found = first.digest()
    first.look("1", [BAD], ONES)
    assert first.digest() != found
    first.stepped_back()
    assert found is not None and first.digest() == found


def test_digest_of_a_non_finite_gradient_ignores_optimizer_numbers_and_old_plans():
    """Its optimizer has another number where each call of a function makes one; of an older plan it knows nothing."""
    old, new = FirstNotFinite(), FirstNotFinite()
    old.look("1", [BAD], ONES)
    new.look("0", [BAD], ONES)
    assert old.digest() == new.digest() is not None
    old.look("2", [BAD], ONES)
    assert old.digest() is None


def test_rank_that_missed_the_beginning_has_no_digest_of_non_finite_gradients():
    first = FirstNotFinite()
    first.missed()
    first.look("gan", [GOOD], ZEROS)
    first.look("0", [BAD], ZEROS)
    assert first.digest() is None and first.lasts()
    first.look("gan", [BAD], ZEROS)
    assert first.digest() is not None, "it has seen when these began"


@pytest.fixture
def written(tmp_path) -> tuple[Storage, CommitName, Path]:
    """By two ranks."""
    storage, name = Storage(str(tmp_path)), CommitName(1, 2, 30)
    net = torch.nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.ones(10)).sum().backward()
    optimizer.step()
    state = TorchState(model=net, optimizer=optimizer, epoch=3, best={(1, 2)})
    state.commit()
    held = hold(state)
    for rank in range(2):
        commit_files.write_share(storage, name, held, rank, 2, lambda: None)
    commit_files.seal(storage, name, held, 2, lambda: None)
    held.release()
    return storage, name, tmp_path / str(name)


def trouble(storage: Storage, name: CommitName) -> str:
    """What is said of it; empty: nothing."""
    try:
        return catalog.verify(storage, catalog.read(storage, name))
    except UnreadableCommit as error:
        return str(error)


@pytest.mark.slow
def test_every_drawn_bit_flip_in_checkpoint_files_is_found(written):
    storage, name, folder = written
    files = [*catalog.read(storage, name).files, manifest.MANIFEST]
    assert trouble(storage, name) == ""
    draw = random.Random(6)
    for number in range(FLIPS):
        path = folder / draw.choice(files)
        whole = path.read_bytes()
        spoilt = bytearray(whole)
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        path.write_bytes(spoilt)
        assert trouble(storage, name), f"flip {number}, in {path.name}"
        path.write_bytes(whole)
    assert trouble(storage, name) == ""


def test_changed_learning_rate_in_the_manifest_is_found(written):
    storage, name, folder = written
    path = folder / manifest.MANIFEST
    changed = path.read_text().replace('"lr":0.01', '"lr":0.03')
    assert changed != path.read_text()
    path.write_text(changed)
    recorded("messages", trouble(storage, name))

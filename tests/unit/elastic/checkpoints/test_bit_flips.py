"""A bit changes, in the memory of one replica or in a file: it is found, and whose or which it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from elastic.checkpoints import catalog, manifest, writing
from elastic.checkpoints.manifest import Name, NotReadable
from elastic.checkpoints.storage import Storage
from elastic.driver.job.checkpoint_shares import CheckpointShares, Damaged
from elastic.protocol.messages import Commit, ShareWritten, Worker
from elastic.state.snapshots.digest import WHOLE, digest
from elastic.state.state import hold
from elastic.state.torch_state import TorchState

FLIPS = 500
WORKERS = [Worker("h", slot) for slot in range(3)]


def parts_of(seed: int) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Weights, moments, counters and buffers, as `writing.replica_digests` finds them; small and large."""
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


def test_of_many_flips_in_one_replica_of_three_each_is_found_and_the_culprit_named():
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
        [named] = [action for action in actions if isinstance(action, Damaged)]
        assert (named.worker, named.parts, named.equal) == (culprit, [part], 2), f"flip {number}"
        found += 1
    assert found == FLIPS


@pytest.fixture
def written(tmp_path) -> tuple[Storage, Name, Path]:
    """By two ranks."""
    storage, name = Storage(str(tmp_path)), Name(1, 2, 30)
    net = torch.nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.ones(10)).sum().backward()
    optimizer.step()
    state = TorchState(model=net, optimizer=optimizer, epoch=3, best={(1, 2)})
    state.commit()
    held = hold(state)
    for rank in range(2):
        writing.write_share(storage, name, held, rank, 2, lambda: None)
    writing.seal(storage, name, held, 2, lambda: None)
    held.release()
    return storage, name, tmp_path / str(name)


def trouble(storage: Storage, name: Name) -> str:
    """What is said of it; empty: nothing."""
    try:
        return catalog.verify(storage, catalog.read(storage, name))
    except NotReadable as error:
        return str(error)


def test_of_many_flips_in_the_files_of_a_checkpoint_each_is_found(written):
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


def test_a_learning_rate_that_changed_in_the_manifest_is_found(written):
    storage, name, folder = written
    path = folder / manifest.MANIFEST
    changed = path.read_text().replace('"lr":0.01', '"lr":0.03')
    assert changed != path.read_text()
    path.write_text(changed)
    assert trouble(storage, name) == "its manifest.json is damaged: its checksum differs"


def test_a_manifest_of_the_format_before_has_no_checksum_and_is_read(written):
    storage, name, folder = written
    path = folder / manifest.MANIFEST
    old = path.read_text().replace('"format":2', '"format":1').partition(',"checksum"')[0] + "}"
    path.write_text(old)
    assert trouble(storage, name) == ""

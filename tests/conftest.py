"""What every test level shares: golden files that can be rewritten, needs that may be missing, and real jobs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from integration.job import Job, Process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        "--rewrite-scenarios",
        action="store_true",
        help="write golden files anew from what the code does now; read the diff afterwards",
    )


def cuda_found() -> bool:
    import torch

    return torch.cuda.is_available()


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (cuda_found, "needs a CUDA device"),
    "etcd": (lambda: shutil.which("etcd") is not None, "needs etcd; apt-get install etcd-server"),
    "ray": (lambda: importlib.util.find_spec("ray") is not None, "needs ray; pip install ray"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (found, reason) in NEEDS.items():
        if item.get_closest_marker(marker) and not found():
            pytest.skip(reason)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Says what has to run in one process where pytest-xdist runs several side by side (``--dist loadgroup``).

    The tests of a module share worlds of processes, those of `conformance` one for each size. A test that starts a job
    shares nothing, unless its module is marked otherwise.
    """
    if item.get_closest_marker("xdist_group") is not None:
        return
    callspec = getattr(item, "callspec", None)
    if "conformance" in item.path.parts:
        size = callspec.params.get("world") if callspec else None
        group = f"worlds of {size}" if size else "conformance"
    elif "job" in getattr(item, "fixturenames", ()):
        return
    else:
        group = item.path.stem
    item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs: ``job("-np 4 --min-np 2", ["python", script, "--steps", "100"], env={...})``; see `integration.job`.

    Each runs in a folder of its own. At the end of the test no process of any may be left, and the journal of each must
    keep every invariant, or the test fails. A test that breaks the product on purpose says why in ``unchecked``.
    """
    started: list[Job] = []

    def start(
        flags: str | Sequence[str],
        command: str | Sequence[str | Path],
        *,
        env: dict[str, str] | None = None,
    ) -> Job:
        folder = tmp_path / f"job{len(started)}"
        folder.mkdir()
        started.append(Job(flags, command, folder=folder, env=env))
        return started[-1]

    yield start
    left: list[Process] = [process for each in started for process in each.end()]
    assert not left, f"these processes outlived their job: {left}"
    for each in started:
        each.check_invariants()

"""Shared by all test levels: golden files that can be rewritten, requirements that may be missing, and real jobs."""

from __future__ import annotations

import asyncio
import collections
import functools
import gc
import importlib.util
import inspect
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from harness.fake_cuda import start as made_up
from harness.job import Job

pytest_plugins = ["harness.golden", "harness.spread", "harness.budgets", "harness.leftovers"]


# Compiled once, not in each process that imports it. Some machines have another setting, as many images do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        "--rewrite-scenarios",
        action="store_true",
        help="write golden files anew from what the code does now; read the diff afterwards",
    )
    parser.addoption(
        "--nightly",
        action="store_true",
        help="also what takes too long for every run: make nightly",
    )


# Number of Hypothesis's examples for a test: for make check and make test, and for make nightly.
EXAMPLES, NIGHTLY_EXAMPLES = 15, 400


def pytest_configure(config: pytest.Config) -> None:
    """Restore SIGINT: a shell without job control starts ``make test &`` with SIGINT ignored, which tests would
    inherit.
    """
    nightly = config.getoption("--nightly")
    examples = NIGHTLY_EXAMPLES if nightly else EXAMPLES
    too_slow = [HealthCheck.too_slow]  # it times what a busy machine draws, as deadlines do
    settings.register_profile(
        "ours", max_examples=examples, deadline=None, suppress_health_check=too_slow
    )
    settings.load_profile("ours")  # before any test is imported
    os.environ["ELASTIC_PREEMPTION"] = "off"  # tests must not query the cloud of this machine
    os.environ["ELASTIC_PRELOAD"] = "off"  # a test starts the processes that it needs
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Before unwanted ones are deselected by their markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        for item in items:
            if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
                item.add_marker("nightly")  # with more examples
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable the collector during imports and collection, where scanning takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What has been imported and collected stays until the end: the collector need not look at it, which took half a
    second each time that a test asks it to, and once here.
    """
    gc.freeze()


def cuda_found() -> bool:
    import torch

    return torch.cuda.is_available()


def eight_found() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() >= 8


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (cuda_found, "needs a CUDA device"),
    "gpu1": (cuda_found, "needs a CUDA device; see tests/gpu/README.md"),
    "gpu8": (eight_found, "needs eight CUDA devices; see tests/gpu/README.md"),
    "fakecuda": (lambda: made_up.missing() is None, "needs the made-up CUDA; run: make fakecuda"),
    "etcd": (lambda: shutil.which("etcd") is not None, "needs etcd; apt-get install etcd-server"),
    "spark": (
        lambda: (
            importlib.util.find_spec("pyspark") is not None and shutil.which("java") is not None
        ),
        "needs Spark; pip install pyspark; apt-get install default-jre-headless",
    ),
    "ray": (lambda: importlib.util.find_spec("ray") is not None, "needs ray; pip install ray"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (found, reason) in NEEDS.items():
        if item.get_closest_marker(marker) and not found():
            pytest.skip(reason)
    asked = "fakecuda" in (item.config.option.markexpr or "")
    if item.get_closest_marker("fakecuda") and item.get_closest_marker("slow") and not asked:
        pytest.skip("slow, on made-up GPUs; run: make fakecuda")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine functions in a separate event loop; pytest-timeout is their deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def mappings_of_its_own() -> Iterator[None]:
    """What other tests of this process have mapped of other processes stays mapped, and is not looked at: it goes
    when those processes end, which may be in the middle of any test.
    """
    from elastic.collectives.shared_memory import peer_memory

    gc.collect()
    gc.freeze()  # the rest is scanned once, and not for each test
    with pytest.MonkeyPatch.context() as patch:  # not the test's, which it may undo
        patch.setattr(peer_memory, "_open", {})
        patch.setattr(peer_memory, "_released", collections.deque())
        yield


@pytest.fixture
def threads_of_its_own() -> Iterator[None]:
    """A closing runtime does not wait for threads that other tests of this process have left in torch's code."""
    from elastic.collectives import threads_at_exit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads_at_exit, "_begun", set())
        yield


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Return whether golden files are to be rewritten."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture
def fake_cuda() -> Iterator[Callable[..., dict[str, str]]]:
    """What processes on made-up GPUs need in their environment: ``fake_cuda(gpus=3, FAKE_FAULTS="...")``.

    All of a test meet in NCCL: they share a folder, which is gone afterwards. See `harness.fake_cuda`.
    """
    reason = made_up.missing()
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        yield functools.partial(made_up.environment, Path(shared))


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """Starts jobs: ``job("-np 4 --min-np 2", ["python", script, "--steps", "100"], env={...})``; see `harness.job`.

    Each runs in a folder of its own. At the end of the test no process of any may be left, and the journal of each must
    keep every invariant, or the test fails. A test that breaks the product on purpose says why in ``unchecked``.
    Where a test is marked ``forked``, nobody waits for imports of torch, nor of the modules that the marker names.
    """
    forked = request.node.get_closest_marker("forked")
    started: list[Job] = []

    def start(
        flags: str | Sequence[str],
        command: str | Sequence[str | Path],
        *,
        env: dict[str, str] | None = None,
    ) -> Job:
        folder = tmp_path / f"job{len(started)}"
        folder.mkdir()
        started.append(
            Job(
                flags,
                command,
                folder=folder,
                env=env,
                forked=forked is not None,
                modules=forked.args if forked is not None else (),
            )
        )
        return started[-1]

    yield start
    left = [process for each in started for process in each.end()]
    assert not left, f"these processes outlived their job: {left}"
    for each in started:
        each.check_invariants()
        if recorded := os.environ.get("RECORD_JOURNALS"):
            each.record(Path(recorded), f"{request.node.name}-{each.folder.name}")

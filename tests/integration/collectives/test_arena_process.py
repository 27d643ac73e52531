"""An arena in a separate process: effects of limits and forks."""

from __future__ import annotations

import functools
import resource
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.forked import MARK, Forked
from harness.forking import WHOLE_END
from harness.processes import clean_environment

Run = Callable[[str], None]
END_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return functools.partial(run_in, tmp_path)


@pytest.mark.parametrize(
    ("limit", "size", "advice"),
    [(resource.RLIMIT_FSIZE, 1 << 20, "ulimit -f"), (resource.RLIMIT_AS, 1 << 34, "ulimit -v")],
)
def test_arena_refused_by_a_limit_leaves_no_open_descriptor(run: Run, limit, size, advice):
    program = (
        "import os, resource\n"
        "from elastic.collectives.shared_memory import arena\n"
        "before = os.listdir('/proc/self/fd')\n"
        "arena._MOST_BYTES = 1 << 36\n"
        "arena.os.sysconf = lambda name: 1 << 24\n"
        f"resource.setrlimit({limit}, ({size}, {size}))\n"
        "assert arena.mine() is None\n"
        f"assert {advice!r} in arena.why_not(), arena.why_not()\n"
        "assert os.listdir('/proc/self/fd') == before\n"
    )
    run(program)


def test_forked_child_does_not_modify_the_arena_of_its_parent(run: Run):
    program = (
        "import os, torch\n"
        "from elastic.collectives.shared_memory import arena\n"
        "mine = arena.mine()\n"
        "flat = arena.zeros(5000, torch.float32).fill_(1)\n"
        "kept = arena.zeros(5000, torch.float32).fill_(2)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        assert flat.sum() == 5000\n"
        "        kept.fill_(3)\n"
        "        assert kept.sum() == 15000\n"
        "        del flat, kept\n"
        "        own = arena.mine()\n"
        "        assert own.inode != mine.inode\n"
        "        assert own.offset_of(arena.zeros(9, torch.int8).data_ptr(), 9) is not None\n"
        "    except BaseException as error:\n"
        "        print(repr(error), flush=True)\n"
        "        os._exit(1)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert flat.sum() == 5000\n"
        "assert kept.sum() == 10000\n"
        "assert mine.lent == 40960\n"
    )
    run(program)


def test_arena_tensor_may_outlive_the_interpreter(run: Run):
    run(
        "import torch\n"
        "from elastic.collectives.shared_memory import arena\n"
        "parameter = torch.nn.Parameter(torch.ones(1000))\n"
        "parameter.grad = arena.zeros(1000, torch.float32)\n"
        "torch.kept = arena.zeros(1000, torch.float32)\n"
    )


def run_in(folder: Path, program: str) -> None:
    """Run it to its end, which must be a silent success, in a process that has imported torch."""
    script = folder / "script.py"
    script.write_text(program)
    process = Forked(
        [sys.executable, str(script)],
        folder=folder,
        env=clean_environment() | {WHOLE_END: "1"},
        mark=f"{MARK}={uuid.uuid4().hex}",
    )
    code, printed = process.wait(END_S), process.printed()
    assert (code, printed) == (0, "")

"""Reads of a script that Python's audit events show, in a separate interpreter, because a hook is permanent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from elastic.protocol import read_paths
from elastic.protocol.read_paths import DIR, ReadPaths
from harness.program import stdout_of

PROGRAM = """
import json, sys
from elastic.protocol import read_paths
read_paths.observe({"ELASTIC_CHECKPOINT_DIR": "ck"})
observed = read_paths.observed()
exec(sys.argv[1], {"__name__": "__main__"})
files, folders, unseen = observed.files, observed.folders, observed.unseen
print(json.dumps([sorted(files), sorted(folders), sorted(unseen)]))
"""


def seen(folder: Path, code: str) -> tuple[set[str], set[str], set[str]]:
    """Files and folders by their names in ``folder``, and what is not seen."""
    told = stdout_of(sys.executable, "-c", PROGRAM, code, cwd=folder)
    files, folders, unseen = json.loads(told)
    below = [
        {str(Path(path).relative_to(folder)) for path in paths if path.startswith(f"{folder}/")}
        for paths in (files, folders)
    ]
    return below[0], below[1], set(unseen)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.csv").write_text("1")
    (tmp_path / "module.py").write_text("import json")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "files", "folders"),
    [
        ("open('data/a.csv').read()", {"data/a.csv"}, set()),
        ("from pathlib import Path; Path('data/a.csv').read_bytes()", {"data/a.csv"}, set()),
        ("import os; os.open('data/a.csv', os.O_RDONLY)", {"data/a.csv"}, set()),
        ("open('data/a.csv', 'r+')", {"data/a.csv"}, set()),
        ("import numpy; numpy.memmap('data/a.csv')", {"data/a.csv"}, set()),
        ("import numpy; numpy.fromfile('data/a.csv')", {"data/a.csv"}, set()),
        ("import glob; glob.glob('data/*')", set(), {"data"}),
        ("import os; os.listdir('data')", set(), {"data"}),
        ("import contextlib\nwith contextlib.suppress(OSError): open('none')", {"none"}, set()),
        ("open('result.txt', 'w')", set(), set()),
        ("open('result.txt', 'ab')", set(), set()),
        ("import sys; sys.path.insert(0, '.'); import module", set(), set()),
        (
            "from elastic.checkpoints import finished_training as finished; finished.signature('data/a.csv')",
            set(),
            set(),
        ),
    ],
)
def test_files_and_folders_read_by_a_script_are_observed(folder, code, files, folders):
    found = seen(folder, code)
    assert found == (files, folders, set())


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork() or os._exit(0)",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))",
        "import ctypes; ctypes.CDLL(None)",
        "import os; os.scandir(os.open('data', os.O_RDONLY))",
    ],
)
def test_code_that_may_read_unobserved_files_is_recorded(folder, code):
    assert seen(folder, code)[2]


def test_elastic_data_reads_for_the_script(folder):
    code = "g = {'__name__': 'elastic.data.files'}; exec('open(\"data/a.csv\")', g)"
    assert seen(folder, code)[0] == {"data/a.csv"}


def test_no_audit_hook_is_installed_without_a_checkpoint_folder(monkeypatch):
    monkeypatch.setattr(read_paths, "_observed", None)
    monkeypatch.setattr(sys, "addaudithook", lambda hook: pytest.fail("a hook stays for good"))
    read_paths.observe({DIR: ""})
    assert read_paths.observed() is None


def test_packages_with_compiled_code_that_may_open_files_are_listed(monkeypatch):
    before = read_paths.compiled()
    for name, file in {
        "elsewhere.core": "/venv/lib/site-packages/elsewhere/core.so",
        "_of_scipy": "/venv/lib/site-packages/scipy/_of_scipy.so",
        "own": "/home/me/own.cpython-311.so",
    }.items():
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    assert read_paths.compiled() - before == {"elsewhere", "own"}


def test_too_many_paths_are_not_kept():
    paths = ReadPaths()
    for number in range(read_paths.MOST + 2):
        paths.hook("open", (f"/data/{number}", "r", 0))
    assert paths.unseen and len(paths.files) <= read_paths.MOST + 1

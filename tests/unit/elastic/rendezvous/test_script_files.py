"""Which modules of a process are its script's."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from elastic.rendezvous.script_files import script_files


def module(file: str | None) -> ModuleType:
    made = ModuleType("made")
    made.__file__ = file
    return made


def test_modules_without_a_file_on_disk_are_not_script_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    modules = {"__main__": module("train.py"), "torch.ops": sys.modules["torch.ops"]}
    assert script_files(modules) == ["train.py"]
    assert all(map(os.path.exists, script_files(sys.modules)))


def test_installed_modules_and_modules_without_a_file_are_omitted():
    modules = {
        "zipped": module("/app.zip/model.py"),
        "built": module(None),
        "installed": module("/venv/site-packages/package/a.py"),
        "elastic.run_loop": module("/src/elastic/run_loop.py"),
        "torch.distributed.rendezvous": module("/src/pytorch/torch/distributed/rendezvous.py"),
    }
    assert script_files(modules) == ["/app.zip/model.py"]

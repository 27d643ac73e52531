"""Entry point of elasticrun: Ctrl-C while its modules are imported."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

import pytest

from elastic.driver import commandline
from elastic.driver.commandline.__main__ import main


@pytest.mark.parametrize("module", ["cli", "options.flags"])
def test_ctrl_c_when_received_during_imports_then_no_traceback_is_printed(monkeypatch, module):
    name = f"elastic.driver.commandline.{module}"

    class Interrupted(MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> None:
            if fullname == name:
                raise KeyboardInterrupt

    for each in ("elastic.driver.commandline.cli", name):
        monkeypatch.delitem(sys.modules, each, raising=False)
    monkeypatch.delattr(commandline, "cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main() == 130

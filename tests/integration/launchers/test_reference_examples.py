"""The examples of the Python reference run unchanged, on two workers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import elastic
from harness.job import elasticrun
from harness.processes import clean_environment
from harness.sources import ROOT

RUN_S = 120.0


def page() -> Any:
    file = ROOT / "docs" / "site" / "python_names.py"
    spec = importlib.util.spec_from_file_location("python_names", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_public_name_is_shown_once():
    names = [
        name for group in page().GROUPS for entry in group.entries for name in entry.names.split()
    ]
    assert sorted(names) == elastic.__all__


def test_each_example_uses_its_names():
    for group in page().GROUPS:
        for entry in group.entries:
            unused = [name for name in entry.names.split() if name not in entry.example]
            assert not unused, f"{group.title}: {unused}"


SECTIONS = [
    pytest.param(
        group,
        marks=() if group.title == "Elastic training" else pytest.mark.nightly,
        id=group.title.replace(" ", "-"),
    )
    for group in page().GROUPS
]


@pytest.mark.parametrize("group", SECTIONS)
def test_the_examples_of_a_section_run(group: Any, tmp_path: Path) -> None:
    lines = [textwrap.dedent(entry.example) for entry in group.entries]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines if group.alone else [page().PRELUDE, *lines]))
    run = [sys.executable, str(script)]
    ended = subprocess.run(
        run if group.alone else [elasticrun(), "-np", "2", *run],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr

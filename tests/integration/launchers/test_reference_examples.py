"""The examples of the Python reference run unchanged, on two workers."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import elastic
from harness.processes import clean_environment
from harness.program import output_of
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


@pytest.mark.forked
@pytest.mark.parametrize("group", SECTIONS)
def test_the_examples_of_a_section_run(job: Any, group: Any, tmp_path: Path) -> None:
    lines = [textwrap.dedent(entry.example) for entry in group.entries]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines if group.alone else [page().PRELUDE, *lines]))
    if group.alone:
        output_of(sys.executable, script, cwd=tmp_path, env=clean_environment(), timeout=RUN_S)
    else:
        job("-np 2", ["python", script]).succeed(RUN_S)

"""What benchmarks are asked, and how they tell what they have found: options, tables, marks, a file of JSON."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from figures import Mark

WIDTH = 160  # of a table in a file


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """Each takes ``--json``; what else, is for the benchmark to add."""
    description = (doc or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def console() -> Console:
    """As wide as the tables, where nobody looks at a terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def table(title: str, *headings: str) -> Table:
    """Columns to the right, as figures stand, but for one without a heading, which has names."""
    shown = Table(title=title)
    for heading in headings:
        shown.add_column(heading, justify="right" if heading else "left")
    return shown


def conclude(
    console: Console, path: Path | None, figures: Mapping[str, Any], marks: Sequence[Mark]
) -> None:
    """Says whether the marks are met, and keeps the figures."""
    say_marks(console, marks)
    write_json(path, figures, marks)


def say_marks(console: Console, marks: Sequence[Mark]) -> None:
    for mark in marks:
        style = None if mark.met else "bold"
        console.print(mark.sentence(), style=style, highlight=False, soft_wrap=True)


def write_json(path: Path | None, figures: Mapping[str, Any], marks: Sequence[Mark] = ()) -> None:
    """Dataclasses become objects."""
    if path is not None:
        machine = {
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "python": platform.python_version(),
            "torch": version("torch"),
        }
        said = [mark.sentence() for mark in marks]
        encoded = msgspec.json.encode({**figures, "marks": said, "machine": machine})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

"""Options and output of benchmarks: tables, limits, a JSON file."""

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

from measurements import Mark

WIDTH = 160  # width of a table in a file


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """Create a parser with ``--json``; the benchmark adds the other options."""
    description = (doc or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def console() -> Console:
    """Create a console that is as wide as the tables if it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def table(title: str, *headings: str) -> Table:
    """Create a table with right-aligned columns; a column without a heading has names and is left-aligned."""
    shown = Table(title=title)
    for heading in headings:
        shown.add_column(heading, justify="right" if heading else "left")
    return shown


def conclude(
    console: Console, path: Path | None, figures: Mapping[str, Any], marks: Sequence[Mark]
) -> None:
    """Print whether the limits are met, and write the results."""
    print_targets(console, marks)
    write_json(path, figures, marks)


def print_targets(console: Console, marks: Sequence[Mark]) -> None:
    for mark in marks:
        style = None if mark.met else "bold"
        console.print(mark.sentence(), style=style, highlight=False, soft_wrap=True)


def write_json(path: Path | None, figures: Mapping[str, Any], marks: Sequence[Mark] = ()) -> None:
    """Write the results with the machine's description; dataclasses become objects."""
    if path is not None:
        machine = {
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "python": platform.python_version(),
            "torch": version("torch"),
        }
        sentences = [mark.sentence() for mark in marks]
        encoded = msgspec.json.encode({**figures, "marks": sentences, "machine": machine})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

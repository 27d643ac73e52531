"""No object knows everything: how large a class may be, and that nobody uses the private names of another's objects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness.sources import ROOT, Facts, Use, facts, facts_of, sources

METHODS = 30  # of a class, properties and what has underscores among them
# Public names of an optimizer or a state are torch's and the user's: what inherits from ours shares private ones.
SPREAD = (
    "elastic/optimizer/adasum_optimizer.py",
    "elastic/state/handled_state.py",
    "driver/commandline/arguments.py",  # of argparse
    "elastic/mxnet/optimizer.py",  # of Gluon's trainer
    "elastic/integrations/",  # of trainers, whose loops are private
)
FOREIGN = (torch.Tensor, torch.nn.Module(), os)  # have private names that others may use


def product() -> dict[Path, Facts]:
    return {file: facts(file) for file in sources("elastic", "driver", "chaos", "horovod")}


def reaches(uses: list[Use], names: set[str]) -> list[str]:
    """Uses of private ``names`` on what is another file's object."""
    return [
        f"line {use.line}: {use.text}"
        for use in uses
        if not use.of_self and use.name in names and not any(hasattr(f, use.name) for f in FOREIGN)
    ]


def test_no_class_does_everything():
    sizes = [each for found in product().values() for each in found.classes]
    assert max(count for *_, count in sizes) > 20, "methods are counted"
    large = {name: count for name, _, count in sizes if count > METHODS}
    assert not large


def test_nobody_uses_private_names_of_another_files_objects():
    names = set().union(*(each.given for each in product().values()))
    found = {str(f): lines for f, each in product().items() if (lines := reaches(each.uses, names))}
    assert not found


def test_a_class_has_its_private_names_to_itself():
    """One that inherits from another file's uses what is public there."""
    found = {
        f"{file}:{use.line}: {use.text}"
        for file, each in product().items()
        if not str(file.relative_to(ROOT)).startswith(SPREAD)
        for use in each.uses
        if use.of_self
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("line", "heard"),
    [
        ("runtime._link.poke()", ["line 1: runtime._link"]),
        ("self.session._link.poke()", ["line 1: self.session._link"]),
        ("self._link.poke()", []),
        ("class A:\n  def f(self, other):\n    self._link = other._link", []),  # of its own kind
        ("tensor._version", []),
    ],
)
def test_what_is_taken_for_another_files_object(line, heard):
    assert reaches(facts_of(line).uses, {"_link", "_version"}) == heard

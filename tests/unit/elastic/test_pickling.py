"""Pickles: the script's definitions by name, others by value, also tensors that torch's pickles can't contain."""

from __future__ import annotations

import enum
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from elastic.pickling import pickled

SCRIPT = """
import enum

class Phase(enum.Enum):
    WARM = 1
    MAIN = 2

class Config:
    class Schedule:
        pass

def scaled(x):
    return x * factor

factor = 2
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    return started(monkeypatch)


def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another worker's ``__main__``: the same names, other objects."""
    module = ModuleType("__main__")
    exec(SCRIPT, module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_enums_and_classes_of_a_script_are_unpickled_from_the_receivers_script(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = pickled({"phase": script.Phase.WARM, "schedule": script.Config.Schedule()})
    there = started(monkeypatch)
    received = pickle.loads(blob)
    assert received["phase"] is there.Phase.WARM
    assert type(received["schedule"]) is there.Config.Schedule


def test_pickled_function_of_the_script_uses_the_receivers_globals(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = pickled(script.scaled)
    started(monkeypatch).factor = 5
    assert pickle.loads(blob)(2) == 10


def test_local_and_nameless_definitions_are_pickled_by_value(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(enum.Enum):
        A = 1

    Local.__module__ = "__main__"  # as in a function of the script
    nameless = eval("lambda x: x + 1", script.__dict__)
    blob = pickled((Local.A, nameless))
    started(monkeypatch)
    member, function = pickle.loads(blob)
    assert (member.name, function(1)) == ("A", 2)


def test_redefined_name_is_pickled_by_value(script: Any) -> None:
    first = script.Phase
    exec("class Phase: pass", script.__dict__)
    assert pickle.loads(pickled(first.WARM)).name == "WARM"


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 2)])
def test_tensors_of_recent_dtypes_survive_pickling(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = torch.ones(shape).to(dtype)
    received = pickle.loads(pickled([sent.T if sent.dim() == 2 else sent]))[0]
    assert (received.dtype, received.shape) == (
        dtype,
        torch.Size(shape[::-1] if sent.dim() == 2 else shape),
    )
    assert received.float().eq(1).all()

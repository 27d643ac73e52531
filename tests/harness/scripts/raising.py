"""Ends with an exception of a kind: ``raising.py KIND WHERE``, on the last rank, or on all (KIND begins with all-).

WHERE: ``before`` elastic.run, or ``inside``. Says RAISES on stderr first, so that what follows can be counted, and
writes into a file, by the class of what ended it, how many lines Python alone would have printed.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import elastic

everywhere = sys.argv[1].startswith("all-")
KIND, WHERE = sys.argv[1].removeprefix("all-"), sys.argv[2]
shown = sys.excepthook


def counted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
    own = Path(f"{os.getpid()}.count")
    own.write_text(str(len(lines)))
    own.replace(f"plain.{kind.__name__}")  # complete, whichever rank is the last
    shown(kind, error, trace)


sys.excepthook = counted


class Damaged(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError(index)


def damaged() -> None:
    raise ValueError(f"a sample of rank {elastic.rank()} is damaged")


def hook(*_: Any) -> None:
    damaged()


def fail() -> None:
    print("RAISES", file=sys.stderr, flush=True)
    match KIND:
        case "value":
            damaged()
        case "chained":
            try:
                damaged()
            except ValueError as error:
                raise RuntimeError("no batch") from error
        case "group":
            found = []
            for _ in range(2):
                try:
                    damaged()
                except ValueError as error:
                    found.append(error)
            raise ExceptionGroup("two samples", found)  # type: ignore[name-defined]  # noqa: F821
        case "hook":
            model = torch.nn.Linear(1, 1)
            model.register_forward_hook(hook)
            model(torch.ones(1))
        case "loader":
            for _ in torch.utils.data.DataLoader(Damaged(), num_workers=1):
                pass
        case "syntax":
            Path("broken.py").write_text("def broken(:\n")
            sys.path.insert(0, ".")
            importlib.import_module("broken")
        case "exit":
            sys.exit(3)
        case "own":
            try:
                damaged()
            except ValueError:
                traceback.print_exc()  # caught, and printed by the script
            raise KeyError("own")


def step() -> None:
    elastic.allreduce(torch.ones(1))  # all have reached this point
    if everywhere or elastic.rank() == elastic.size() - 1:
        fail()
    for _ in range(100):
        elastic.allreduce(torch.ones(1))


elastic.init()
if WHERE == "before":
    step()


@elastic.run
def train(state: elastic.ObjectState) -> None:
    step()


train(elastic.ObjectState(step=0))

"""What shows later that a training has come to its end: its last commit, and the code that ran. Acts, without torch.

Rank 0 writes the file `RETURNED` once the training function has returned everywhere and its last commit is durable.
Whether the job ended well is known to the driver alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping

import msgspec
import psutil

from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.manifest import Name

RETURNED = "returned.json"
BLOCK = 1 << 20  # bytes read at once
# The kernel's start of the system, from which a process's is counted, is in whole seconds.
START_ERROR_S = 1.0


class TrainingReturned(msgspec.Struct, frozen=True):
    """``modules``: by path, see `signature`; those that rank 0 had imported."""

    commit: Name
    modules: dict[str, str]


def note_returned(storage: Storage, commit: Name, began_at: float) -> None:
    """Not where a module has changed since this process began: nobody can tell what trained. Raises OSError."""
    modules = imported(began_at)
    if modules is not None:
        storage.write(RETURNED, msgspec.json.encode(TrainingReturned(commit, modules)))


def process_began_at() -> float:
    """Or a little before: in seconds since 1970, as the times of files."""
    return psutil.Process().create_time() - START_ERROR_S


def read_returned(storage: Storage) -> TrainingReturned | None:
    """None where there is none that can be read. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode(storage.read(RETURNED), type=TrainingReturned)
    return None


def imported(began_at: float) -> dict[str, str] | None:
    """Signatures of all modules of this process that come from a file. Installed ones by size and time.

    None: one has changed since ``began_at``, in seconds since 1970.
    """
    installed = tuple(f"{os.path.realpath(p)}{os.sep}" for p in {sys.prefix, sys.base_prefix})
    found: dict[str, str] = {}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            path = os.path.abspath(file)
            with contextlib.suppress(OSError):
                if os.stat(path).st_mtime >= began_at:
                    return None
            by_time = os.path.realpath(path).startswith(installed)
            found[path] = signature(path, by_time=by_time)
    return found


def unchanged(files: Mapping[str, str]) -> bool:
    """Whether all of these still have their signatures."""
    return all(
        signature(path, by_time=before.startswith("time:")) == before
        for path, before in files.items()
    )


def signature(path: str, *, by_time: bool = False) -> str:
    """Of a file's content, or of its size and time of change; empty where it can't be read."""
    try:
        if by_time:
            found = os.stat(path)
            return f"time:{found.st_size}:{found.st_mtime_ns}"
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return f"sha256:{digest.hexdigest()}"
    except OSError:
        return ""

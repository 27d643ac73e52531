"""What shows later that a training has come to its end: its last commit, the code that ran, and what it has read. Acts,
without torch.

Rank 0 writes the file `RETURNED` once the training function has returned everywhere and its last commit is durable, and
each rank the paths that it has read. Whether the job ended well is known to the driver alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Mapping

import msgspec
import psutil

from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.manifest import Name
from elastic.protocol import read_paths

RETURNED = "returned.json"
READ = "read-{}.json"  # by rank
LARGE = 1 << 20  # bytes of a file, from which its size and time of change stand for its content
BLOCK = 1 << 20  # bytes read at once
# The kernel's start of the system, from which a process's is counted, is in whole seconds.
START_ERROR_S = 1.0


class TrainingReturned(msgspec.Struct, frozen=True):
    """``modules``: by path, see `signature`; those that rank 0 had imported."""

    commit: Name
    modules: dict[str, str]
    ranks: int


class PathsRead(msgspec.Struct, frozen=True):
    """By one rank. ``paths``: their signatures. ``unseen``: why it may have read others too."""

    commit: Name
    paths: dict[str, str]
    unseen: list[str]


def note_returned(storage: Storage, commit: Name, began_at: float, ranks: int) -> None:
    """Not where a module has changed since this process began: nobody can tell what trained. Raises OSError."""
    modules = imported(began_at)
    if modules is not None:
        told = TrainingReturned(commit, modules, ranks)
        storage.write(RETURNED, msgspec.json.encode(told))


def note_read(storage: Storage, commit: Name, rank: int, began_at: float) -> None:
    """What this process has read so far. Raises OSError."""
    storage.write(READ.format(rank), msgspec.json.encode(paths_read(commit, began_at)))


def paths_read(commit: Name, began_at: float) -> PathsRead:
    """A path that has changed since the process began counts as unseen: nobody can tell what was read of it."""
    observed = read_paths.observed()
    if observed is None:
        return PathsRead(commit, {}, ["not observed"])
    unseen = {*observed.unseen, *read_paths.compiled()}
    found: dict[str, str] = {}
    for path in sorted({*observed.files, *observed.folders}):
        if _is_installed(os.path.realpath(path)):
            continue
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime >= began_at:
                unseen.add(f"{path} has changed")
        found[path] = signature(path, by_time=is_large(path))
    return PathsRead(commit, found, sorted(unseen))


def _is_installed(path: str) -> bool:
    """Whether it changes only with packages, or is the kernel's."""
    paths = sysconfig.get_paths()
    folders = (paths["stdlib"], paths["platstdlib"], "/proc", "/sys", "/dev")
    if any(f"{path}{os.sep}".startswith(f"{os.path.realpath(each)}{os.sep}") for each in folders):
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))


def read_by_all(storage: Storage, commit: Name, ranks: int) -> dict[str, str] | None:
    """Signatures of all paths that the ranks have read; None where one may have read others. Raises OSError."""
    found: dict[str, str] = {}
    for rank in range(ranks):
        try:
            told = msgspec.json.decode(storage.read(READ.format(rank)), type=PathsRead)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        if told.unseen or told.commit != commit:
            return None
        if any(found.get(path, each) != each for path, each in told.paths.items()):
            return None
        found |= told.paths
    return found


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


def is_large(path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.getsize(path) > LARGE
    return False


def signature(path: str, *, by_time: bool = False) -> str:
    """Of a file's content, or of its size and time of change; of a folder's listing; empty where it can't be read."""
    try:
        if os.path.isdir(path):
            listing = repr(sorted(os.listdir(path))).encode(errors="surrogateescape")
            return f"listing:{hashlib.sha256(listing).hexdigest()}"
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

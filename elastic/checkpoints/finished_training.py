"""Record of a finished training run: its last commit, signatures of the modules, and paths that were read.

This module does not import torch.

Rank 0 writes the file `RETURNED` after the training function has returned on all ranks and its last commit is durable.
Each rank writes the paths that it has read. Only the driver determines whether the job succeeded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Mapping
from types import ModuleType

import msgspec

from elastic.checkpoints.files.manifest import CommitName
from elastic.checkpoints.files.storage import Storage
from elastic.protocol import read_paths
from elastic.protocol.file_times import changed_since, modified_since

RETURNED = "returned.json"
READ = "read-{}.json"  # name of the file with the paths that a rank has read
LARGE = (
    1 << 20
)  # Size in bytes. Larger files are identified by size and modification time instead of content.
BLOCK = 1 << 20  # number of bytes read at once


class TrainingReturned(msgspec.Struct, frozen=True):
    """Rank 0's record that the training function has returned.

    Args:
        modules: signatures of the modules that rank 0 imported, by path. See `signature`.
    """

    commit: CommitName
    modules: dict[str, str]
    ranks: int


class PathsRead(msgspec.Struct, frozen=True):
    """Paths that one rank has read, with their signatures.

    Args:
        unseen: reason why the list may be incomplete, or an empty string.
    """

    commit: CommitName
    paths: dict[str, str]
    unseen: list[str]


def note_returned(storage: Storage, commit: CommitName, began_at: float, ranks: int) -> None:
    """Record that the training function has returned.

    Nothing is recorded if a module file has changed since this process started, because the executed code is then
    unknown.

    Raises:
        OSError: the storage failed.
    """
    modules = imported(began_at)
    if modules is not None:
        record = TrainingReturned(commit, modules, ranks)
        storage.write(RETURNED, msgspec.json.encode(record))


def note_read(storage: Storage, commit: CommitName, rank: int, began_at: float) -> None:
    """Record the paths that this process has read.

    Raises:
        OSError: the storage failed.
    """
    storage.write(READ.format(rank), msgspec.json.encode(paths_read(commit, began_at)))


def paths_read(commit: CommitName, began_at: float) -> PathsRead:
    """Return the paths that this process has read so far.

    If a path has changed since the process started, ``unseen`` names it.
    """
    observed = read_paths.observed()
    if observed is None:
        return PathsRead(commit, {}, ["not observed"])
    unseen = {*observed.unseen, *read_paths.compiled()}
    found: dict[str, str] = {}
    for path in sorted({*observed.files, *observed.folders}):
        if _is_installed(os.path.realpath(path)):
            continue
        with contextlib.suppress(OSError):
            if changed_since(path, began_at):
                unseen.add(f"{path} has changed")
        found[path] = signature(path, by_time=is_large(path))
    return PathsRead(commit, found, sorted(unseen))


def _is_installed(path: str) -> bool:
    """Return whether a path belongs to an installed package or to the kernel, and changes only with an update."""
    paths = sysconfig.get_paths()
    folders = (paths["stdlib"], paths["platstdlib"], "/proc", "/sys", "/dev")
    if any(f"{path}{os.sep}".startswith(f"{os.path.realpath(each)}{os.sep}") for each in folders):
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))


def read_by_all(storage: Storage, commit: CommitName, ranks: int) -> dict[str, str] | None:
    """Return the signatures of all paths that any rank has read, or None if the list of a rank may be incomplete.

    Raises:
        OSError: the storage failed.
    """
    found: dict[str, str] = {}
    for rank in range(ranks):
        try:
            record = msgspec.json.decode(storage.read(READ.format(rank)), type=PathsRead)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        if record.unseen or record.commit != commit:
            return None
        if any(found.get(path, each) != each for path, each in record.paths.items()):
            return None
        found |= record.paths
    return found


def read_returned(storage: Storage) -> TrainingReturned | None:
    """Read the record that `note_returned` wrote. Return None if it is missing or unreadable.

    Raises:
        OSError: the storage failed.
    """
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode(storage.read(RETURNED), type=TrainingReturned)
    return None


def imported(began_at: float) -> dict[str, str] | None:
    """Return the signatures of all module files of this process.

    Installed modules are signed by size and modification time.

    Return None if a file has changed since ``began_at`` (seconds since 1970).
    """
    installed = tuple(f"{os.path.realpath(p)}{os.sep}" for p in {sys.prefix, sys.base_prefix})
    found: dict[str, str] = {}
    real: dict[str, str] = {}  # paths without links, by folder: they are slow to find
    for module in loaded_modules():
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            path = os.path.abspath(file)
            try:
                # the only system call for most modules, of which there are thousands
                status = os.lstat(path)
                is_link = stat.S_ISLNK(status.st_mode)
                status = os.stat(path) if is_link else status
            except OSError:
                found[path] = ""
                continue
            if modified_since(status, began_at):
                return None
            folder = os.path.dirname(path)
            if folder not in real:
                real[folder] = os.path.join(os.path.realpath(folder), "")
            target = os.path.realpath(path) if is_link else real[folder]
            by_time = target.startswith(installed) and stat.S_ISREG(status.st_mode)
            found[path] = _signature_by_time(status) if by_time else signature(path)
    return found


def loaded_modules() -> list[ModuleType]:
    """Return all modules of this process."""
    return [*sys.modules.values()]


def unchanged(files: Mapping[str, str]) -> bool:
    """Return whether all paths still have the given signatures."""
    return all(
        signature(path, by_time=before.startswith("time:")) == before
        for path, before in files.items()
    )


def is_large(path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.getsize(path) > LARGE
    return False


def signature(path: str, *, by_time: bool = False) -> str:
    """Return a signature of a file's content, or of a folder's listing. The result is empty if the path cannot be read.

    Args:
        path: the file or folder.
        by_time: whether to use size and modification time of a file instead of a hash of its content.
    """
    try:
        if os.path.isdir(path):
            listing = repr(sorted(os.listdir(path))).encode(errors="surrogateescape")
            return f"listing:{hashlib.sha256(listing).hexdigest()}"
        if by_time:
            return _signature_by_time(os.stat(path))
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return f"sha256:{digest.hexdigest()}"
    except OSError:
        return ""


def _signature_by_time(status: os.stat_result) -> str:
    return f"time:{status.st_size}:{status.st_mtime_ns}"

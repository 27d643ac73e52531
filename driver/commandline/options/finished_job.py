"""Detection of commands that have already finished, so that a rerun does not train again. Performs I/O.

A command counts as finished under three conditions. First, a job with the same flags, program, environment and folder
ended with exit code 0 after its training function returned. Second, its last commit is still the newest durable commit.
Third, the modules that it imported, the files that its workers read, and the programs and settings next to it are
unchanged.

In case of doubt, for example if workers may have read files unobserved, the command does not count as finished. The job
then resumes from its last commit.
"""

from __future__ import annotations

import contextlib
import enum
import glob
import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from elastic.checkpoints import catalog, finished_training
from elastic.checkpoints.files.manifest import CommitName, Manifest
from elastic.checkpoints.files.storage import Storage

FINISHED = "finished.json"
# suffixes of files next to a script that may determine how long the script trains
KINDS = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf")
# maximum number of files to examine; a folder with more files probably contains data rather than scripts
MOST_FILES = 5000
# maximum total size in bytes of the files to read at each start
MOST_READ = 64 << 20
_SEPARATORS = re.compile("[=,:;@]")
# variables of a terminal or login session, which are not part of a command's identity
_PASSING = ("_", "COLUMNS", "DISPLAY", "LINES", "OLDPWD", "SHLVL", "STY", "INVOCATION_ID")
_PASSING_BEGINNINGS = ("SSH_", "TERM", "TMUX", "VSCODE_", "WAYLAND_", "WINDOW", "XDG_SESSION_")


class RerunReason(enum.Enum):
    """Reason why a finished job runs again."""

    COMMAND = "its arguments, flags, environment or folder changed"
    FILES = "its script or a file next to it or named by the command changed"
    READ = "a module or a file that its workers read changed"
    # The end of the job was not recorded. See `SameCommand.has_finished`.
    UNKNOWN = (
        "the last run failed after training, a file changed during the run, or some of the files that it read are"
        " unknown"
    )


class FinishedJob(msgspec.Struct, frozen=True):
    """Record of a finished job.

    Args:
        request: digest of flags, program, environment and folder.
        commit: name of the last commit.
        files: signatures by path of files that the command names.
        read: signatures by path of files that workers have read.
    """

    request: str
    commit: CommitName
    files: dict[str, str]
    read: dict[str, str]


@dataclass(frozen=True)
class SameCommand:
    """Identity of a command at one start. ``files`` is None if the command names too many files to compare."""

    storage: Storage
    request: str
    files: dict[str, str] | None
    command: Sequence[str]
    folder: str

    def finished_before(self) -> Manifest | None:
        """Return the last commit of the same job if it has finished.

        Raises OSError if the checkpoint folder cannot be read.
        """
        if self.files is None:
            return None
        found, returned = self._record(), finished_training.read_returned(self.storage)
        if found is None:
            return None
        same = found.request == self.request and found.files == self.files
        if not same or returned is None or returned.commit != found.commit:
            return None
        same = finished_training.unchanged(returned.modules) and finished_training.unchanged(
            found.read
        )
        return self._newest(found.commit) if same else None

    def rerun_reason(self) -> RerunReason | None:
        """Return the reason why a finished job runs again, or None if no job has finished.

        Raises:
            OSError: the checkpoint folder cannot be read.
        """
        returned = finished_training.read_returned(self.storage)
        if self.files is None or returned is None or self._newest(returned.commit) is None:
            return None
        found = self._record()
        if found is None or found.commit != returned.commit:
            return RerunReason.UNKNOWN
        if found.request != self.request:
            return RerunReason.COMMAND
        return RerunReason.FILES if found.files != self.files else RerunReason.READ

    def _record(self) -> FinishedJob | None:
        """Return the record of a finished job, or None if no readable record exists."""
        try:
            return msgspec.json.decode(self.storage.read(FINISHED), type=FinishedJob)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def has_finished(self, run: int) -> bool:
        """Record that the job of run ``run`` ended with exit code 0. Return whether a later start can detect this.

        Raises OSError if the checkpoint folder cannot be read or written.
        """
        returned = finished_training.read_returned(self.storage)
        if self.files is None or returned is None or returned.commit.run != run:
            return False
        after = self._files_now()
        # Record nothing if a file has changed during the job: it may be a result of the job, or a user may have edited
        # it.
        if after is None or any(after.get(path) != was for path, was in self.files.items()):
            return False
        if self._newest(returned.commit) is None:
            return False
        read = finished_training.read_by_all(self.storage, returned.commit, returned.ranks)
        if read is None:
            return False
        record = FinishedJob(self.request, returned.commit, after, read)
        self.storage.write(FINISHED, msgspec.json.encode(record))
        return True

    def _files_now(self) -> dict[str, str] | None:
        return program_files(self.command, self.folder, without=self.storage.absolute)

    def _newest(self, name: CommitName) -> Manifest | None:
        names = catalog.names(self.storage)
        return catalog.entry(self.storage, name).manifest if names and names[-1] == name else None


def same_command(
    url: str, flags: str, command: Sequence[str], environ: Mapping[str, str]
) -> SameCommand:
    """Return the identity of a command.

    Args:
        url: the checkpoint folder.
        flags: all options as text.
        command: program and arguments.
        environ: environment of the driver.

    Raises:
        Invalid: the storage is invalid.
    """
    folder = os.getcwd()
    kept = sorted(
        f"{name}={value}"
        for name, value in environ.items()
        if name not in _PASSING and not name.startswith(_PASSING_BEGINNINGS)
    )
    request = hashlib.sha256(repr((flags, [*command], folder, kept)).encode()).hexdigest()
    storage = Storage(url)
    files = program_files(command, folder, without=storage.absolute)
    return SameCommand(storage, request, files, command, folder)


def program_files(command: Sequence[str], folder: str, without: str) -> dict[str, str] | None:
    """Return signatures of the files and folders that the command names, and of programs and settings next to them.

    Programs and settings are those in the folders of the named files and in ``folder``.

    Args:
        without: the checkpoint folder, which is excluded.

    Returns None if there are too many files.
    """
    paths = {os.path.abspath(path) for word in command for path in _paths(word)}
    named = {path for path in paths if os.path.isfile(path)}
    scripts = [path for path in named if path.endswith(KINDS)]
    found = {
        path: finished_training.signature(path, by_time=finished_training.is_large(path))
        for path in sorted(named)
    }
    roots = {folder, *map(os.path.dirname, scripts)}
    looked_at = read = 0
    for root in sorted(roots):
        for path in _within(root, without):
            looked_at += 1
            if looked_at > MOST_FILES:
                return None
            if path.endswith(KINDS) and path not in found and not finished_training.is_large(path):
                read += _size(path)
                if read > MOST_READ:
                    return None
                found[path] = finished_training.signature(path)
    for root in sorted(path for path in paths - {without} if os.path.isdir(path)):
        listed = []
        for path in _within(root, without, followlinks=True):
            looked_at += 1
            if looked_at > MOST_FILES:
                return None
            listed.append((path, finished_training.signature(path, by_time=True)))
        # an empty folder is assumed to be for the results of the job
        if listed:
            listing = repr(sorted(listed)).encode(errors="surrogateescape")
            found[os.path.join(root, "")] = f"listing:{hashlib.sha256(listing).hexdigest()}"
    return found


def _paths(argument: str) -> Iterator[str]:
    """Yield the possible paths in an argument such as ``--data=a,b:c``, ``@file``, or a quoted shell command."""
    parts = {argument}
    with contextlib.suppress(ValueError):  # raised for unbalanced quotes
        parts.update(shlex.split(argument))
    for part in parts:
        yield from filter(None, {part, *_SEPARATORS.split(part)})
        if glob.has_magic(part):
            yield from glob.iglob(part.rpartition("=")[2])


def _within(root: str, without: str, *, followlinks: bool = False) -> Iterator[str]:
    """Yield all files below a folder, except those in hidden folders, caches and virtual environments."""
    visited: set[str] = set()  # real paths, because symbolic links may form cycles
    for folder, folders, files in os.walk(root, followlinks=followlinks):
        folders[:] = [
            each
            for each in folders
            if not each.startswith((".", "__pycache__"))
            and not os.path.exists(os.path.join(folder, each, "pyvenv.cfg"))
            and os.path.join(folder, each) != without
            and os.path.realpath(os.path.join(folder, each)) not in visited
        ]
        visited.update(os.path.realpath(os.path.join(folder, each)) for each in folders)
        yield from (os.path.join(folder, file) for file in files)


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return 0

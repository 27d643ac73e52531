"""Removal of files that the start-up checks have created, if the job does not start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage


class StartCleanup:
    """Registry of the files and folders that one start has created.

    ``remove`` deletes them in reverse order, and is idempotent.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def remove(self) -> None:
        while self._undo:
            # Ignore errors: an empty file or folder may remain.
            with contextlib.suppress(OSError):
                self._undo.pop()()

    @contextlib.contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Context manager that removes the files if an exception is raised."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def folder(self, path: str) -> None:
        """Register a folder that is about to be created, with its missing parents. Only empty folders are removed."""
        made = Path(os.path.abspath(path))
        for folder in reversed([made, *made.parents]):
            if not folder.exists():
                self._undo.append(folder.rmdir)

    def file(self, path: str) -> None:
        """Register a file that is about to be created.

        A journal that contains more than its header belongs to a started job, so it is not removed.
        """
        if not os.path.exists(path):
            self._undo.append(lambda: _remove_unused(Path(path)))

    def run(self, storage: Storage, number: int) -> None:
        """Register a run number that was claimed in a checkpoint folder.

        The claim is kept if the run has a checkpoint.
        """

        def give_back() -> None:
            if all(name.run != number for name in catalog.names(storage)):
                catalog.give_back_run(storage, number)

        self._undo.append(give_back)


def _remove_unused(path: Path) -> None:
    with open(path, "rb") as file:
        file.readline()
        used = bool(file.readline())
    if not used:
        path.unlink()

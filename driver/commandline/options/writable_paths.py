"""Checks, before a job starts, that the files and folders of its output can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from elastic.driver.job.start_cleanup import StartCleanup
from elastic.driver.journal.file_journal import check_own
from elastic.errors import Invalid


def report_path(path: str | None) -> str | None:
    """Return the absolute path of the report.

    Raises:
        Invalid: the path is not writable, or is a file that is not a report.
    """
    place = writable_place("--report", path, replaces=True)
    if place is not None:
        from elastic.driver.monitoring.explain.report_at_job_end import BEGINNING, check_replaceable

        check_replaceable(Path(place), BEGINNING)
    return place


def writable_dir(flag: str, path: str | None, traces: StartCleanup) -> str | None:
    """Create a folder if it is missing, and return its absolute path. Returns None for None.

    Raises:
        Invalid: the path is a file, or the folder is not writable.
    """
    if path is None:
        return None
    traces.folder(path)
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise Invalid(f"{flag} {path} is a file: pass a directory") from None
    except OSError as error:
        raise Invalid(
            f"{flag} {path} is not writable: {error.strerror}. Pass another directory"
        ) from None
    return os.path.abspath(path)


def writable_file(path: str | None, traces: StartCleanup) -> str | None:
    """Create the journal if it is missing, and return its absolute path. Returns None for None.

    Raises:
        Invalid: the file cannot be written.
    """
    if path is None:
        return None
    traces.file(path)
    if not os.path.exists(path):
        check_own(Path(path))
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise Invalid(
            f"--journal {path} is not writable: {error.strerror}. Pass another file"
        ) from None
    return os.path.abspath(path)


def writable_place(flag: str, path: str | None, *, replaces: bool = False) -> str | None:
    """Check that a file can be written at a path, and return the path. Returns None for None.

    The file is not created, because an empty file would be an invalid timeline or report.

    Args:
        flag: the flag with this path.
        path: the path, or None.
        replaces: whether an existing file will be replaced with a new file rather than modified.

    Raises:
        Invalid: the file cannot be written.
    """
    if path is None:
        return None
    folder = os.path.dirname(os.path.abspath(path))
    if not path:
        trouble = "the path is empty"
    elif os.path.isdir(path):
        trouble = "it is a directory"
    elif os.path.exists(path) and not os.path.isfile(path):
        trouble = "it is a device, a pipe or a socket"
    elif not os.path.isdir(folder):
        trouble = f"the directory {folder} does not exist"
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        trouble = "permission denied, or a read-only file system"
    else:
        try:
            # Create a temporary file, because the permission bits of a file system such as /proc do not show whether it
            # accepts files.
            if replaces or not os.path.exists(path):
                tempfile.TemporaryFile(dir=folder).close()
            return os.path.abspath(path)
        except OSError as error:
            trouble = f"{folder} accepts no new files: {error.strerror}"
    raise Invalid(f"{flag} {path or repr(path)} is not writable: {trouble}. Pass another file")

"""Catalog of a checkpoint folder: lists and verifies commits, and chooses the commit to resume from.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass

import msgspec
import psutil

from elastic.checkpoints.files import manifest
from elastic.checkpoints.files.checksummed_file import Check
from elastic.checkpoints.files.manifest import CommitName, Manifest, NewerFormat, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.errors import Invalid

BLOCK = 1 << 20  # number of bytes read at once


class IncompleteCommit(UnreadableCommit):
    """Error raised for an incomplete commit: its manifest was never written."""


CLAIMS_READ = 8  # maximum number of claims (the newest) that are read to find running jobs
# name of the file that identifies the process that claimed this run number
CLAIM = re.compile(r"run-(\d{4,9})")


@dataclass(frozen=True)
class CheckpointEntry:
    """Commit in a folder of checkpoints, and whether the commit can be used.

    Args:
        name: name of the commit.
        manifest: manifest of the commit, or None if the commit cannot be used.
        trouble: reason why the commit cannot be used, or an empty string.
        torn: whether the commit is incomplete, that is, its manifest was never written.
        newer: whether the commit was written by a newer version of this package.
    """

    name: CommitName
    manifest: Manifest | None
    trouble: str
    torn: bool = False
    newer: bool = False


def names(storage: Storage) -> list[CommitName]:
    """Return the names of all commits, complete or incomplete, oldest first.

    Raises:
        OSError: the storage failed.
    """
    found = (manifest.parse(folder) for folder in storage.folders())
    return sorted(name for name in found if name is not None)


def claim_run(storage: Storage) -> int:
    """Reserve and return a run number that neither a checkpoint in the folder nor another job uses.

    Object stores cannot create a file exclusively. Two jobs that start at the same moment on an object store may
    therefore receive the same number.

    Raises:
        OSError: the storage failed.
    """
    number = max((name.run for name in names(storage)), default=0) + 1
    process = psutil.Process()
    owner = RunOwner(socket.gethostname(), process.pid, process.create_time())
    while not storage.claim(f"run-{number:04}", msgspec.json.encode(owner)):
        number += 1
    return number


class RunOwner(msgspec.Struct, frozen=True):
    """Identity of the process that has claimed a run number.

    Args:
        began_at: start time of the process in seconds since 1970.
    """

    host: str
    pid: int
    began_at: float


def writing_here(storage: Storage, before: int | None = None) -> RunOwner | None:
    """Return another running process on this machine that has claimed a run in this folder, or None.

    Claims of processes on other machines are not detected.

    Args:
        storage: the folder of checkpoints.
        before: run number; only runs with smaller numbers are considered.

    Raises:
        OSError: the storage failed.
    """
    claimed = (CLAIM.fullmatch(name) for name in storage.sizes())
    numbers = sorted(int(each[1]) for each in claimed if each)
    for number in [n for n in numbers if before is None or n < before][-CLAIMS_READ:]:
        with contextlib.suppress(msgspec.MsgspecError, psutil.Error, FileNotFoundError):
            found = msgspec.json.decode(storage.read(f"run-{number:04}"), type=RunOwner)
            if found.host != socket.gethostname() or found.pid == os.getpid():
                continue
            process = psutil.Process(found.pid)
            # An exited process may remain in the process table, for example in a container whose init does not reap
            # zombies.
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and process.create_time() == found.began_at:
                return found
    return None


def give_back_run(storage: Storage, number: int) -> None:
    """Release a claimed run number if no checkpoint was written under it.

    Raises:
        OSError: the storage failed.
    """
    storage.remove_file(f"run-{number:04}")


def read(storage: Storage, name: CommitName) -> Manifest:
    """Return the manifest of a commit after checking that all its files exist with the recorded sizes.

    Raises:
        IncompleteCommit: the commit is incomplete.
        UnreadableCommit: the manifest or a file is corrupted or missing.
        OSError: the storage failed.
    """
    try:
        found = manifest.decode_manifest(storage.read(f"{name}/{manifest.MANIFEST}"))
    except FileNotFoundError:
        raise IncompleteCommit(
            "the commit is incomplete, because its manifest.json is missing", "Use another commit"
        ) from None
    if found.name != name:
        raise UnreadableCommit(
            f"{manifest.MANIFEST} describes another commit, {found.name}", manifest.RESTORE
        )
    files = storage.sizes(str(name))
    if manifest.MANIFEST not in files:
        raise IncompleteCommit(
            "another process removed the commit while it was being read",
            "Use a newer commit, or start the job with a larger --checkpoint-keep",
        )
    trouble = manifest.missing(found, files)
    if trouble:
        raise UnreadableCommit(trouble, manifest.RESTORE)
    return found


def entry(storage: Storage, name: CommitName) -> CheckpointEntry:
    """Return the catalog entry of a commit, whether it is usable or not.

    Raises:
        OSError: the storage failed.
    """
    try:
        return CheckpointEntry(name, read(storage, name), "")
    except UnreadableCommit as error:
        torn, newer = isinstance(error, IncompleteCommit), isinstance(error, NewerFormat)
        return CheckpointEntry(name, None, error.trouble, torn, newer)


def refuse_newer(storage: Storage, found: CheckpointEntry) -> None:
    """Raise Invalid if a commit was written by a newer version of this package.

    Such a commit must not be skipped: the job would eventually delete it as outdated.

    Raises:
        Invalid: the commit was written by a newer version.
    """
    if found.newer:
        raise Invalid(
            f"the checkpoint {storage.url}/{found.name} can't be used: {found.trouble}. The checkpoint was not"
            " changed. Run the version that wrote it, or start a new job with --fresh, which keeps the"
            " checkpoint"
        )


def verify(storage: Storage, found: Manifest) -> str:
    """Compare the checksums of all files of a commit with its manifest.

    Return a description of the corruption, or an empty string.

    Raises:
        OSError: the storage failed.
    """
    for file, stored in found.files.items():
        check = Check(stored)
        try:
            with storage.reading(f"{found.name}/{file}") as stream:
                while block := stream.read(BLOCK):
                    check.update(block)
        except FileNotFoundError:
            return f"{file} is missing"
        if not check.passed():
            return f"{file} is corrupted: its checksum differs"
    return ""


def chosen(storage: Storage, which: str) -> Manifest:
    """Return the manifest of the commit that a user specified.

    Args:
        storage: the folder of checkpoints.
        which: the commit's folder (``r0002-g0003-c00000450``), or its ID if unique (``g3c450``, or ``3.450`` in the
            older format).

    Raises:
        Invalid: the commit is missing, ambiguous or unusable. The message lists the existing commits.
        OSError: the storage failed.
    """
    have = names(storage)
    fitting = [name for name in have if which in (str(name), str(name.commit), name.commit.dotted)]
    if len(fitting) != 1:
        what = "no commit" if not fitting else "several commits for"
        there = ", ".join(map(str, (fitting or have)[-8:])) or "none"
        how = " by its full name" if fitting else ""
        raise Invalid(f"{storage.url} has {what} {which}: pass one of {there}{how}")
    try:
        return read(storage, fitting[0])
    except UnreadableCommit as error:
        raise Invalid(
            f"the checkpoint {storage.url}/{fitting[0]} can't be used: {error.trouble}. Pass another commit with --from"
        ) from error


def prune(storage: Storage, keep: int, floor: int = 0) -> list[CommitName]:
    """Delete the commits that `manifest.superfluous` selects, and return their names.

    Raises:
        OSError: the storage failed.
    """
    have = names(storage)
    # Verify only the newest commit. An older commit with a manifest is known to have been complete.
    whole: list[CommitName] = []
    for name in reversed(have):
        if whole:
            if manifest.MANIFEST in storage.sizes(str(name)):
                whole.append(name)
        elif entry(storage, name).manifest is not None:
            whole.append(name)
    gone = manifest.superfluous(have, whole, keep, floor)
    for name in gone:
        with contextlib.suppress(FileNotFoundError):
            # Removing the manifest first marks the commit as incomplete, even if the rest of the removal fails.
            storage.remove_file(f"{name}/{manifest.MANIFEST}")
            storage.remove_folder(str(name))
    return gone

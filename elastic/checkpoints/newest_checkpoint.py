"""Loading of the newest durable commit into a state when no worker holds a commit in memory.

This module runs on rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from elastic.checkpoints import catalog, state_restoring
from elastic.checkpoints.files.manifest import CommitName, Manifest, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.options import CheckpointOptions
from elastic.checkpoints.storage_retries import read_patiently
from elastic.errors import Invalid
from elastic.failpoints import failpoint
from elastic.protocol.messages import CheckpointWritten, Message
from elastic.state.state import ObjectState

# the reason why a commit cannot be read, by folder and commit
Passed = dict[tuple[str, CommitName], str]


def load_newest(
    storage: Storage, options: CheckpointOptions, state: ObjectState
) -> tuple[str, Manifest] | None:
    """Load the newest complete commit into the state. Return its folder and manifest.

    Returns None if there is no checkpoint and training starts from the beginning.

    Raises:
        StateMismatch: the state does not match.
        Invalid: checkpoints exist, but none can be read.
        OSError: the storage failed.
    """
    passed: Passed = {}
    return read_patiently(storage, lambda: load_proposed(storage, options, state, passed))


def load_proposed(
    storage: Storage, options: CheckpointOptions, state: ObjectState, passed: Passed
) -> tuple[str, Manifest] | None:
    """Load the newest complete commit that is not in ``passed`` into the state, without retries.

    Results and errors are those of `load_newest`.
    """
    while (found := proposal(storage, options, passed)) is not None:
        where, manifest = found
        try:
            failpoint("durable-load")
            state_restoring.load(where, manifest, state)
        except UnreadableCommit as error:
            pass_over(where.url, manifest, error.trouble, passed)
        else:
            return where.url, manifest
    return None


def proposal(
    storage: Storage, options: CheckpointOptions, passed: Passed
) -> tuple[Storage, Manifest] | None:
    """Return the newest commit that seems to be complete and is not in ``passed``, or None if no checkpoint exists.

    Raises:
        Invalid: checkpoints exist, but none can be read.
        OSError: the storage failed.
    """
    for name in reversed(catalog.names(storage)):
        if name.run < options.floor:
            break
        if (storage.url, name) in passed:
            continue
        found = catalog.entry(storage, name)
        catalog.refuse_newer(storage, found)
        if found.manifest is not None:
            return storage, found.manifest
        if not found.torn:
            passed[storage.url, name] = found.trouble
            _print(f"{storage.url}/{name} was skipped: {found.trouble}")
    troubles = [f"{name}: {why}" for (url, name), why in passed.items() if url == storage.url]
    if troubles:
        raise Invalid(
            f"no checkpoint in {storage.url} is readable ({'; '.join(troubles[:3])}). No checkpoint was changed."
            " Restore a checkpoint from a backup, or start a new job with --fresh"
        )
    if options.start is None:
        return None
    url, which = options.start
    other = Storage(url)
    begin = catalog.chosen(other, which)
    if (other.url, begin.name) in passed:
        raise Invalid(
            f"the checkpoint {url}/{begin.name} can't be read: {passed[other.url, begin.name]}. Pass another commit"
            " with --from, or start a new job with --fresh"
        )
    return other, begin


def report(
    manifest: Manifest, url: str, options: CheckpointOptions, send: Callable[[Message], object]
) -> None:
    """Report the restored commit to the driver, which lacks it if the writer exited before it reported the commit.

    Each run numbers its commits from 1, so commits of earlier runs are skipped.
    """
    name = manifest.name
    if name.run == options.run:
        step = manifest.values.get("step")
        send(
            CheckpointWritten(
                name.generation,
                0,
                name.commit,
                f"{url}/{name}",
                manifest.bytes,
                0.0,
                step if type(step) is int else None,
            )
        )


def pass_over(url: str, manifest: Manifest, trouble: str, passed: Passed) -> None:
    """Record an unreadable commit, so that `proposal` skips it."""
    passed[url, manifest.name] = trouble
    _print(f"skipped {url}/{manifest.name}: {trouble}")


def _print(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)

"""Brings the newest durable commit into a state, where nobody holds a commit in memory. Acts, on rank 0."""

from __future__ import annotations

import sys

import tenacity

from elastic.checkpoints import catalog, loading
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.manifest import Manifest, NotReadable
from elastic.checkpoints.options import CheckpointOptions
from elastic.errors import Invalid
from elastic.failpoints import failpoint
from elastic.state.state import ObjectState

PATIENCE_S = 120.0  # with a storage that does not answer


def load_newest(
    storage: Storage, options: CheckpointOptions, state: ObjectState
) -> tuple[str, Manifest] | None:
    """Sets the state to the newest commit that is whole. Returns the folder that it was in, and its manifest.

    None: there is none, and training begins.

    Raises StateMismatch if the state does not fit, Invalid if checkpoints are there and none can be read, OSError.
    """
    tries = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(OSError),
        wait=tenacity.wait_random_exponential(0.2, 5.0),
        stop=tenacity.stop_after_delay(PATIENCE_S),
        before_sleep=lambda tried: _say_once(storage, tried),
        reraise=True,
    )
    found: tuple[str, Manifest] | None = tries(_load, storage, options, state)
    return found


def _load(
    storage: Storage, options: CheckpointOptions, state: ObjectState
) -> tuple[str, Manifest] | None:
    troubles: list[str] = []
    for name in reversed(catalog.names(storage)):
        if name.run < options.floor:
            break
        found = catalog.entry(storage, name)
        catalog.refuse_newer(storage, found)
        trouble = found.trouble
        if found.manifest is not None:
            try:
                failpoint("durable-load")
                loading.load(storage, found.manifest, state)
            except NotReadable as error:
                trouble = str(error)
            else:
                return storage.url, found.manifest
        if not found.torn:
            troubles.append(f"{name}: {trouble}")
            _say(f"{storage.url}/{name} is passed over: {trouble}")
    if troubles:
        raise Invalid(
            f"no checkpoint in {storage.url} can be read ({'; '.join(troubles[:3])}); nothing was changed there. Bring"
            " one back, or begin anew with --fresh"
        )
    if options.start is None:
        return None
    url, which = options.start
    other = Storage(url)
    begin = catalog.chosen(other, which)
    try:
        loading.load(other, begin, state)
    except NotReadable as error:
        raise Invalid(f"{url}/{begin.name} can't be read: {error}") from error
    return other.url, begin


def _say_once(storage: Storage, tried: tenacity.RetryCallState) -> None:
    if tried.attempt_number == 1 and tried.outcome is not None:
        error = tried.outcome.exception()
        _say(f"{storage.url} can't be read yet ({error}); trying for {PATIENCE_S:.0f} s")


def _say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)

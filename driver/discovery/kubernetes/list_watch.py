"""Thread that lists the objects of one kind, and then watches them for changes. Makes no decisions.

After a watch has ended, the next one continues from the same version. If the API server no longer has that version, for
example after a restart, the objects are listed again. Each kind of failure is reported once. Requests are retried with
increasing pauses.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic.driver.discovery.kubernetes.api_client import (
    ApiError,
    ApiErrorKind,
    KubernetesApi,
    Resource,
)
from elastic.driver.discovery.kubernetes.api_objects import Json

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
# Retry less often after these errors, because permissions and tokens rarely change.
REFUSED_PAUSE_S = 30.0
SHORT_S = 1.0  # seconds by which to delay the next watch if a watch ends within this time


@dataclass(frozen=True)
class Listed:
    """Update of a `ListWatch`: all objects of the kind."""

    kind: Resource
    objects: list[Json]


@dataclass(frozen=True)
class Changed:
    """Update of a `ListWatch`: one object was added, changed or deleted."""

    kind: Resource
    object: Json
    deleted: bool


@dataclass(frozen=True)
class WatchFailed:
    """Update of a `ListWatch`: requests to the API server fail, or succeed again.

    Args:
        error: the failure, or None if requests succeed again.
    """

    kind: Resource
    error: ApiError | None


Update = Listed | Changed | WatchFailed


class ListWatch:
    """Thread that lists and watches the objects of one kind, and calls ``report`` with each update."""

    def __init__(
        self,
        cluster: KubernetesApi,
        kind: Resource,
        report: Callable[[Update], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._on_update = report
        self._clock = clock
        self._over = threading.Event()
        self._pause = pause or self._over.wait
        self._version = ""
        self._failed: ApiErrorKind | None = None
        self._pause_s = FIRST_PAUSE_S

    def begin(self) -> None:
        threading.Thread(
            target=self.run, name=f"kubernetes-{self._kind.value}", daemon=True
        ).start()

    def close(self) -> None:
        """Stop the thread after its pending request. ``report`` is not called afterwards."""
        self._over.set()

    def run(self) -> None:
        """List and watch the objects until `close` is called."""
        while not self._over.is_set():
            begun = self._clock()
            try:
                self._follow()
            except ApiError as error:
                self._pause(self._trouble(error))
            # Catch every exception, because the client may run programs and read files to obtain tokens.
            except Exception as error:
                self._pause(self._trouble(ApiError(ApiErrorKind.OTHER, repr(error)[:200])))
            else:
                if self._clock() - begun < SHORT_S:
                    self._pause(SHORT_S)

    def _follow(self) -> None:
        if not self._version:
            objects, self._version = self._cluster.all(self._kind)
            self._report(Listed(self._kind, objects))
        events = self._cluster.events(self._kind, self._version)
        self._recovered()
        for event in events:
            if self._over.is_set():
                return
            self._process(event)

    def _process(self, event: Json) -> None:
        kind, object = event.get("type"), event.get("object")
        if not isinstance(object, dict):
            raise ApiError(
                ApiErrorKind.OTHER,
                "the API server sent an event without an object: check for a proxy in front of it",
            )
        if kind == "ERROR":
            gone = object.get("code") in (404, 410)
            why = ApiErrorKind.GONE if gone else ApiErrorKind.OTHER
            raise ApiError(why, str(object.get("reason", "")))
        version = (object.get("metadata") or {}).get("resourceVersion")
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            self._report(Changed(self._kind, object, kind == "DELETED"))
        if version:
            self._version = str(version)

    def _recovered(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        if self._failed is not None:
            self._failed = None
            self._report(WatchFailed(self._kind, None))

    def _trouble(self, error: ApiError) -> float:
        if error.why is ApiErrorKind.GONE:
            self._version = ""
            return FIRST_PAUSE_S
        if error.why is ApiErrorKind.FORBIDDEN:
            # list again, because the account may have permission to list but not to watch
            self._version = ""
        if error.why is not self._failed:
            self._failed = error.why
            self._report(WatchFailed(self._kind, error))
        pause_s = self._pause_s
        if error.why in (ApiErrorKind.FORBIDDEN, ApiErrorKind.UNAUTHORIZED):
            pause_s = min(pause_s * 10, REFUSED_PAUSE_S)
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)

    def _report(self, update: Update) -> None:
        if not self._over.is_set():
            self._on_update(update)

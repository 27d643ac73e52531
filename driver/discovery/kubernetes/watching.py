"""Follows one kind of objects in a thread of its own: lists them once, then hears what changes. Decides nothing.

A watch that ends goes on where it was. A version that the API server has forgotten, as after its restart, is followed
by a new list. What fails is told once for each reason, and tried again after a growing pause.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic.driver.discovery.kubernetes.cluster import ApiTrouble, KubernetesApi, Refusal, Resource
from elastic.driver.discovery.kubernetes.objects import Json

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
REFUSED_PAUSE_S = 30.0  # rights and tokens change seldom
SHORT_S = 1.0  # a watch that ends within it is not begun again at once


@dataclass(frozen=True)
class Listed:
    """All there are."""

    kind: Resource
    objects: list[Json]


@dataclass(frozen=True)
class Changed:
    """One of them."""

    kind: Resource
    object: Json
    deleted: bool


@dataclass(frozen=True)
class WatchFailed:
    """The API server did not answer as it should; None: it does again."""

    kind: Resource
    error: ApiTrouble | None


Told = Listed | Changed | WatchFailed


class Watching:
    """``tell`` is called in this thread."""

    def __init__(
        self,
        cluster: KubernetesApi,
        kind: Resource,
        tell: Callable[[Told], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._tell = tell
        self._clock = clock
        self._over = threading.Event()
        self._pause = pause or self._over.wait
        self._version = ""
        self._failed: Refusal | None = None
        self._pause_s = FIRST_PAUSE_S

    def begin(self) -> None:
        threading.Thread(
            target=self.run, name=f"kubernetes-{self._kind.value}", daemon=True
        ).start()

    def close(self) -> None:
        """Its thread ends with the answer that it waits for; nothing is told any more."""
        self._over.set()

    def run(self) -> None:
        """Until `close`."""
        while not self._over.is_set():
            begun = self._clock()
            try:
                self._follow()
            except ApiTrouble as error:
                self._pause(self._trouble(error))
            # Of the client, which runs programs and reads files for its tokens.
            except Exception as error:
                self._pause(self._trouble(ApiTrouble(Refusal.OTHER, repr(error)[:200])))
            else:
                if self._clock() - begun < SHORT_S:
                    self._pause(SHORT_S)

    def _follow(self) -> None:
        """One watch, after a list where there is none to go on from. Raises ApiTrouble."""
        if not self._version:
            objects, self._version = self._cluster.all(self._kind)
            self._say(Listed(self._kind, objects))
        events = self._cluster.events(self._kind, self._version)
        self._well()
        for event in events:
            if self._over.is_set():
                return
            self._heard(event)

    def _heard(self, event: Json) -> None:
        kind, object = event.get("type"), event.get("object")
        if not isinstance(object, dict):
            raise ApiTrouble(Refusal.OTHER, "an event without an object")
        if kind == "ERROR":
            gone = object.get("code") in (404, 410)
            why = Refusal.GONE if gone else Refusal.OTHER
            raise ApiTrouble(why, str(object.get("reason", "")))
        version = (object.get("metadata") or {}).get("resourceVersion")
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            self._say(Changed(self._kind, object, kind == "DELETED"))
        if version:
            self._version = str(version)

    def _well(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        if self._failed is not None:
            self._failed = None
            self._say(WatchFailed(self._kind, None))

    def _trouble(self, error: ApiTrouble) -> float:
        """Seconds to wait."""
        if error.why is Refusal.GONE:
            self._version = ""
            return FIRST_PAUSE_S
        if error.why is Refusal.FORBIDDEN:
            self._version = ""  # who may list and not watch lists again and again
        if error.why is not self._failed:
            self._failed = error.why
            self._say(WatchFailed(self._kind, error))
        pause_s = self._pause_s
        if error.why in (Refusal.FORBIDDEN, Refusal.UNAUTHORIZED):
            pause_s = min(pause_s * 10, REFUSED_PAUSE_S)
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)

    def _say(self, told: Told) -> None:
        if not self._over.is_set():
            self._tell(told)

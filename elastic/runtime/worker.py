"""The worker's shell: the parts of the runtime, put together. `recovery` decides; each part acts in its own matter.

`Session` has the machine, its lock and the word to the driver, `LinkThread` hears the driver, `DriverWorlds` and
`FixedWorlds` bring this worker into a world, `Training` is there for `elastic.run`, `CommitLog` for commits, and
`GuardedGroups` for collectives. What every step asks is asked of `Runtime` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic.collectives.interface import Collectives
from elastic.monitoring.reporting import Reporting
from elastic.monitoring.tracing import TraceSession, TracingThroughDriver, TracingToFile
from elastic.negotiation.engine import Engine
from elastic.protocol import messages
from elastic.protocol.messages import Place
from elastic.rendezvous.environment import Environment
from elastic.rendezvous.kept_variables import KeptVariables
from elastic.runtime.commit_log import CommitLog
from elastic.runtime.failures.guarded_groups import Guard, GuardedGroups
from elastic.runtime.link import Link
from elastic.runtime.link_thread import LinkThread
from elastic.runtime.progress import ProgressCounter
from elastic.runtime.session import Session
from elastic.runtime.training import Training
from elastic.runtime.worlds import DriverWorlds, FixedWorlds

if TYPE_CHECKING:
    from elastic.collectives.interface import Messenger


class Runtime:
    """One per process. ``place``, ``generation`` and ``activity`` may be read from any thread."""

    def __init__(self, env: Environment, link: Link | None, session: Session | None = None) -> None:
        """``link`` is None without a driver. ``session``, over the same link: for workers that end their worlds in a
        way of their own.
        """
        self.env = env
        self.elastic = env.elastic
        self.alone = link is None  # no driver: a world of one, or a static world without recovery
        self.activity = 0  # grows with everything that may change tensors
        self._link = link
        progress = ProgressCounter()
        self.session = session = Session(env, link) if session is None else session
        self.tracing: TraceSession = (
            TracingToFile(env)
            if link is None
            else TracingThroughDriver(env, session.send, link.poke)
        )
        self.reporting = None if link is None else Reporting(session.send)
        self.worlds = DriverWorlds(session)
        self.fixed_worlds = FixedWorlds(session)
        self.link_thread = LinkThread(session, self.worlds, progress, self.tracing, self.reporting)
        self.training = Training(session, progress)
        self.commits = CommitLog(session, progress)
        self._groups = GuardedGroups(session, progress)
        self.account = session.account
        self.kept_variables = KeptVariables()
        self.first_not_finite: Any = None  # see Context

    # ---- where this worker stands --------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        return self.session.recovery.place

    @property
    def generation(self) -> int:
        return self.session.recovery.generation

    @property
    def world(self) -> messages.World | None:
        return self.session.recovery.world

    @property
    def broken(self) -> bool:
        """Whether the present generation is over. From any thread."""
        return self.session.broken

    @property
    def provisional(self) -> bool:
        """Whether this worker is in no world yet: its collectives act as in a world of one."""
        return self.session.recovery.provisional

    # ---- collectives ---------------------------------------------------------------------------------------------

    def group(
        self, purpose: str, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> Collectives:
        """The group for a purpose, made at its first use. Collective among ``ranks`` (all, by default).

        Raises PeerLost if it can't be made, because a rank is gone or does not come within the timeout.
        """
        return self._groups.group(purpose, device, ranks)

    def messages(self, purpose: str, ranks: tuple[int, ...] | None = None) -> Messenger:
        """As `group`, for messages from one rank to another. Not for a group of one."""
        return self._groups.messages(purpose, ranks)

    def expect_messages(self, purpose: str, ranks: tuple[int, ...] | None = None) -> None:
        """Returns at once. When another rank sends or receives the first message of this world, this one is connected
        to it too, whatever its training thread does then.
        """
        self._groups.expect_messages(purpose, ranks)

    def wanted(self, purpose: str, device_type: str, ranks: tuple[int, ...] | None = None) -> bool:
        """Whether others are forming this group and wait for this rank. Asks rank 0; not for every step."""
        return self._groups.wanted(purpose, device_type, ranks)

    def alone_group(self) -> Collectives:
        """Of this rank only."""
        return self._groups.alone_group()

    def engine(self) -> Engine:
        """What runs the collectives that are called by name. Call it under `guard`. Raises CollectiveFailed."""
        return self._groups.engine()

    def guard(self, name: str) -> Guard:
        """Around collectives in the training thread: turns CollectiveFailed into PeerLost and tells
        the driver. ``name``: by which the log calls a wait in there.
        """
        self.activity += 1
        return Guard(self._groups, name)

    def mark_broken(self, generation: int, reason: str) -> None:
        """A collective of this generation failed: cuts the rest, tells the driver. From any thread; never raises."""
        self.session.mark_broken(generation, reason)

    # ---- from init() to the end ----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Introduces this process to the driver and waits for its answer. Raises DriverLost."""
        assert self._link is not None
        self.link_thread.connect(self._link)

    def first_world(self) -> None:
        """Waits for the first world, unless one trains already: then the place stays provisional."""
        self.worlds.first()

    def pause(self) -> None:
        """``shutdown()``: groups are kept until the next world or the exit, because a peer may still be in one."""
        self.session.pause()

    def close(self) -> None:
        """At exit, in which user code may still take its time.

        Link and sockets end with the process. Peers that lost them sooner would report a failure whose cause, the exit
        code of this worker, nobody can know yet; and a worker whose link is gone is taken for lost.
        """
        self.tracing.close()
        self.session.send(self.link_thread.time_spent())
        if self.reporting is not None:
            self.reporting.close()
        if not self.elastic and not self.broken:
            self.session.groups.leave()
        self.session.groups.close()

    def close_in_forked_child(self) -> None:
        """In a forked child (a DataLoader worker): hold none of the parent's sockets."""
        if self._link is not None:
            self._link.close_in_forked_child()
        self.session.groups.close_in_forked_child()

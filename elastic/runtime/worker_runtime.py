"""Runtime of a worker, composed of the parts described below. `recovery` makes the decisions.

`Session` holds the state machine, its lock and the connection to the driver. `LinkThread` handles the driver's
messages. `DriverWorlds` and `FixedWorlds` bring this worker into a world. `Training` serves `elastic.run`, `CommitLog`
commits, and `GuardedGroups` collectives. Operations needed in every step are methods of `WorkerRuntime`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic.collectives.interface import Collectives
from elastic.collectives.store_group import DistantGroup
from elastic.monitoring.reporting import Reporting
from elastic.monitoring.timeline_transfer import TraceSession, TracingThroughDriver, TracingToFile
from elastic.negotiation.engine import Engine
from elastic.protocol import messages
from elastic.protocol.messages import (
    ABSENT_LIMIT,
    MISTAKE_LIMIT,
    Merged,
    Miscomputed,
    MistakeFound,
    Place,
)
from elastic.rendezvous.stale_variables import KeptVariables
from elastic.rendezvous.worker_settings import Environment
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.commit_log import CommitLog
from elastic.runtime.driver_connection import Link
from elastic.runtime.guarded_groups import ByteExchange, Guard, GuardedGroups
from elastic.runtime.link_thread import LinkThread
from elastic.runtime.merge_reports import MergeReports
from elastic.runtime.session import Session
from elastic.runtime.training_reports import Training
from elastic.runtime.world_entry import DriverWorlds, FixedWorlds

if TYPE_CHECKING:
    from elastic.collectives.interface import Messenger


class WorkerRuntime:
    """Runtime of this process. ``place``, ``generation`` and ``activity`` may be read from any thread."""

    def __init__(self, env: Environment, link: Link | None, session: Session | None = None) -> None:
        """Create the runtime.

        Args:
            env: settings of this worker.
            link: connection to the driver, or None without one.
            session: session to use instead of a new one, with the same link, for workers that end their worlds in
                another way.
        """
        self.env = env
        self.elastic = env.elastic
        # True without a driver, in a world of one worker or in a static world that cannot recover
        self.alone = link is None
        self.activity = 0  # incremented by each operation that may change tensors
        self._link = link
        self._merge_reports = MergeReports()
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
        self.first_not_finite: Any = None  # see `elastic.context.Context`

    # ---- place of this worker ------------------------------------------------------------------------------------

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
        """Return whether the current world has failed or ended. Thread-safe."""
        return self.session.broken

    @property
    def provisional(self) -> bool:
        """Return whether this worker has yet to join its first world.

        Until then, collectives act as in a world of one rank.
        """
        return self.session.recovery.provisional

    # ---- collectives ---------------------------------------------------------------------------------------------

    def group(
        self, purpose: str, device: torch.device, ranks: tuple[int, ...] | None = None
    ) -> Collectives:
        """Return the group named ``purpose``.

        It is created at its first use, collectively among ``ranks`` (default: all).

        Raises:
            PeerLost: the group could not be created, because a rank was lost or did not arrive within the timeout.
        """
        return self._groups.group(purpose, device, ranks)

    def messages(self, purpose: str, ranks: tuple[int, ...] | None = None) -> Messenger:
        """Return the group named ``purpose`` for point-to-point messages. It is created at its first use.

        Do not call this method for a group of one rank. See `group`.
        """
        return self._groups.messages(purpose, ranks)

    def expect_messages(self, purpose: str, ranks: tuple[int, ...] | None = None) -> None:
        """Prepare for the first point-to-point message of this world. Returns immediately.

        When another rank sends or receives this message, a background thread connects this rank as well.
        """
        self._groups.expect_messages(purpose, ranks)

    def copy_group(
        self, name: str, ranks: tuple[int, ...], *, replies: bool = False
    ) -> Collectives | DistantGroup:
        """Return the group in which the state is sent in the current world.

        If the world spans several hosts, short values are sent through the store. The first broadcast needs no message
        if rank 0 has sent its content as ``source`` of this name when it became ready for this world (see
        `guarded_groups.as_text`).

        Args:
            name: name of what is copied, unique within the generation.
            ranks: the sender, followed by the receivers, which all call this method.
            replies: whether the receivers reply to the first broadcast. They must then have sent their replies as
                metadata `guarded_groups.reply_to`, or the broadcast uses the store.
        """
        return self._groups.copy_group(name, ranks, replies=replies)

    def start_exchange(
        self, key: str, blob: bytes, then: Callable[[list[bytes]], None] | None = None
    ) -> ByteExchange:
        """Start to exchange a few bytes with all ranks of the world, in the background.

        All ranks must call this method.

        The exchange takes fewer round trips than the first negotiated collective of a world, and none if all ranks have
        sent the value as metadata when they became ready for this world (see `DriverWorlds.next`). This method must not
        be called in a world of one rank.

        Args:
            key: name of the exchange and of the metadata. Ranks may use it again once the exchange is complete.
            blob: UTF-8 text that this rank sends. Equal to its metadata of this name, if it has sent any.
            then: called with the bytes of all ranks, now or in the background, before `ByteExchange.wait` returns.
        """
        return self._groups.start_exchange(key, blob, then)

    def form_ahead(self, purpose: str, ranks: tuple[int, ...], generation: int) -> None:
        """Start to connect the CPU group of these ranks in the background, if the world spans several hosts.

        This method must be called on all of these ranks, and the group must be used in this world. It has no effect if
        ``generation`` has ended, and is thread-safe.
        """
        self._groups.form_ahead(purpose, ranks, generation)

    def wanted(self, purpose: str, device_type: str, ranks: tuple[int, ...] | None = None) -> bool:
        """Return whether other ranks are waiting for this rank to create this group.

        The method queries rank 0, so do not call it in every step.
        """
        return self._groups.wanted(purpose, device_type, ranks)

    def alone_group(self) -> Collectives:
        """Return a group that contains only this rank."""
        return self._groups.alone_group()

    def engine(self) -> Engine:
        """Return the engine for named collectives. Call this under `guard`.

        Raises:
            CollectiveFailed: the generation has ended.
        """
        return self._groups.engine()

    def settle(self) -> None:
        """Wait for collectives that so far only GPU streams wait for. Call this before values are saved.

        Raises:
            PeerLost: a rank was lost, so the results of these collectives may be invalid.
        """
        self._groups.settle()

    def guard(self, name: str) -> Guard:
        """Return a context manager in which the training thread runs collectives.

        It converts CollectiveFailed to PeerLost and notifies the driver. ``name`` identifies the context in log lines
        about waits.
        """
        self.activity += 1
        return Guard(self._groups, name)

    def mark_broken(self, generation: int, reason: str) -> None:
        """Report that a collective of this generation has failed.

        This method aborts all other collectives, and notifies the driver. Thread-safe. This method never raises.
        """
        self.session.mark_broken(generation, reason)

    def report_miscomputed(self, evidence: Miscomputed) -> None:
        """Report a rank that has computed wrong gradients. The driver removes the rank."""
        self.session.send(evidence)

    def report_mistake(self, kind: str, text: str) -> None:
        """Report a mistake in the script to the driver, for ``elasticrun explain`` and ``elasticrun status``."""
        self.session.send(MistakeFound(kind, text[:MISTAKE_LIMIT]))

    def report_merge(
        self,
        merges: int,
        position: int,
        islands: Sequence[str],
        absent: Sequence[str],
        waited_s: float,
    ) -> None:
        """Report a merge of `elastic.DiLoCo`.

        This method is limited to one report a second, unless the set of absent islands changes.

        Args:
            merges: number of merges so far in the job.
            position: number of inner steps so far in the job.
            islands: names of all islands.
            absent: names of the islands for which the merge did not wait.
            waited_s: seconds that this rank has waited for the merge.
        """
        names = self.generation, sorted(islands)[:ABSENT_LIMIT]
        late = sorted(absent)[:ABSENT_LIMIT]
        report = self._merge_reports.due(time.monotonic(), late, names, waited_s)
        if report is not None:
            waited, named = report
            self.session.send(
                Merged(
                    self.generation,
                    merges,
                    position,
                    len(islands),
                    late,
                    waited,
                    names[1] if named else [],
                )
            )

    # ---- lifecycle -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Send Hello to the driver and wait for its answer.

        Raises:
            DriverLost: the driver did not respond.
        """
        assert self._link is not None
        self.link_thread.connect(self._link)

    def first_world(self) -> None:
        """Wait for the first world. If a world is already training, return immediately with a provisional place."""
        self.worlds.first()

    def pause(self) -> None:
        """Leave the world in ``shutdown()``.

        This method keeps groups until the next world or the exit, because peers may still use them.
        """
        self.session.pause()

    def close(self) -> None:
        """Prepare the runtime for the exit of the process, during which user code may still run for some time.

        The link and the sockets stay open until the process ends. If the sockets were closed, peers would report a
        failure before the driver has received this worker's exit code. If the link were closed, the worker would count
        as lost.
        """
        self.tracing.close()
        self.session.send(self.link_thread.time_spent())
        if self.reporting is not None:
            self.reporting.close()
        if not self.elastic and not self.broken:
            self.session.groups.leave()
        self.session.groups.close()

    def close_in_forked_child(self) -> None:
        """Close the sockets that a forked child, such as a DataLoader worker, has inherited.

        This method is called in the child.
        """
        if self._link is not None:
            self._link.close_in_forked_child()
        self.session.groups.close_in_forked_child()

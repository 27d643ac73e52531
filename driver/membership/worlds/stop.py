"""Handling of requests to stop a job. Deterministic.

A job that writes checkpoints first writes a last one, if the request allows time for it. Any other job ends
immediately. While the job waits for this checkpoint, the world changes only when workers are lost. A second request
ends the job immediately.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic.driver.events import (
    CheckpointMade,
    Event,
    HastenCheckpoint,
    StopRequested,
    WorkerPaced,
    WorkerReconnected,
)
from elastic.driver.membership.worlds.part import Part
from elastic.driver.membership.worlds.worlds import Phase, Worlds
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.protocol.messages import Commit


class Stop(Part):
    """Handler of stop requests, which waits for the last checkpoint."""

    def __init__(self, worlds: Worlds) -> None:
        super().__init__(worlds)
        self._request: StopRequested | None = None
        self._by: float | None = None
        self._asked_in: int | None = None  # generation that received the request
        self._trained_to: Commit | None = None  # commit last reported by rank 0
        # Oldest commit whose checkpoint counts as the last one. Older checkpoints were already being written at the
        # time of the request.
        self._least: Commit | None = None
        self._newest: Commit | None = None  # newest commit with a durable checkpoint

    def observe(self, event: Event) -> None:
        """Record the facts in an event that matter for a stop. Another part handles the event."""
        match event:
            case WorkerPaced(worker, commit=commit) if commit is not None:
                if self.worlds.members and worker == self.worlds.members[0]:
                    self._trained_to = commit
            case CheckpointMade(commit):
                self._newest = max(self._newest or commit, commit)
                if self._request is not None and self._is_last(commit):
                    self._end(made=True)
            case WorkerReconnected(worker) if worker in self.worlds.members[:1]:
                # Request the checkpoint again: rank 0 may not have received the request before it lost its connection.
                self._asked_in = None
            case _:
                pass

    def requested(self, event: StopRequested) -> None:
        """Handle a stop request: end the job immediately, or first request a last checkpoint."""
        waits = self.settings.durable and event.checkpoint_s > 0 and self._request is None
        if not waits or not self.worlds.world.running:
            self.worlds.end(1, as_sentence(event.reason))
        within = f"waiting up to {event.checkpoint_s:g} s for a last checkpoint"
        self.actions.log("info", f"{within}; a second stop request skips it")
        self._request = event
        self._by = self.actions.now + event.checkpoint_s
        self._least = self._trained_to
        self.worlds.stopping = True
        if self.worlds.phase is Phase.PREPARING:
            self.worlds.call_off(because(ReasonKind.TOLD, text=event.reason))

    def watch(self) -> None:
        """End the job or request the last checkpoint when this is due. Must be called after every event."""
        if self._request is None:
            return
        if self.actions.expired(self._by):
            self._end(made=False)
        training = self.worlds.phase is Phase.TRAINING and self.worlds.world.running
        if training and self._asked_in != self.worlds.generation:
            self._asked_in = self.worlds.generation
            self.actions.add(HastenCheckpoint(self.worlds.generation, self.worlds.members[0]))

    def deadlines(self) -> Iterator[float]:
        """Yield the deadline at which `watch` must be called, if any."""
        if self._by is not None:
            yield self._by

    def _is_last(self, commit: Commit) -> bool:
        """Return whether a checkpoint was written because of the stop request, given its commit.

        If the write began before the request, the commit belongs to an earlier world or is older than the one last
        reported by rank 0.
        """
        at = (commit.generation, commit.number)
        least = (0, 0) if self._least is None else (self._least.generation, self._least.number)
        return commit.generation == self._asked_in and at >= least

    def _end(self, *, made: bool) -> None:
        request = self._request
        assert request is not None
        newest = None if self._newest is None else self._newest.dotted
        within_s = request.checkpoint_s
        why = because(
            ReasonKind.STOPPED, why=request.reason, newest=newest, made=made, within_s=within_s
        )
        self.worlds.end(request.code or 1, why)

"""Coordination of checkpoints: tracks which ranks have written their shares, and completes or drops the checkpoint.

Pure: no I/O, no clock.

    CheckpointDue from rank 0 --> MakeDurable to all
    ShareWritten from all     --> SealCheckpoint to rank 0 --> CheckpointWritten --> CheckpointDone to all
    ShareDropped from one     --> DropCheckpoint to all
    replicas that differ      --> DropCheckpoint to all, ReplicaCorrupted or ReplicasDiffer
    NotFinite from all        --> ReplicasCorrupted, if they differed before

A checkpoint that is not completed in its world is dropped. The state of this module is not saved for the next driver,
because ranks repeat unanswered messages until that driver receives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.protocol.messages import (
    CheckpointDone,
    CheckpointDue,
    CheckpointWritten,
    Commit,
    DropCheckpoint,
    MakeDurable,
    Message,
    NotFinite,
    SealCheckpoint,
    ShareDropped,
    ShareWritten,
    Worker,
)


@dataclass(frozen=True)
class SendToRanks:
    """Action: send a message to these workers."""

    workers: list[Worker]
    message: Message


@dataclass(frozen=True)
class CheckpointCompleted:
    """Action: report that a commit became durable."""

    commit: Commit
    place: str
    size: int  # size of the whole checkpoint, in bytes
    took_s: float
    step: int | None = None  # step counter of the state at the commit


@dataclass(frozen=True)
class CheckpointFailed:
    """Action: report that no checkpoint of a commit will be written.

    Args:
        reason: why the checkpoint is dropped.
    """

    number: int
    worker: Worker
    reason: str
    # False if the cause is harmless: a late message, or an earlier checkpoint that is still being written
    unusual: bool


@dataclass(frozen=True)
class ReplicaCorrupted:
    """Action: report that a worker's replica differs from ``equal`` other replicas, although all were equal before."""

    worker: Worker
    generation: int
    commit: Commit
    parts: list[str]
    equal: int


@dataclass(frozen=True)
class ReplicasDiffer:
    """Action: report that the replicas differ, without knowing which of them is correct.

    Either no majority of replicas is equal, or the replicas were never equal.
    """

    commit: Commit
    groups: list[list[Worker]]  # groups of workers with equal replicas
    parts: list[str]
    ever_equal: bool


@dataclass(frozen=True)
class ReplicasCorrupted:
    """Action: report that gradients from a worker with damaged memory corrupted all replicas.

    Args:
        damaged: workers whose replicas differed from ``equal`` other replicas before. Empty if unknown.
    """

    generation: int
    commit: Commit
    damaged: list[Worker]
    equal: int


Action = (
    SendToRanks
    | CheckpointCompleted
    | CheckpointFailed
    | ReplicaCorrupted
    | ReplicasDiffer
    | ReplicasCorrupted
)


@dataclass
class CheckpointShares:
    """Tracker of one job's checkpoints and of the shares that ranks have written."""

    _generation: int = 0
    _members: list[Worker] = field(default_factory=list)  # members of the world by rank
    # digests of the parts of each worker's state, by number of the request
    _written: dict[int, dict[Worker, dict[str, int]]] = field(default_factory=dict)
    _ever_equal: bool = False  # whether all replicas were equal at any checkpoint of this job
    # dropped checkpoints, by number of the request
    _off: dict[int, DropCheckpoint] = field(default_factory=dict)
    _done: dict[int, Commit] = field(default_factory=dict)
    _not_finite: dict[Worker, NotFinite] = field(default_factory=dict)
    _newest: Commit | None = None  # newest complete checkpoint in any world

    def world(self, generation: int, members: Sequence[Worker]) -> None:
        """Begin a new world, and drop the checkpoints of the previous one."""
        self._generation, self._members = generation, [*members]
        self._written.clear()
        self._off.clear()
        self._done.clear()
        self._not_finite.clear()

    def handle(self, worker: Worker, message: Any) -> list[Action] | None:
        """Handle a message about checkpoint shares. Return the actions, or None for any other message."""
        if not isinstance(
            message, (CheckpointDue, NotFinite, ShareWritten, ShareDropped, CheckpointWritten)
        ):
            return None
        if message.generation != self._generation or worker not in self._members:
            return self._of_the_past(message)
        if isinstance(message, NotFinite):
            self._not_finite[worker] = message
            return self._compare_before()
        number = message.number
        match message:
            case CheckpointDue():
                return [SendToRanks(self._members, MakeDurable(self._generation, number))]
            case ShareWritten() | ShareDropped() if number in self._off:
                return [SendToRanks([worker], self._off[number])]
            case ShareWritten() | ShareDropped() if number in self._done:
                done = CheckpointDone(self._generation, number, self._done[number])
                return [SendToRanks([worker], done)]
            case ShareWritten():
                written = self._written.setdefault(number, {})
                again = worker in written
                written[worker] = message.digests
                if len(written) == len(self._members):
                    return self._complete(number, message.commit, written)
                # A repeated report: repeat the request to the other ranks, which may not have received it.
                if again:
                    silent = [each for each in self._members if each not in written]
                    return [SendToRanks(silent, MakeDurable(self._generation, number))]
            case ShareDropped(reason=reason):
                self._written.pop(number, None)
                drop = self._drop(number, again=message.timing)
                return [drop, CheckpointFailed(number, worker, reason, not message.timing)]
            case CheckpointWritten():
                self._written.pop(number, None)
                self._done[number] = message.commit
                done = CheckpointDone(self._generation, number, message.commit)
                return [SendToRanks(self._members, done), *self._made(message)]
        return []

    def _complete(
        self, number: int, commit: Commit, written: dict[Worker, dict[str, int]]
    ) -> list[Action]:
        groups: dict[tuple[tuple[str, int], ...], list[Worker]] = {}
        for worker in self._members:
            groups.setdefault(tuple(sorted(written[worker].items())), []).append(worker)
        if len(groups) == 1:
            self._ever_equal = True
            return [SendToRanks(self._members[:1], SealCheckpoint(self._generation, number))]
        del self._written[number]
        drop = self._drop(number, again=False)
        most, *others = sorted(groups.values(), key=len, reverse=True)
        right = written[most[0]]
        if not self._ever_equal or 2 * len(most) <= len(self._members):
            wrong = [
                part
                for part in right
                for each in others
                if written[each[0]].get(part) != right[part]
            ]
            parts = [*dict.fromkeys(wrong)]
            return [drop, ReplicasDiffer(commit, [most, *others], parts, self._ever_equal)]
        damaged: list[Action] = []
        for worker in (worker for each in others for worker in each):
            parts = [part for part, value in right.items() if written[worker].get(part) != value]
            damaged.append(ReplicaCorrupted(worker, self._generation, commit, parts, len(most)))
        return [drop, *damaged]

    def _compare_before(self) -> list[Action]:
        reports = {w: each for w, each in self._not_finite.items() if each.digest is not None}
        commits = {each.commit for each in reports.values()}
        if not self._ever_equal or len(commits) != 1 or len(self._not_finite) < len(self._members):
            return []
        groups: dict[int | None, list[Worker]] = {}
        for worker in filter(reports.__contains__, self._members):
            groups.setdefault(reports[worker].digest, []).append(worker)
        if len(groups) == 1:
            return []
        self._not_finite.clear()
        most, *others = sorted(groups.values(), key=len, reverse=True)
        known = 2 * len(most) > len(reports)
        damaged = [worker for each in others for worker in each] if known else []
        return [ReplicasCorrupted(self._generation, commits.pop(), damaged, len(most))]

    def _drop(self, number: int, *, again: bool) -> SendToRanks:
        off = self._off[number] = DropCheckpoint(self._generation, number, again)
        return SendToRanks(self._members, off)

    def _of_the_past(self, message: Any) -> list[Action]:
        return self._made(message) if isinstance(message, CheckpointWritten) else []

    def _made(self, message: CheckpointWritten) -> list[Action]:
        if self._newest is not None and message.commit <= self._newest:
            return []
        self._newest = message.commit
        return [
            CheckpointCompleted(
                message.commit, message.place, message.size, message.took_s, message.step
            )
        ]

"""Reports that a simulated worker sends during training: waits in collectives, pace, and trained samples."""

from __future__ import annotations

from typing import Protocol

from elastic.chaos.simulator.interface import SimulatedJob
from elastic.chaos.simulator.simulated_training import Collective, State
from elastic.protocol import messages
from elastic.protocol.messages import Commit, Message
from elastic.runtime.collective_progress import REPEAT_S
from elastic.runtime.recovery import Recovery

PACE_S, LARGE_PACE_S = 5.0, 30.0


class Reporter(Protocol):
    """Interface of a worker that `SimulatedReports` needs."""

    recovery: Recovery
    alive: bool
    frozen: bool
    state: State
    inside: Collective | None
    entered: int

    def send(self, message: Message) -> None: ...


class SimulatedReports:
    """Reports of one worker."""

    def __init__(self, sim: SimulatedJob, worker: Reporter) -> None:
        self.samples: list[int] = []  # samples since the last commit
        self.idle = False  # whether the worker waits outside collectives without using CPU time
        self.phase = ""  # name of the current phase that the script has marked as long, or empty
        self._sim = sim
        self._worker = worker
        self._reported_at = 0.0  # time at which a wait was last reported
        self._cpu_s = 0.0
        self._looked_at = sim.clock.now
        # current measurement of the pace: start time, number of collectives, and seconds spent in them
        self._paced = (0.0, 0, 0.0)

    def cpu_s(self) -> float:
        """Return the CPU time that the worker has used so far, in seconds."""
        now, worker = self._sim.clock.now, self._worker
        if not (self.idle or worker.frozen or worker.inside is not None):
            self._cpu_s += now - self._looked_at
        self._looked_at = now
        return self._cpu_s

    def waits(self, collective: Collective) -> None:
        """Report a long wait in a collective."""
        worker, now = self._worker, self._sim.clock.now
        if not worker.alive or worker.frozen:
            return
        rank = worker.recovery.place.rank
        # Repeat the report only on GPUs, because their state may have changed.
        due = self._sim.training.on_gpus and now - self._reported_at >= REPEAT_S
        if rank not in collective.reported or due:
            collective.reported.add(rank)
            self._reported_at = now
            self.progress(collective)

    def progress(self, collective: Collective | None) -> None:
        worker, inside, waited_s = self._worker, "", 0.0
        if collective is not None:
            inside = collective.key[1]
            waited_s = self._sim.clock.now - collective.since[worker.recovery.place.rank]
        where = worker.recovery.generation, worker.entered, inside
        gpu = [] if collective is None else self._sim.training.launches(worker, collective)
        worker.send(messages.Progress(*where, waited_s, self.phase, gpu))

    def reconnected(self) -> None:
        """Repeat the last report, which may have been lost with the previous connection."""
        inside = self._worker.inside
        if inside is not None and self._worker.recovery.place.rank in inside.reported:
            self.progress(inside)
        elif self.phase:
            self.progress(None)

    def digest(self, commit: Commit) -> None:
        """Report the digest of a commit, and the samples since the previous commit."""
        samples, self.samples = self.samples, []
        generation, state = self._worker.recovery.generation, self._worker.state
        if not self._sim.reports_samples:
            samples = []
        length = self._sim.training.epoch
        number = samples[0] // length if samples else 0
        of_epoch = [sample % length for sample in samples]
        digest = state.history & 0xFFFFFFFF
        self._worker.send(messages.Digested(generation, commit, digest, 0, of_epoch, number))

    def begin_pace(self) -> None:
        self._paced = (self._sim.clock.now, 0, 0.0)

    def left(self, collective: Collective, began: float) -> None:
        """Record the end of a collective that was entered at ``began``."""
        since, collectives, waited_s = self._paced
        self._paced = (since, collectives + 1, waited_s + self._sim.clock.now - began)
        if self._worker.recovery.place.rank in collective.reported:
            self.progress(None)

    def pace(self) -> None:
        """Report the pace of training periodically."""
        since, collectives, waited_s = self._paced
        over_s = self._sim.clock.now - since
        if over_s >= (LARGE_PACE_S if self._sim.step_s else PACE_S):
            self.begin_pace()
            generation = self._worker.recovery.generation
            self._worker.send(messages.Pace(generation, collectives, waited_s, over_s))

"""Progress of this worker's training thread through its collectives, and reports of it to the driver.

Pure: times are passed in.

The training thread records each collective by setting two attributes and reading the clock twice. The link thread
checks once a second, and when a wait has lasted a second. It reports only waits of a second or more (repeatedly), their
ends, and marked long phases. No message is sent in a step without a long wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.protocol import messages

WAIT_S = 1.0  # seconds that a wait in one collective must last to be reported to the driver
REPEAT_S = 5.0  # interval in seconds between reports of the same wait
# maximum interval in seconds between checks, so that a long wait is detected in time
LOOK_S = WAIT_S
PACE_S = 30.0  # interval in seconds between reports of the total waiting time
ON_GPU = "a collective that the GPU waits for"


class ProgressCounter:
    """Progress of one worker. ``entered`` is the number of collectives in a generation; nested ones are not counted."""

    def __init__(self) -> None:
        self.generation = 0
        self.entered = 0
        self.inside = ""
        self.phase = ""
        self.thread = 0  # ID of the thread in the current or last wait
        self._awaited: tuple[tuple[int, int], dict[int, str]] = (0, 0), {}
        self._since = 0.0
        self._depth = 0
        # generation and number of the collective that was last reported as waiting, or None
        self._reported: tuple[int, int] | None = None
        self._reported_at = 0.0
        self._last_phase = ""
        # number of collectives since the last pace report, and seconds spent in them
        self._completed = 0
        self._waited_s = 0.0
        # generation of the pace report in progress, and the time at which its period began
        self._window: tuple[int, float] | None = None
        self._begun_with: messages.Commit | None = None

    # ---- records of the training thread ----------------------------------------------------------

    def enter(self, generation: int, name: str, now: float, thread: int = 0) -> None:
        """Record that a collective begins to block this thread."""
        self._depth += 1
        if self._depth > 1:
            return
        self.thread = thread
        self._is_in(generation)
        self.entered += 1
        self._since = now
        self.inside = name

    def leave(self, now: float) -> bool:
        """Record that the collective has ended.

        Return whether the wait was reported to the driver. If so, its end must also be reported.
        """
        self._depth -= 1
        if self._depth:
            return False
        self.inside = ""
        self._completed += 1
        self._waited_s += now - self._since
        return self._reported is not None

    def begin_training(self) -> None:
        """Reset the count of collectives when training begins, so that those of the state copy are not counted."""
        self.entered = 0

    def awaited(self) -> dict[int, str]:
        """Return the ranks that this rank waits for, each with its script line, as reported by the driver."""
        at, lines = self._awaited
        return lines if at == (self.generation, self.entered) else {}

    # ---- reports of the link thread --------------------------------------------------------------

    def due_messages(
        self,
        now: float,
        gpu: Callable[[], list[messages.Launches]] = list,
        line: Callable[[int], str] = lambda thread: "",
        followed_since: Callable[[], float | None] = lambda: None,
    ) -> list[messages.Message]:
        """Return the messages to send to the driver now.

        Args:
            now: current time, in seconds.
            gpu: called at each check during a long wait; returns the progress of GPU groups.
            line: called when a wait is reported; returns the script line of the waiting thread.
            followed_since: called unless the training thread waits; returns the launch time of the oldest collective
                that only the GPU waits for, or None.
        """
        due: list[messages.Message] = []
        at, inside, since = (self.generation, self.entered), self.inside, self._since
        if not inside and (launched_at := followed_since()) is not None:
            inside, since = ON_GPU, launched_at
        waits = bool(inside) and now - since >= WAIT_S
        phase = self.phase
        launches = gpu() if waits else []
        news = (at if waits else None) != self._reported or phase != self._last_phase
        if news or (waits and now - self._reported_at >= REPEAT_S):
            self._reported, self._last_phase = at if waits else None, phase
            self._reported_at = now
            waited_s = now - since if waits else 0.0
            where = line(self.thread) if waits else ""
            due.append(self._progress(inside if waits else "", waited_s, launches, where))
        return due

    def next_look_s(self, now: float) -> float:
        """Return the number of seconds that the link thread may sleep without missing a wait that reaches `WAIT_S`."""
        inside, left_s = self.inside, WAIT_S - (now - self._since)
        return left_s if inside and 0 < left_s < LOOK_S else LOOK_S

    def add_awaited(self, generation: int, rank: int, line: str) -> None:
        """Record the driver's notice that this worker waits for a rank."""
        at, lines = (self.generation, self.entered), self.awaited()
        if self.inside and generation == self.generation:
            self._awaited = at, lines | {rank: line}

    def pace(
        self, now: float, generation: int, commit: messages.Commit | None = None
    ) -> list[messages.Message]:
        """Return a report about the last `PACE_S` seconds.

        The result is empty if there was no progress or the world has changed.

        Args:
            now: current time, in seconds.
            generation: generation of the current world, even if it has had no collective yet.
            commit: newest commit of this worker.
        """
        if self._window is None or self._window[0] != generation:
            self._begin_window(now, generation, commit)
            return []
        over_s = now - self._window[1]
        if over_s < PACE_S:
            return []
        completed, waited_s, before = self._completed, self._waited_s, self._begun_with
        self._begin_window(now, generation, commit)
        commits = 0
        if commit is not None and commit != before:
            same = before is not None and before.generation == commit.generation
            commits = commit.number - (before.number if before is not None and same else 0)
        if not completed and not commits:
            return []
        waited_s = min(waited_s, over_s)
        return [messages.Pace(generation, completed, waited_s, over_s, commits, commit)]

    def _begin_window(self, now: float, generation: int, commit: messages.Commit | None) -> None:
        self._window = generation, now
        self._begun_with = commit
        self._completed, self._waited_s = 0, 0.0

    def _is_in(self, generation: int) -> None:
        if generation != self.generation:
            self.generation, self.entered = generation, 0

    # ---- long phases -----------------------------------------------------------------------------

    def begin_phase(self, name: str, generation: int) -> tuple[str, messages.Progress]:
        """Begin a long phase. Return the previous phase, to restore it later, and the message for the driver.

        ``generation`` is the current world's, which may have had no collective yet.
        """
        before = self.phase
        return before, self._reported_phase(name, generation)

    def end_phase(self, before: str, generation: int) -> messages.Progress:
        return self._reported_phase(before, generation)

    def _reported_phase(self, phase: str, generation: int) -> messages.Progress:
        self._is_in(generation)
        self.phase = self._last_phase = phase
        self._reported = None
        return self._progress("", 0.0)

    def _progress(
        self, inside: str, waited_s: float, gpu: Sequence[messages.Launches] = (), line: str = ""
    ) -> messages.Progress:
        where = self.generation, self.entered, inside
        return messages.Progress(*where, waited_s, self.phase, list(gpu), line)

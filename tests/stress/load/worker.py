"""A worker without a process: the pure state machines of a real one, and a script that only trains. See `agents`. Pure.

Its steps and its restores take no time. Unlike a real worker, it makes one step per second, and commits when it must
stop.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.protocol import messages
from elastic.protocol.messages import Address, Message, Worker
from elastic.runtime.collective_progress import ProgressCounter
from elastic.runtime.recovery import Action, Phase, Recovery, Send, Verdict

LAYOUT = messages.Layout(
    "light", "\n".join(f"layer.{n}.weight float32 [512, 512]" for n in range(40))
)
STORE = Address("127.0.0.1", 29500)


class LightWorker:
    """A script that calls ``init()``, enters ``elastic.run`` and trains until a message ends it."""

    def __init__(self, worker: Worker, say: Callable[[Worker, Message], None]) -> None:
        self.worker = worker
        self.recovery = Recovery()
        self.progress = ProgressCounter()
        self._say = say

    @property
    def trains(self) -> bool:
        return self.recovery.running and self.recovery.phase is Phase.TRAINING

    def begin(self) -> None:
        self._say(self.worker, messages.Hello(self.worker, 1000 + self.worker.slot))

    def hear(self, message: Message) -> None:
        """Process a message as the link thread does, and then as the training thread reacts to it."""
        recovery = self.recovery
        before = recovery.generation
        self._do(recovery.receive(message))
        match message:
            case messages.Welcome() if recovery.phase is Phase.OUTSIDE:
                if message.newcomer:
                    self._enter()
                else:
                    self._wait()  # in init()
            case messages.World() if recovery.generation != before:
                if not recovery.running:
                    self._enter()
            case messages.Broken() if recovery.phase is Phase.BROKEN:
                self._wait()
            case messages.StopAt() if recovery.phase is Phase.TRAINING:
                while recovery.verdict() is Verdict.PASS:
                    self._step()
                if recovery.verdict() is Verdict.STOP:
                    self._wait()
            case _:
                pass

    def tick(self, now: float) -> None:
        """Report one step of the last second."""
        recovery, progress = self.recovery, self.progress
        if not self.trains:
            return
        progress.enter(recovery.generation, "gradients", now)
        progress.leave(now)
        for message in (*progress.due_messages(now), *progress.pace(now, recovery.generation)):
            self._say(self.worker, message)

    def _enter(self) -> None:
        self.recovery.enter()
        self._say(self.worker, LAYOUT)
        self._wait()

    def _wait(self) -> None:
        running = self.recovery.running
        self._do(self.recovery.wait_for_world(STORE, LAYOUT.digest if running else ""))

    def train(self) -> None:
        """Resume after the first collective of the world."""
        self._do(self.recovery.resumed({"told": 1.0, "cut": 1.0, "group": 20.0, "step": 5.0}))
        self._step()

    def _step(self) -> None:
        """Make one step and commit it."""
        self.recovery.committed()
        self.recovery.arrive()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._say(self.worker, action.message)

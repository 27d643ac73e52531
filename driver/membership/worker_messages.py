"""What a worker says, as an event. Decides nothing. Pure."""

from __future__ import annotations

from typing import Any

from elastic.driver.events import (
    Event,
    WorkerChecked,
    WorkerConnected,
    WorkerDigested,
    WorkerFailed,
    WorkerLeaving,
    WorkerLocated,
    WorkerPaced,
    WorkerProgressed,
    WorkerQuit,
    WorkerRaised,
    WorkerReady,
    WorkerReconnected,
    WorkerResumed,
    WorkerReturned,
    WorkerSpent,
    WorkerStranded,
)
from elastic.protocol import messages
from elastic.protocol.messages import Worker


def event_of(worker: Worker, message: Any) -> Event:
    """What a worker said, word for word as an event. Layout, StepInput, Result and Reported are none."""
    match message:
        case messages.Hello(_, pid, torch_version):
            return WorkerConnected(worker, pid, torch_version)
        case messages.Reconnected(generation, welcomed):
            return WorkerReconnected(worker, generation, welcomed)
        case messages.Ready(generation, commit, store, layout, running, number):
            return WorkerReady(worker, generation, commit, store, layout, running, number)
        case messages.Failed(generation, reason):
            return WorkerFailed(worker, generation, reason)
        case messages.Stranded(generation, reason):
            return WorkerStranded(worker, generation, reason)
        case messages.Checked(generation, change, check):
            return WorkerChecked(worker, generation, change, check)
        case messages.Leaving(reason):
            return WorkerLeaving(worker, reason)
        case messages.Resumed(generation, phases_ms, copied_bytes):
            return WorkerResumed(worker, generation, phases_ms, copied_bytes)
        case messages.Progress(generation, entered, inside, waited_s, phase, gpu, line):
            return WorkerProgressed(worker, generation, entered, inside, waited_s, phase, gpu, line)
        case messages.Located(generation, line):
            return WorkerLocated(worker, generation, line)
        case messages.Pace(generation, collectives, waited_s, over_s, commits, commit):
            return WorkerPaced(worker, generation, collectives, waited_s, over_s, commits, commit)
        case messages.TimeSpent(generation, times, doing, commit):
            return WorkerSpent(worker, generation, times, doing, commit)
        case messages.Digested(
            generation, commit, digest, buffers, samples, epoch, step, tensors, gradients
        ):
            return WorkerDigested(
                worker,
                generation,
                commit,
                digest,
                buffers,
                samples,
                epoch,
                step,
                tensors,
                gradients,
            )
        case messages.Raised(generation, commit, summary, traceback, hardware, final, beginning):
            return WorkerRaised(
                worker, generation, commit, summary, traceback, hardware, final, beginning
            )
        case messages.Quit(generation, code):
            return WorkerQuit(worker, generation, code)
        case messages.Returned(generation):
            return WorkerReturned(worker, generation)
        case _:
            raise AssertionError(f"no event for {type(message).__name__}")

"""What a worker says, as an event. Decides nothing. Pure."""

from __future__ import annotations

from typing import Any

from elastic.driver import events
from elastic.protocol import messages
from elastic.protocol.messages import Worker


def event_of(worker: Worker, message: Any) -> events.Event:
    """What a worker said, word for word as an event. Layout, StepInput, Result and Reported are none."""
    match message:
        case messages.Hello(_, pid, torch_version):
            return events.WorkerConnected(worker, pid, torch_version)
        case messages.Reconnected(generation, welcomed):
            return events.WorkerReconnected(worker, generation, welcomed)
        case messages.Ready(generation, commit, store, layout, running, number):
            return events.WorkerReady(worker, generation, commit, store, layout, running, number)
        case messages.Failed(generation, reason):
            return events.WorkerFailed(worker, generation, reason)
        case messages.Stranded(generation, reason):
            return events.WorkerStranded(worker, generation, reason)
        case messages.Checked(generation, change, check):
            return events.WorkerChecked(worker, generation, change, check)
        case messages.Leaving(reason):
            return events.WorkerLeaving(worker, reason)
        case messages.Resumed(generation, phases_ms, copied_bytes):
            return events.WorkerResumed(worker, generation, phases_ms, copied_bytes)
        case messages.Progress(generation, entered, inside, waited_s, phase, gpu, line):
            return events.WorkerProgressed(
                worker, generation, entered, inside, waited_s, phase, gpu, line
            )
        case messages.Located(generation, line):
            return events.WorkerLocated(worker, generation, line)
        case messages.Pace(generation, collectives, waited_s, over_s, commits, commit):
            return events.WorkerPaced(
                worker, generation, collectives, waited_s, over_s, commits, commit
            )
        case messages.TimeSpent(generation, times, doing, commit):
            return events.WorkerSpent(worker, generation, times, doing, commit)
        case messages.Digested(
            generation, commit, digest, buffers, samples, epoch, step, tensors, gradients
        ):
            return events.WorkerDigested(
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
            return events.WorkerRaised(
                worker, generation, commit, summary, traceback, hardware, final, beginning
            )
        case messages.Quit(generation, code):
            return events.WorkerQuit(worker, generation, code)
        case messages.Returned(generation):
            return events.WorkerReturned(worker, generation)
        case _:
            raise AssertionError(f"no event for {type(message).__name__}")

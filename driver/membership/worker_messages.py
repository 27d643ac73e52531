"""Conversion of worker messages to events. Makes no decisions. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Any

import msgspec

from elastic.driver import events
from elastic.protocol import messages
from elastic.protocol.messages import Worker

# An event has the fields of its message, preceded by the worker. The messages Layout, StepInput, Result and Reported
# are not converted to events.
EVENTS: dict[type[messages.Message], type[events.Event]] = {
    messages.Reconnected: events.WorkerReconnected,
    messages.Ready: events.WorkerReady,
    messages.Failed: events.WorkerFailed,
    messages.Stranded: events.WorkerStranded,
    messages.Checked: events.WorkerChecked,
    messages.Leaving: events.WorkerLeaving,
    messages.Resumed: events.WorkerResumed,
    messages.Progress: events.WorkerProgressed,
    messages.Located: events.WorkerLocated,
    messages.Pace: events.WorkerPaced,
    messages.TimeSpent: events.WorkerSpent,
    messages.Digested: events.WorkerDigested,
    messages.Miscomputed: events.WorkerMiscomputed,
    messages.MistakeFound: events.WorkerFoundMistake,
    messages.Merged: events.WorkerMerged,
    messages.Raised: events.WorkerRaised,
    messages.Quit: events.WorkerQuit,
    messages.Returned: events.WorkerReturned,
}


def event_of(worker: Worker, message: Any) -> events.Event:
    """Convert a worker's message to an event."""
    if isinstance(message, messages.Hello):
        return events.WorkerConnected(worker, message.pid, message.torch_version)
    return EVENTS[type(message)](worker, *msgspec.structs.astuple(message))

"""Order of a worker's output, regardless of which of its pipes is read first."""

from __future__ import annotations

import asyncio
import os
from unittest.mock import create_autospec

from elastic.driver.output_interfaces import Sink
from elastic.driver.processes.output_pipe import Pipe
from elastic.protocol.messages import Worker


async def test_exception_follows_output_printed_earlier():
    loop, sink, worker = asyncio.get_running_loop(), create_autospec(Sink), Worker("h", 0)
    (printed, stderr), (sent, diagnostics) = os.pipe(), os.pipe()
    first = Pipe(loop, printed, worker, "stderr", sink)
    second = Pipe(loop, sent, worker, "diagnostics", sink)
    second.later_than = [first]
    os.write(stderr, b"printed\n")
    os.write(diagnostics, b"{}\n")
    second.drain()
    assert [call.args[1:] for call in sink.feed.call_args_list] == [
        ("stderr", b"printed\n"),
        ("diagnostics", b"{}\n"),
    ]
    for pipe in (first, second):
        pipe.close()
    os.close(stderr)
    os.close(diagnostics)

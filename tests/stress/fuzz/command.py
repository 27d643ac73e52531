"""`python -m tests.stress fuzz`: fuzz the control-plane protocol, and report the tried inputs.

Decoders and sealed streams get most of the inputs, a real server on loopback the rest of the time. A finding is an
input that was accepted as something else, an exception other than a rejection, an answer to an unauthenticated peer, a
lost or late message of an honest worker, or growing memory.
"""

from __future__ import annotations

import argparse
import math
import time

from rich.console import Console

from elastic.errors import Invalid
from stress.fuzz.decoders import Decoders, Streams
from stress.fuzz.server import LoopbackServer
from stress.fuzz.tally import Tally, memory, table

DESCRIPTION = """\
Fuzz the message decoders and a real server with corrupted, forged, repeated and endless messages."""
EXAMPLES = """\
examples:
  python -m tests.stress fuzz --seconds 60
  python -m tests.stress fuzz --seconds 600 --seed 7
"""
SHARES = {"decoders": 0.4, "streams": 0.2, "server": 0.4}  # shares of the time
WARM_UP = 0.1  # share of each part, after which memory must not grow
GROWTH_LIMIT = 32 << 20  # bytes
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to run (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random input (default: 1)")


def main(options: argparse.Namespace) -> int:
    if not (math.isfinite(options.seconds) and options.seconds > 0):
        raise Invalid(f"--seconds is {options.seconds}: pass a positive number")
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    tallies, words = fuzz(options.seconds, options.seed)
    console.print(table(tallies))
    for line in words:
        console.print(line, markup=False, highlight=False)
    findings = [finding for tally in tallies for finding in tally.findings]
    for finding in findings:
        console.print(f"FOUND {finding}", markup=False, highlight=False)
    total = sum(tally.total for tally in tallies)
    console.print(f"{total:,} inputs, seed {options.seed}: {len(findings) or 'no'} findings")
    return 1 if findings else 0


def fuzz(seconds: float, seed: int) -> tuple[list[Tally], list[str]]:
    """Return the counts of tried inputs, and further lines about them."""
    decoders, streams = Decoders(seed), Streams(seed)
    words = []
    for name, part in (("decoders", decoders), ("streams", streams)):
        grown = _watched(part, SHARES[name] * seconds, part.tally)
        words.append(
            f"{name}: the slowest input took {part.tally.worst_s * 1e3:.0f} ms, memory grew by {grown / 1e6:.1f} MB"
        )
    # Two servers in succession: the first one warms up.
    first, server = LoopbackServer(seed), LoopbackServer(seed + 1)
    first.run(time.monotonic() + WARM_UP * SHARES["server"] * seconds)
    before = memory()
    server.run(time.monotonic() + (1 - WARM_UP) * SHARES["server"] * seconds)
    grown = memory() - before
    _judge(server.strangers, grown)
    server.strangers.findings += first.strangers.findings
    server.turncoats.findings += first.turncoats.findings
    words.append(
        f"server: valid clients exchanged {server.words:,} messages meanwhile, the slowest answer took"
        f" {server.answered_s * 1000.0:.0f} ms; {server.lines} log lines; memory grew by {grown / 1000000.0:.1f} MB"
    )
    return [decoders.tally, streams.tally, server.strangers, server.turncoats], words


def _watched(part: Decoders | Streams, seconds: float, tally: Tally) -> int:
    """Run a part. Return the memory growth after its warm-up."""
    part.run(time.monotonic() + WARM_UP * seconds)
    before = memory()
    part.run(time.monotonic() + (1 - WARM_UP) * seconds)
    grown = memory() - before
    _judge(tally, grown)
    return grown


def _judge(tally: Tally, grown: int) -> None:
    if grown > GROWTH_LIMIT:
        tally.found(f"memory grew by {grown / 1e6:.1f} MB")

"""``elasticrun replay``: replay a job from its journal, on the live page or as an animation."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.driver.commandline.offline.journal_argument import journal_of
from elastic.driver.commandline.options.argument_parser import (
    ArgumentParser,
    add_declared,
    flag,
    number,
    positive,
    seconds,
    whole,
)
from elastic.driver.events import Report
from elastic.driver.journal.entries import Entry
from elastic.driver.monitoring.dashboard import page_server
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.dashboard.page_server import PageServer
from elastic.driver.monitoring.explain.animation import film
from elastic.driver.monitoring.explain.journal_file import (
    JournalEntries,
    JournalReading,
    read_journal,
)
from elastic.driver.monitoring.explain.report_at_job_end import write_page
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.page_access import RequestGuard
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.errors import Invalid

DESCRIPTION = """\
Replay the journal of a job on the dashboard page, or render it as an animation.
JOURNAL is the --journal file of the job. Stop with Ctrl-C."""
LOOPBACK = "127.0.0.1"
FILM_S = 40.0
TICK_S = 0.05  # seconds between checks for entries that are due


@dataclass
class ReplayOptions:
    """Parsed flags of ``elasticrun replay``."""

    speed: float = flag(
        "--speed",
        "X",
        "Play X seconds of the job per second (default: 10).",
        positive,
        default=10.0,
    )
    begin: float = flag(
        "--begin", "S", "Skip the first S seconds of the job (default: 0).", number, default=0.0
    )
    port: int = flag(
        "--port",
        "PORT",
        "Port of the page on 127.0.0.1 (default: a free port).",
        whole(1),
        default=0,
    )
    svg: str | None = flag(
        "--svg", "FILE", "Write an animated SVG file instead of serving the page."
    )
    length: float = flag(
        "--length",
        "S",
        f"Length of the animation in seconds (default: {FILM_S:g}).",
        seconds,
        default=FILM_S,
    )


def parser() -> ArgumentParser:
    """Return the parser of ``elasticrun replay``."""
    made = ArgumentParser(
        prog="elasticrun replay", usage="elasticrun replay [flags] JOURNAL", description=DESCRIPTION
    )
    add_declared(made.group("page"), ReplayOptions, "speed", "begin", "port")
    add_declared(made.group("animation"), ReplayOptions, "svg", "length")
    made.group("general")("-h --help", None, None, "Show this help and exit.", action="help")
    return made


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``elasticrun replay`` and return its exit code.

    Raises:
        Invalid: a flag is invalid, the journal cannot be read, or the film cannot be written.
    """
    options = ReplayOptions()
    wanted = "pass one journal, as in: elasticrun replay --speed 10 job.journal"
    journal = parser().with_one(arguments, options, wanted)
    path = journal_of(journal, environ)
    if options.svg is not None:
        reading = read_journal(path)
        text = film(reading.story, reading.rows, film_s=options.length)
        write_page(Path(options.svg), text)
        print(f"{options.svg}: a film of {options.length:g} s, {len(text.encode()) / 1000:.0f} KB")
        return 0
    asyncio.run(_served(path, options))
    return 0


class ReplayClock:
    """Clock of a replayed job, which runs ``speed`` times as fast as real time.

    The clock starts at ``begins`` when it is first read.
    """

    def __init__(self, begins: float, speed: float, clock: Callable[[], float]) -> None:
        self._begins = begins
        self._speed = speed
        self._clock = clock
        self._started: float | None = None
        self._stopped: float | None = None

    def stop(self) -> None:
        """Stop the clock at the current time."""
        self._stopped = self.now()

    def now(self) -> float:
        """Return the current time of the replayed job, in seconds since 1970."""
        if self._stopped is not None:
            return self._stopped
        if self._started is None:
            self._started = self._clock()
        return self._begins + (self._clock() - self._started) * self._speed


async def _served(path: Path, options: ReplayOptions) -> None:
    with JournalEntries(path) as found:
        played = iter(found)
        first = next(played, None)
        if first is None:
            raise Invalid(
                f"the journal {str(path)!r} contains no events: pass the journal of a job whose driver started"
            )
        reading = found.reading
        model = model_of(reading, path)
        begins = first.at + (reading.offset or 0.0) + options.begin
        clock = ReplayClock(begins, options.speed, time.monotonic)
        listening = page_server.bound(LOOPBACK, options.port)
        port = listening.getsockname()[1]
        token = secrets.token_hex(16)
        guard = RequestGuard(token, {"localhost"})
        server = PageServer(model, listening, guard, clock=clock.now)
        await server.open()
        over = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, over.set)
        print(  # after the handlers are set, because from here on the user may press Ctrl-C
            f"replaying the job at {options.speed:g} times its speed:"
            f" http://{LOOPBACK}:{port}/#{token} (stop with Ctrl-C)",
            flush=True,
        )
        try:
            for entry in itertools.chain([first], played):
                at = entry.at + (reading.offset or 0.0)
                while at > clock.now() and not over.is_set():
                    await asyncio.sleep(TICK_S)
                if over.is_set():
                    return
                play(model, entry, at)
                server.changed()
            clock.stop()
            print("replay finished; serving the page until Ctrl-C", flush=True)
            await over.wait()
        finally:
            server.close()


def model_of(reading: JournalReading, path: Path) -> PageModel:
    settings = reading.settings
    return PageModel(
        TimeSpent(JobView()),
        name=f"{reading.header.job or path.name}, replayed",
        command=reading.header.command,
        least=settings.workers_min if settings else 1,
        most=settings.workers_max if settings else 1,
        begins=reading.header.begins,
    )


def play(model: PageModel, entry: Entry, at: float) -> None:
    """Update the model of the page with one journal entry and the log lines of its actions."""
    model.view.note(entry.event, entry.actions, at)
    for action in entry.actions:
        if isinstance(action, Report):
            for line in action.text.splitlines():
                model.line(action.level, "", line, at)

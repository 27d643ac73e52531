"""Recovery of a job from its journal by another driver, and conversion of times between drivers' clocks.

`past_of` applies entries to a Membership, which is new or restored from a snapshot. Times in a journal are on the job's
clock, which each driver continues with the offset that `clock_offset` returns.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import msgspec

from elastic.driver.events import EndJob
from elastic.driver.journal.entries import (
    SNAPSHOT,
    Header,
    RecordedEntry,
    Resumed,
    Snapshot,
    Writer,
    decoded_for_replay,
)
from elastic.driver.journal.journal import ReplayDiffers, replayed
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.membership import snapshot
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.records.garbage_collection import uncollected
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import FLAGS, UNBOUNDED, Settings, StartCheckpoint
from elastic.errors import Invalid

BOOT = Path("/proc/sys/kernel/random/boot_id")


@uncollected()
def past_of(header: Header, lines: Iterable[bytes]) -> RecoveredJob:
    """Restore a job from its journal.

    Args:
        header: header of the journal.
        lines: all lines after the header, or the lines from a snapshot on.

    Raises:
        Invalid: a line is invalid, or this version makes different decisions.
    """
    settings, writer = header.checked(), header.writer
    membership = Membership(settings)
    at, count = writer.at, 0
    last: RecordedEntry | None = None
    texts = [*lines]
    # number of the last snapshot, whose preceding entries are not needed
    begins = max((n for n, t in enumerate(texts, start=1) if t.startswith(SNAPSHOT)), default=0)
    # An entry is replayed as soon as it is decoded, so that few of them are in memory at the same time.
    for number, text in enumerate(texts, start=1):
        try:
            match line := decoded_for_replay(text):
                case RecordedEntry() if number > begins:
                    count, last = count + 1, line
                    replayed(number + 1, line, membership)
                case Snapshot(data, at, writer) if number == begins:
                    membership = snapshot.restore_snapshot(bytes(data), settings)
                case Resumed(writer):
                    at = max(at, writer.at)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise Invalid(f"entry {number} of the journal is invalid: {error}") from error
        except ReplayDiffers as error:
            why = f"it was written by another version of this program, whose decisions differ ({error})"
            raise Invalid(
                f"{why}: resume the job with the version that wrote the journal"
            ) from error
    ended = membership.verdict
    if last is not None:
        at = max(at, last.at)
        if last.error:
            ended = EndJob(1, as_sentence(f"a bug in the driver: {last.error}"))
    return RecoveredJob(
        header=header,
        settings=settings,
        writer=writer,
        membership=membership,
        last_at=at,
        ended=ended,
        replayed=count,
    )


# ---- comparison with the command line ------------------------------------------------------------------------------


def differences(past: RecoveredJob, command: Sequence[str], settings: Settings) -> list[str]:
    """Return descriptions of how a command and its settings differ from those at the start of the job."""
    found = []
    if list(command) != past.command:
        found.append(f"the command is {_line(command)}, the job started with {_line(past.command)}")
    for field in fields(Settings):
        if field.name == "starting_max":
            continue  # derived from the machine, not set by the user
        now, then = getattr(settings, field.name), getattr(past.settings, field.name)
        if field.name == "env":
            found += [f"workers now receive {name}" for name in now if name not in then]
            found += [f"workers no longer receive {name}" for name in then if name not in now]
        elif now != then:
            flag = FLAGS.get(field.name, field.name)
            found.append(f"{flag} is {_shown(now)}, the job started with {_shown(then)}")
    return found


def check_same_job(past: RecoveredJob, command: Sequence[str], settings: Settings) -> None:
    """Raise Invalid if the command or the settings differ from those at the start of the job.

    The error lists all differences.
    """
    found = differences(past, command, settings)
    if found:
        raise Invalid(
            f"the options differ from those at the start of the job: {'; '.join(found)}. Resume with the"
            " original options, or pass --fresh to discard the job and start a new job"
        )


def to_go_on_with(
    past: RecoveredJob | None,
    command: Sequence[str],
    settings: Settings,
    *,
    resume: bool,
    fresh: bool,
    name: str,
) -> RecoveredJob | None:
    """Return the job that a driver with this command must continue, or None to start a new job.

    A completed job with the same command is returned as well.

    Args:
        past: the job in the journal, or None.
        command: command of this driver.
        settings: settings of this driver.
        resume: whether this driver is allowed to continue a job.
        fresh: whether to discard an existing job.
        name: name of the journal, for error messages.

    Raises:
        Invalid: the job may neither be continued nor discarded.
    """
    if past is None or fresh:
        return None
    if not resume:
        if past.over:
            return None
        raise Invalid(
            f"{name} contains an earlier job that has not ended, and its workers may still be training: pass"
            " --resume to continue the job, or --fresh to discard it and start a new job"
        )
    if past.over and list(command) != past.command:
        assert past.ended is not None
        raise Invalid(
            f"{name} contains an earlier job, {_line(past.command)}, which ended with exit code"
            f" {past.ended.code}: pass --fresh to start a new job"
        )
    if not past.over:
        check_same_job(past, command, settings)
    return past


def starts_over(past: RecoveredJob | None, begins: StartCheckpoint | None) -> str | None:
    """Return a warning that the new job trains from the beginning, because the workers exited with their driver.

    Return None if the earlier job had ended, or if the new job begins from a checkpoint.
    """
    if past is None or past.ended is not None or begins is not None:
        return None
    return (
        "training starts from the beginning: the workers ended with their driver, and there is no checkpoint. Pass"
        " --checkpoint-dir, or --resume also at the first start"
    )


def _line(command: Sequence[str]) -> str:
    return repr(" ".join(command))


def _shown(value: object) -> str:
    if value == UNBOUNDED:
        return "unlimited"
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "on", False: "off"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- time ----------------------------------------------------------------------------------------------------------


def clock_offset(past: RecoveredJob, loop_time: float, *, unix_s: float, boot: str) -> float:
    """Return the seconds to add to this driver's clock, which is at ``loop_time``, to continue the job's clock.

    The offset is unchanged if the machine has not rebooted since the previous driver started. Otherwise, the time
    without a driver is computed from the system clocks. Because these may be wrong, the time is limited to the longest
    cooldown. The job's clock never goes backwards.
    """
    if boot and boot == past.writer.boot:
        now = loop_time + past.writer.offset_s
    else:
        last_unix_s = past.writer.unix_s + past.last_at - past.writer.at
        now = past.last_at + min(max(0.0, unix_s - last_unix_s), past.settings.cooldown_max_s)
    return max(now, past.last_at) - loop_time


def writer_here(*, term: int = 1, address: str = "", past: RecoveredJob | None = None) -> Writer:
    """Return a description of this process as the driver that writes the journal from now on.

    The journal's clock is the clock of asyncio's event loops plus ``offset_s``.
    """
    at, unix_s, boot = time.monotonic(), time.time(), ""
    with contextlib.suppress(OSError):
        boot = BOOT.read_text().strip()
    offset_s = 0.0 if past is None else clock_offset(past, at, unix_s=unix_s, boot=boot)
    date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return Writer(term, address, date, os.getpid(), at + offset_s, offset_s, unix_s, boot)

"""Checkpoint options of a worker, read from the environment variables that the driver sets. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.errors import Invalid

DIR, EVERY, KEEP = "ELASTIC_CHECKPOINT_DIR", "ELASTIC_CHECKPOINT_EVERY", "ELASTIC_CHECKPOINT_KEEP"
RUN, FLOOR, FROM = "ELASTIC_CHECKPOINT_RUN", "ELASTIC_CHECKPOINT_FLOOR", "ELASTIC_CHECKPOINT_FROM"
DEFAULT_EVERY = "60s"
DEFAULT_KEEP = 3
DEFAULT_RESTARTS = 3
# Value of ``--checkpoint-every``: checkpoints are written only when the script requests them, and at the end.
MANUAL = "manual"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoint options of a worker.

    Args:
        url: folder of all checkpoints.
        every_commits: number of commits between two checkpoints, or None.
        every_s: seconds between two checkpoints, or None. If both are None, only the script requests checkpoints.
        keep: number of checkpoints to keep.
        run: run number of the checkpoints that are written.
        floor: smallest run number of this training. Runs with a smaller number belong to another training.
        start: a folder, and a commit in it from which to start if ``url`` has no checkpoint yet.
    """

    url: str
    every_commits: int | None = None
    every_s: float | None = 60.0
    keep: int = DEFAULT_KEEP
    run: int = 0
    floor: int = 0
    start: tuple[str, str] | None = None


def parse_every(text: str) -> tuple[int | None, float | None]:
    """Parse an interval such as ``500commits``, ``60s``, ``10m`` or ``1h``.

    Return the pair (commits, seconds). One of the two is None; both are None for ``manual``.

    Raises:
        Invalid: the text has another form.
    """
    plain = text.strip().lower()
    if plain == MANUAL:
        return None, None
    for ending in ("commits", "commit"):
        number = plain.removesuffix(ending).strip()
        if plain.endswith(ending) and number.isdecimal() and int(number) > 0:
            return int(number), None
    try:
        seconds = float(plain[:-1]) * _UNITS[plain[-1:]]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise Invalid(
            f"--checkpoint-every is {text!r}: pass an interval (60s, 10m, 1h), a number of commits (500commits),"
            f" or {MANUAL} if the script calls elastic.Checkpoints().save()"
        )
    return None, seconds


def parse_from(text: str) -> tuple[str, str]:
    """Parse ``DIR@COMMIT`` to the folder and the commit.

    Raises:
        Invalid: the text has another form.
    """
    url, _, commit = text.rpartition("@")
    if not url or not commit:
        raise Invalid(
            f"--from is {text!r}: pass a checkpoint folder and a commit, as in /checkpoints@g3c450. To list the"
            " commits, run elasticrun checkpoints DIR"
        )
    return url, commit


def read(environ: Mapping[str, str]) -> CheckpointOptions | None:
    """Return the checkpoint options in the environment, or None if checkpoints are off.

    Raises:
        Invalid: a variable has an invalid value.
    """
    url = environ.get(DIR)
    if not url:
        return None
    every_commits, every_s = parse_every(environ.get(EVERY) or DEFAULT_EVERY)
    start = environ.get(FROM)
    return CheckpointOptions(
        url=url,
        every_commits=every_commits,
        every_s=every_s,
        keep=_whole(environ, KEEP, DEFAULT_KEEP, 1),
        run=_whole(environ, RUN, 0, 0),
        floor=_whole(environ, FLOOR, 0, 0),
        start=parse_from(start) if start else None,
    )


def _whole(environ: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise Invalid(f"{name} is {text!r}: pass a whole number, {least} or more")
    return int(text)

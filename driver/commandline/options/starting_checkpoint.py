"""Evaluation of the checkpoint flags: the commit from which a job begins, and the settings for its workers.

All problems of a checkpoint folder are detected here, before any process is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from elastic.checkpoints import catalog
from elastic.checkpoints import options as checkpoint_env
from elastic.checkpoints.files.manifest import Manifest, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.driver.commandline.options.checkpoint_and_failover_flags import CheckpointFlags
from elastic.driver.commandline.options.finished_job import RerunReason, SameCommand, same_command
from elastic.driver.commandline.options.flags import Options
from elastic.driver.commandline.options.keyword_arguments import flag_of
from elastic.driver.job.start_cleanup import StartCleanup
from elastic.driver.network.blocking_calls import begun
from elastic.driver.settings import StartCheckpoint
from elastic.errors import Invalid

Value = TypeVar("Value")
ANSWER_S = 60.0  # seconds within which the storage must respond at the start of a job


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoint settings of a job.

    Args:
        env: environment variables for every worker.
        restarts: value of the field of the same name in `Settings`.
        notes: log lines about the start, as pairs of a level and a text.
        begins: the checkpoint from which training resumes. None means that training starts from the beginning.
    """

    env: dict[str, str] = field(default_factory=dict)
    restarts: int | None = None
    notes: list[tuple[str, str]] = field(default_factory=list)
    begins: StartCheckpoint | None = None


def checkpoint_plan(
    options: Options, *, elastic: bool, traces: StartCleanup | None = None
) -> CheckpointPlan:
    """Evaluate the checkpoint flags, and check that the folder can be read and written.

    Args:
        options: options of the job.
        elastic: whether the job can restart workers.
        traces: registry of created files, which are removed if the start is refused.

    Raises:
        Invalid: flags contradict each other, or the folder cannot be used or is in use.
    """
    traces = traces or StartCleanup()
    if options.checkpoint_dir is None:
        for option in fields(CheckpointFlags):
            if getattr(options, option.name) is not None:
                raise Invalid(
                    f"{flag_of(option)} requires --checkpoint-dir: pass --checkpoint-dir DIR"
                )
        return CheckpointPlan()
    if options.fresh and options.begin_from is not None:
        raise Invalid(
            f"--fresh and --from {options.begin_from} can't be combined, because --fresh starts a new job, and"
            " --from starts from a commit: pass only one of them"
        )
    every = options.checkpoint_every or checkpoint_env.DEFAULT_EVERY
    checkpoint_env.parse_every(every)
    storage = Storage(options.checkpoint_dir)
    if not storage.outlives_us:
        raise Invalid(
            f"--checkpoint-dir {storage.url} is lost when the writing process ends: pass a folder, or a URL of"
            " an object store"
        )
    if storage.local:
        traces.folder(storage.absolute)
    run, begin, notes = _within(ANSWER_S, storage.url, lambda: _look(options, storage))
    traces.run(storage, run)
    new_job = options.fresh or options.begin_from is not None
    env = {
        checkpoint_env.DIR: storage.absolute,
        checkpoint_env.EVERY: every,
        checkpoint_env.KEEP: str(
            checkpoint_env.DEFAULT_KEEP
            if options.checkpoint_keep is None
            else options.checkpoint_keep
        ),
        checkpoint_env.RUN: str(run),
        checkpoint_env.FLOOR: str(run if new_job else 0),
    }
    begins = None
    if begin is not None:
        url, found = begin
        begins = StartCheckpoint(str(found.name), url, found.step)
        unless = ", unless its workers still train" if options.resume or options.standby else ""
        notes.append(("info", f"training resumes from {found}{unless}: {url}/{found.name}"))
        if options.begin_from is not None:
            env[checkpoint_env.FROM] = f"{url}@{found.name}"
    restarts = checkpoint_env.DEFAULT_RESTARTS if options.restarts is None else options.restarts
    return CheckpointPlan(env, restarts if elastic else None, notes, begins)


# ---- already finished? -----------------------------------------------------------------------------------------------

_ELSEWHERE = ("hostfile", "host_discovery_script", "etcd", "kubernetes_service")


def same_command_of(options: Options, environ: Mapping[str, str]) -> SameCommand | None:
    """Return the identity of the command, with which an earlier job of the same command can be found.

    Return None if the identity cannot be determined, for example because the job uses other machines.
    """
    elsewhere = any(getattr(options, name) is not None for name in _ELSEWHERE)
    drivers = options.kubernetes or options.slurm or options.resume or options.standby
    if options.checkpoint_dir is None or elsewhere or drivers or _other_hosts(options.hosts):
        return None
    # Flags that apply to one start are not part of the command's identity.
    relevant = asdict(replace(options, fresh=False, begin_from=None))
    return same_command(
        options.checkpoint_dir, repr(sorted(relevant.items())), options.command, environ
    )


def finished_before(same: SameCommand, options: Options) -> Manifest | None:
    """Return the last commit if the same job has already finished and neither --fresh nor --from was passed."""
    if options.fresh or options.begin_from is not None:
        return None
    return _unless_silent(same.finished_before)


def rerun_reason(same: SameCommand, options: Options) -> RerunReason | None:
    """Return the reason why a finished job runs again.

    Return None if no job has finished, or if --fresh or --from was passed.
    """
    if options.fresh or options.begin_from is not None:
        return None
    return _unless_silent(same.rerun_reason)


def note_finished(same: SameCommand, run: int) -> None:
    """Record that the job of this run ended with exit code 0."""
    _unless_silent(lambda: same.has_finished(run))


def _other_hosts(listed: str | None) -> bool:
    words = (listed or "").split(",")
    return any(word.partition(":")[0] not in ("", "localhost", "127.0.0.1") for word in words)


def _unless_silent(work: Callable[[], Value]) -> Value | None:
    """Return the result of ``work``, or None if the storage fails or does not respond within ANSWER_S seconds."""
    future = begun(work, "checkpoints")
    if not futures.wait([future], ANSWER_S).done:
        return None
    try:
        found: Value = future.result()
        return found
    except (OSError, UnreadableCommit):
        return None


Begin = tuple[str, Manifest] | None
Notes = list[tuple[str, str]]


def _look(options: Options, storage: Storage) -> tuple[int, Begin, Notes]:
    storage.prove_writable()
    alone = not (options.resume or options.standby)
    if alone:
        _refuse_other(storage, catalog.writing_here(storage))
    notes: Notes = []
    begin = _begin(options, storage, notes)
    run = catalog.claim_run(storage)
    # If another job has started simultaneously, the job with the lower run number continues.
    other = catalog.writing_here(storage, before=run) if alone else None
    if other is not None:
        catalog.give_back_run(storage, run)
        _refuse_other(storage, other)
    return run, begin, notes


def _refuse_other(storage: Storage, other: catalog.RunOwner | None) -> None:
    if other is not None:
        raise Invalid(
            f"--checkpoint-dir {storage.url} is in use: process {other.pid} of this machine writes checkpoints"
            " there, but each job needs its own folder. Wait until the process ends, or pass another folder"
        )


def _begin(options: Options, storage: Storage, notes: Notes) -> Begin:
    if options.begin_from is not None:
        url, which = checkpoint_env.parse_from(options.begin_from)
        other = Storage(url)
        return other.absolute, catalog.chosen(other, which)
    if options.fresh:
        return None
    passed_over: list[str] = []
    for name in reversed(catalog.names(storage)):
        entry = catalog.entry(storage, name)
        if entry.manifest is not None:
            notes += [("warning", f"skipped checkpoint {each}") for each in passed_over]
            return storage.absolute, entry.manifest
        catalog.refuse_newer(storage, entry)
        if not entry.torn:
            passed_over.append(f"{name}: {entry.trouble}")
    if passed_over:
        raise Invalid(
            f"no checkpoint in --checkpoint-dir {storage.url} is readable ({passed_over[0]}). No checkpoint was"
            " changed. Restore a checkpoint from a backup, or start a new job with --fresh"
        )
    return None


def _within(seconds: float, url: str, work: Any) -> Any:
    """Run ``work`` with a timeout, and return its result.

    Raises:
        Invalid: the storage at ``url`` does not respond within ``seconds``.
    """
    future = begun(work, "checkpoints")
    if not futures.wait([future], seconds).done:
        raise Invalid(
            f"--checkpoint-dir {url} did not respond within {seconds:.0f} s: check the mount or the network, or pass"
            " another folder or URL"
        )
    try:
        return future.result()
    except (OSError, UnreadableCommit) as error:
        raise Invalid(
            f"--checkpoint-dir {url} can't be read: {error}. Check its permissions and credentials, or pass another"
            " folder or URL"
        ) from error

"""Choice of the worker that receives the driver's standard input. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic.errors import Invalid
from elastic.protocol.messages import Worker


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return the rank that a worker's environment contains, or None."""
    text = environ.get("HOROVOD_RANK", "")
    return int(text) if text.isdecimal() else None


def check_stdin(rank: int | None, workers_max: int, *, by_agents: bool) -> None:
    """Raise Invalid if ``--stdin`` cannot be used.

    Args:
        rank: rank of the worker that reads standard input. None means that no worker reads it.
        workers_max: size of the largest world.
        by_agents: whether agents in separate processes start the workers.

    Raises:
        Invalid: no worker could read standard input with these settings.
    """
    if rank is None:
        return
    if rank >= workers_max:
        ranks = "rank 0" if workers_max == 1 else f"ranks 0 to {workers_max - 1}"
        raise Invalid(
            f"--stdin {rank} is not a rank of this job, which has {ranks}: pass one of these ranks"
        )
    if by_agents:
        raise Invalid(
            f"--stdin {rank} is not supported for this job, because standard input reaches only workers on this"
            " machine that exit together with this process: omit --stdin, or omit other hosts, --etcd, --resume"
            " and --standby. With a discovery script, also pass --network-interface lo"
        )


class StandardInput:
    """Selection of the worker that receives the job's standard input, by its rank.

    If ``rank`` is None, no worker receives the input. Otherwise, one worker at a time receives it. After
    this worker has ended, the next worker in its slot or with its rank receives the remaining input.
    """

    def __init__(self, rank: int | None) -> None:
        self._rank = rank
        self._holder: Worker | None = None

    def receives(self, worker: Worker, rank: int | None, alive: Collection[Worker]) -> bool:
        """Return whether a worker that is about to start receives standard input.

        Args:
            worker: the worker to start.
            rank: its rank, or None if unknown.
            alive: the running workers.
        """
        if self._rank is None or self._holder in alive:
            return False
        last = self._holder
        if rank != self._rank and (
            last is None or (last.host, last.slot) != (worker.host, worker.slot)
        ):
            return False
        self._holder = worker
        return True

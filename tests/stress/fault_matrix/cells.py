"""Axes of the fault matrix, victims, faults and phases, and the cells that are not possible. Pure.

Every other decision about a cell is in `expectations`; `job` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RANK_0, MIDDLE, LAST = "rank 0", "middle", "last"
JOINER, TWO, ALL_BUT_ONE = "joiner", "two at once", "all but one"
AGENT, DRIVER = "agent", "driver"
VICTIMS = {
    RANK_0: "the member with rank 0, which sends the state to joining workers",
    MIDDLE: "the member with rank 2 of 4",
    LAST: "the member with rank 3 of 4",
    JOINER: "a worker that has just been started in a free slot",
    TWO: "ranks 0 and 2 at the same moment",
    ALL_BUT_ONE: "ranks 0, 1 and 2 at the same moment",
    AGENT: "the agent of the host",
    DRIVER: "the process elasticrun",
}

KILL, TERM, STOP, SEGV, EXIT = "SIGKILL", "SIGTERM", "SIGSTOP, SIGCONT", "SIGSEGV", "os._exit"
RAISE, GIL, SHUT, DROP = "user exception", "GIL held", "sockets shut", "packets dropped"
SLOW, DISK, MEMORY = "10 x slow", "disk full", "out of memory"
FAULTS = {
    KILL: "the process is killed; the kernel's out-of-memory killer does the same",
    TERM: "a request to leave",
    STOP: "the process is stopped, and continued after 1.5 s unless it is fenced",
    SEGV: "the process reads address 0",
    EXIT: "the process exits immediately with code 7",
    RAISE: "RuntimeError",
    GIL: "a call into C that sleeps and keeps the GIL: no thread of the process runs Python",
    SHUT: "all its connections to other workers are shut down; ELASTIC_NATIVE=0, so that reductions use them",
    DROP: "nftables drops every packet to and from all its sockets, permanently",
    SLOW: "the phase takes 0.4 s once, ten times as long as a step",
    DISK: "a write fails with ENOSPC",
    MEMORY: "an allocation fails because of RLIMIT_AS",
}
RAISING = (RAISE, DISK, MEMORY)
ENDING = (KILL, SEGV, EXIT)

BEFORE_INIT, RENDEZVOUS, FORWARD, BUCKET = "before init", "rendezvous", "forward", "bucket"
STEP, BEFORE_COMMIT, SNAPSHOT, COPY = "optimizer step", "before commit", "snapshot", "state copy"
RESET, EVALUATION, SHUTDOWN = "reset callback", "evaluation", "shutdown"
WRITING, SHARES, MANIFEST = "share being written", "all shares written", "manifest written"
RESUME, CHANGE = "resume", "planned change"
STANDBY, PREPARED = "standby called", "prepared process"
SHARD_COPY, SHARD_MIRROR, SHARD_SEAL = "shard copy", "shard mirror", "shard seal"
SHARD_TRAVEL, SHARD_PLACING = "shard travel", "shard placing"
PHASES = {  # failpoint of each phase
    BEFORE_INIT: "before-init",
    RENDEZVOUS: "rendezvous",
    FORWARD: "forward",
    BUCKET: "bucket",
    STEP: "optimizer-step",
    BEFORE_COMMIT: "before-commit",
    SNAPSHOT: "snapshot",
    COPY: "state-copy",
    RESET: "reset",
    EVALUATION: "evaluation",
    SHUTDOWN: "shutdown",
    WRITING: "durable-file",
    SHARES: "durable-manifest",
    MANIFEST: "durable-sealed",
    RESUME: "durable-load",
    CHANGE: "hold",
    STANDBY: "state-copy",
    PREPARED: "before-init",
    SHARD_COPY: "shard-copy",
    SHARD_MIRROR: "shard-mirror",
    SHARD_SEAL: "shard-seal",
    SHARD_TRAVEL: "shard-moved",
    SHARD_PLACING: "shard-placed",
}
MEANINGS = {
    BEFORE_INIT: "the script has started, but has not called init() yet",
    RENDEZVOUS: "the worker has reported ready, and waits for the next world",
    FORWARD: "in the forward pass",
    BUCKET: "in the second gradient bucket of a backward pass",
    STEP: "gradients are averaged, but parameters are not changed yet",
    BEFORE_COMMIT: "the step is complete, but not committed",
    SNAPSHOT: "half of a commit is saved",
    COPY: "a joining worker has received the header of the state, but not its tensors",
    RESET: "in a reset callback, after the world has changed",
    EVALUATION: "in a forward pass without gradients",
    SHUTDOWN: "training has ended, but the process has not",
    WRITING: "the background thread has written half of its share of a durable commit",
    SHARES: (
        "the background thread of rank 0 has written the index after all shares, but not the manifest"
    ),
    MANIFEST: "the manifest is written, but no process has been notified",
    RESUME: "all members were killed; rank 0 of the new workers starts to read the newest checkpoint",
    CHANGE: (
        "rank 1 (or 3) leaves as after a preemption notice, and all members wait or stop at a safepoint"
    ),
    STANDBY: (
        "a standby replaces rank 3, and has received the header of the state, but not its tensors"
    ),
    PREPARED: "a preloaded process has become a worker, and the script has started in it",
    SHARD_COPY: "sharded state (FSDP2): a commit has begun, and this rank's shard is not copied yet",
    SHARD_MIRROR: "the shard is copied, but not mirrored on other ranks",
    SHARD_SEAL: "the shard is mirrored, but it is not known yet whether all shards are",
    SHARD_TRAVEL: "rank 1 was killed (or a worker joins), and the rows of the new shards have arrived",
    SHARD_PLACING: "as before, and the rows have been copied to the parameters and the optimizer",
}
IN_BACKGROUND = (WRITING, SHARES, MANIFEST)  # not in the thread that trains
COMMITS_SHARDS = (SHARD_COPY, SHARD_MIRROR, SHARD_SEAL)
MOVES_SHARDS = (SHARD_TRAVEL, SHARD_PLACING)


@dataclass(frozen=True, order=True)
class Cell:
    victim: str
    fault: str
    phase: str

    def __str__(self) -> str:
        return f"{self.victim} | {self.fault} | {self.phase}"


def all_cells() -> Iterator[Cell]:
    for victim in VICTIMS:
        for phase in PHASES:
            for fault in FAULTS:
                yield Cell(victim, fault, phase)


def impossible(cell: Cell) -> str:
    """Return why a cell is not possible; empty if it is."""
    victim, fault, phase = cell.victim, cell.fault, cell.phase
    if victim == AGENT:
        return "the agent of this machine runs in the driver's process; see `driver`"
    if victim == DRIVER:
        return _impossible_for_driver(fault)
    if phase == COPY and victim in (MIDDLE, LAST, ALL_BUT_ONE):
        return "only rank 0, which sends, and the joiner take part in the copy"
    if phase == RESET and victim == JOINER:
        return "the world of a joiner has not changed: its callbacks are not called"
    if phase == BEFORE_INIT and fault in (SHUT, DROP):
        return "before init() a worker has no connection"
    if fault == SHUT and phase in (RENDEZVOUS, RESET):
        return "the old world's connections are already closed, and those of the new world do not exist yet"
    return _impossible_phase(victim, fault, phase)


def _impossible_phase(victim: str, fault: str, phase: str) -> str:
    if phase in (SHARES, MANIFEST) and victim != RANK_0:
        return "only rank 0 writes the index and the manifest"
    if phase == RESUME and victim != RANK_0:
        return "only rank 0 reads, and sends to the others: see state copy"
    if phase == CHANGE and victim == JOINER:
        return "a joiner has no safepoint to wait at"
    if phase == CHANGE and fault == SHUT:
        return "the world ends at this safepoint: its connections are not used again"
    if phase in (STANDBY, PREPARED) and victim != JOINER:
        return "only a joiner has this phase"
    if phase in (*COMMITS_SHARDS, *MOVES_SHARDS) and victim == LAST:
        return "shards are alike on all ranks but 0, which sends replicated values: see middle"
    if phase in MOVES_SHARDS and victim == ALL_BUT_ONE:
        return "rank 1 is lost before: see two at once"
    if phase == PREPARED and fault in (SHUT, DROP):
        return "before init() a worker has no connection"
    return ""


def _impossible_for_driver(fault: str) -> str:
    if fault in (EXIT, RAISE, GIL):
        return "no user code runs in the driver: see SIGKILL for a crash, SIGSTOP for a hang"
    if fault == MEMORY:
        return "the driver holds no tensors; the kernel's out-of-memory killer is SIGKILL"
    if fault in (SHUT, DROP):
        return "the driver's connections are local to its machine, so only a worker's end can fail"
    return ""

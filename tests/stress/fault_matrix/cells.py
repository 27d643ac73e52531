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
    RANK_0: "the victim is rank 0, which sends the state to joining workers",
    MIDDLE: "the victim is rank 2 of 4",
    LAST: "the victim is rank 3 of 4",
    JOINER: "the victim is a worker that has just been started in a free slot",
    TWO: "the faults hit ranks 0 and 2 at the same time",
    ALL_BUT_ONE: "the faults hit ranks 0, 1 and 2 at the same time",
    AGENT: "the victim is the agent of the host",
    DRIVER: "the victim is the `elasticrun` process",
}

KILL, TERM, STOP, SEGV, EXIT = "SIGKILL", "SIGTERM", "SIGSTOP, SIGCONT", "SIGSEGV", "os._exit"
RAISE, GIL, SHUT, DROP = "user exception", "GIL held", "sockets shut", "packets dropped"
SLOW, DISK, MEMORY = "10 x slow", "disk full", "out of memory"
FAULTS = {
    KILL: "The process is killed with SIGKILL, the signal of the kernel's out-of-memory killer.",
    TERM: "The process receives SIGTERM, which requests a clean exit.",
    STOP: "The process is stopped. It is continued after 1.5 s unless the driver has fenced it.",
    SEGV: "The process reads address 0, so the kernel kills it.",
    EXIT: "The process exits immediately with code 7.",
    RAISE: "The script raises a RuntimeError.",
    GIL: "A call into C sleeps and holds the GIL, so no thread of the process runs Python.",
    SHUT: (
        "All connections of the process to other workers are shut down. With ELASTIC_NATIVE=0, reductions use"
        " these connections."
    ),
    DROP: "A rule of nftables permanently drops every packet to and from the sockets of the process.",
    SLOW: "The phase is delayed once by 0.4 s, ten times the duration of a step.",
    DISK: "A write fails with ENOSPC.",
    MEMORY: "An allocation fails because of RLIMIT_AS.",
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
    BEFORE_INIT: "The script has started, but has not called init() yet.",
    RENDEZVOUS: "The worker has reported that it is ready, and waits for the next world.",
    FORWARD: "The worker runs the forward pass.",
    BUCKET: "The worker runs a backward pass and fills the second gradient bucket.",
    STEP: "The worker has averaged the gradients, but has not updated the parameters.",
    BEFORE_COMMIT: "The worker has completed the step, but has not committed it.",
    SNAPSHOT: "The worker has copied half of the state for a commit.",
    COPY: "A joining worker has received the header of the state, but not its tensors.",
    RESET: "The world has changed, and the worker runs a reset callback.",
    EVALUATION: "The worker runs a forward pass without gradients.",
    SHUTDOWN: "Training has ended, but the process has not exited.",
    WRITING: "The background thread of the worker has written half of the worker's share of a durable commit.",
    SHARES: (
        "All shares are written. The background thread of rank 0 has written the index, but not the manifest."
    ),
    MANIFEST: "The manifest is written, but no process has received the notification of the new checkpoint.",
    RESUME: "All members were killed, and rank 0 of the new workers starts to read the newest checkpoint.",
    CHANGE: (
        "Rank 1 (or 3) leaves, as after a preemption notice. All members wait or stop at a safepoint."
    ),
    STANDBY: (
        "A standby replaces rank 3, and has received the header of the state, but not its tensors."
    ),
    PREPARED: "A preloaded process has become a worker, and the script has started in it.",
    SHARD_COPY: (
        "The state is sharded (FSDP2). A commit has begun, and this rank's shard is not copied yet."
    ),
    SHARD_MIRROR: "The worker has copied its shard, but no other rank has received the mirror copy.",
    SHARD_SEAL: "The shard is mirrored, but the worker does not know yet whether all shards are mirrored.",
    SHARD_TRAVEL: (
        "Rank 1 was killed or a worker joined, and the rank has received the rows of its new shard."
    ),
    SHARD_PLACING: (
        "The rank has copied the rows of its new shard to the parameters and the optimizer."
    ),
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
        return "the agent of this machine runs in the driver's process, which the section on the driver covers"
    if victim == DRIVER:
        return _impossible_for_driver(fault)
    if phase == COPY and victim in (MIDDLE, LAST, ALL_BUT_ONE):
        return "only rank 0, which sends the state, and the joining worker take part in the copy"
    if phase == RESET and victim == JOINER:
        return "a joining worker has not been in a world that changed, so its reset callbacks are not called"
    if phase == BEFORE_INIT and fault in (SHUT, DROP):
        return "a worker has no connection before init()"
    if fault == SHUT and phase in (RENDEZVOUS, RESET):
        return "the connections of the old world are already closed, and the new world has no connections yet"
    return _impossible_phase(victim, fault, phase)


def _impossible_phase(victim: str, fault: str, phase: str) -> str:
    if phase in (SHARES, MANIFEST) and victim != RANK_0:
        return "only rank 0 writes the index and the manifest"
    if phase == RESUME and victim != RANK_0:
        return "only rank 0 reads the file and sends its content to the other ranks, as in the phase `state copy`"
    if phase == CHANGE and victim == JOINER:
        return "a joining worker does not wait at a safepoint"
    if phase == CHANGE and fault == SHUT:
        return "the world ends at this safepoint, so its connections are not used again"
    if phase in (STANDBY, PREPARED) and victim != JOINER:
        return "only a joining worker runs this phase"
    if phase in (*COMMITS_SHARDS, *MOVES_SHARDS) and victim == LAST:
        return "all ranks except rank 0 handle their shards in the same way, so the victim `middle` covers this case"
    if phase in MOVES_SHARDS and victim == ALL_BUT_ONE:
        return "rank 1 is killed before this phase, so the victims `two at once` cover this case"
    if phase == PREPARED and fault in (SHUT, DROP):
        return "a worker has no connection before init()"
    return ""


def _impossible_for_driver(fault: str) -> str:
    if fault in (EXIT, RAISE, GIL):
        return (
            "no user code runs in the driver, so SIGKILL covers a crash and SIGSTOP covers a hang"
        )
    if fault == MEMORY:
        return "the driver holds no tensors, and the kernel's out-of-memory killer sends SIGKILL"
    if fault in (SHUT, DROP):
        return "the connections of the driver are local to its machine, so no network fault can interrupt them"
    return ""

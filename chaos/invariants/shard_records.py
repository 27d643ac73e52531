"""Check that no sealed commit of a sharded state is lost while members hold its shards.

Pure: no I/O, no clock. See `invariants`.

Workers report the shards that they hold before each world begins, and the commit that they have restored in it (see
`elastic.protocol.messages`). A world may restore a commit older than a sealed one only if some shards of the sealed
commit were held only by missing workers, and these workers were on more hosts than there are copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.chaos.invariants.observed_job import ObservedJob
from elastic.driver import events
from elastic.protocol.messages import Commit, HeldCommitShards, ShardsHeld, ShardsPlaced, Worker


@dataclass
class ShardedWorld:
    """Members of a world, the shards that they held before it, and their parts of the state in it."""

    members: tuple[Worker, ...]
    held: dict[Worker, ShardsHeld]
    placed: dict[Worker, ShardsPlaced] = field(default_factory=dict)

    @property
    def hosts(self) -> set[str]:
        return {worker.host for worker in self.members}

    def holds(self, commit: Commit) -> list[tuple[Worker, HeldCommitShards]]:
        """Return the members that hold shards of a commit, each with its shards."""
        return [
            (w, each)
            for w, held in self.held.items()
            for each in held.held
            if each.commit == commit
        ]

    def missing(self, commit: Commit) -> set[int]:
        """Return the shards of a commit that no member holds.

        If no member holds any shard, the number of shards is unknown, and the result is ``{0}``.
        """
        found = [each for _, each in self.holds(commit)]
        there = {shard for each in found for shard in (each.own, *each.copies)}
        return set(range(max((each.shards for each in found), default=1))) - there

    def kept_by(self, shard: int, present: Iterable[Worker]) -> set[Worker]:
        """Return the given workers that hold a shard of a commit sealed in this world."""
        owners = {worker for worker, part in self.placed.items() if part.shard == shard}
        lasting = {worker.host for worker in owners if self.placed[worker].lasting}
        return {
            worker
            for worker in present
            if (part := self.placed.get(worker)) is not None
            and (worker in owners or shard in part.keeps or worker.host in lasting)
        }


class ShardRecords:
    """Checker of the workers' reports about shards in one journal.

    Attributes:
        restored: number of worlds that restored a commit.
    """

    def __init__(self, job: ObservedJob) -> None:
        self.job = job
        self.restored = 0
        self._copies = 0
        self._before: Commit | None = None  # newest commit sealed in an earlier world
        self._here: Commit | None = None  # newest commit sealed in the current world
        # for each worker, the generation in its last Ready message and the shards that it held
        self._held: dict[Worker, tuple[int, ShardsHeld]] = {}
        self._worlds: dict[int, ShardedWorld] = {}

    def observe(self, event: events.Event) -> None:
        """Check a worker's report about its shards."""
        match event:
            case events.WorkerReady(worker, generation, shards=ShardsHeld() as shards):
                if generation < self._held.get(worker, (0, shards))[0]:
                    return  # an older message, which arrived late from a lost connection
                self._copies = shards.copies
                self._held[worker] = generation, shards
                self._sealed(shards.sealed)
                for commit in filter(None, (shards.sealed, self._before, self._here)):
                    self._is_mirrored(worker, commit)
            case events.WorkerSpent(sealed=Commit() as sealed):
                self._sealed(sealed)
            case events.WorkerResumed(worker, generation, shards=ShardsPlaced() as part) if (
                generation == self.job.generation and worker in self.job.members
            ):
                self._resumed(worker, generation, part)
            case events.WorkerRaised(worker, generation, shards_lost=True) if (
                generation == self.job.generation and worker in self.job.members
            ):
                self._goes_back(generation, None)
            case events.WorkerExited(worker):
                self._held.pop(worker, None)

    def published(self, world: events.PublishWorld) -> None:
        """Record the members of a world and the shards that each member holds."""
        self._before = max(filter(None, (self._before, self._here)), default=None)
        self._here = None
        members = tuple(member.worker for member in world.members)
        held = {worker: self._held[worker][1] for worker in members if worker in self._held}
        first = world.generation if self._before is None else self._before.generation
        self._worlds = {n: each for n, each in self._worlds.items() if n >= first}
        self._worlds[world.generation] = ShardedWorld(members, held)

    # ---- sealed commits ----------------------------------------------------------------------------------------------

    def _sealed(self, commit: Commit | None) -> None:
        """Record a commit that a worker reported as sealed.

        The report may arrive after the next world has been published.
        """
        if commit is None:
            return
        if commit.generation == self.job.generation:
            newer = self._here is None or commit > self._here
            self._here = commit if newer else self._here
        else:
            newer = self._before is None or commit > self._before
            self._before = commit if newer else self._before
        if newer:
            for worker in self._held:
                self._is_mirrored(worker, commit)

    def _is_mirrored(self, worker: Worker, commit: Commit) -> None:
        world, (generation, shards) = self._worlds.get(commit.generation), self._held[worker]
        if world is None or worker not in world.members or generation != commit.generation:
            return
        found = next((each for each in shards.held if each.commit == commit), None)
        what = f"commit {commit} is sealed, but {worker} does not hold its shard"
        self.job.must(found is not None and found.own is not None, "SEALED IS MIRRORED", what)
        what = (
            f"commit {commit} is sealed, but {worker} has not copied the shards that it must keep"
        )
        self.job.must(found is not None and found.mirrored, "SEALED IS MIRRORED", what)

    # ---- a new world -------------------------------------------------------------------------------------------------

    def _resumed(self, worker: Worker, generation: int, part: ShardsPlaced) -> None:
        world = self._worlds[generation]
        if not world.placed:
            self._goes_back(generation, part.restored)
            self.restored += part.restored is not None
        other, known = next(iter(world.placed.items()), (worker, part))
        what = f"{worker} restored commit {part.restored}, {other} {known.restored}"
        self.job.must(known.restored == part.restored, "ONE COMMIT RESTORED", what)
        world.placed[worker] = part
        if len(world.placed) == len(world.members):
            self._every_shard_is_placed(world)

    def _goes_back(self, generation: int, restored: Commit | None) -> None:
        """Check that the commit restored by a world is not older than a sealed commit that is still held.

        Args:
            generation: number of the world.
            restored: the restored commit. None if memory contained no complete commit.
        """
        world, sealed = self._worlds[generation], self._before
        back = f"generation {generation} restored {restored or 'no commit in memory'}"
        if restored is not None:
            lacks = sorted(world.missing(restored))
            what = f"{back}, of which no member holds shard {', '.join(map(str, lacks))}"
            self.job.must(not lacks, "EVERY SHARD HELD", what)
        if sealed is None or (restored is not None and restored >= sealed):
            return
        lacks = sorted(world.missing(sealed))
        what = f"{back}, although its members hold all shards of the sealed commit {sealed}"
        self.job.must(bool(lacks), "SEALED IS KEPT", what)
        made = self._worlds.get(sealed.generation)
        if made is not None:
            gone = {worker.host for worker in made.members if worker not in world.members}
            what = f"{back}, although commit {sealed} is sealed and only workers on {sorted(gone)} are missing"
            enough = len(gone) > min(self._copies, len(made.hosts) - 1)
            self.job.must(enough, "SEALED IS KEPT", what)
            if len(made.placed) == len(made.members):
                kept = {shard: made.kept_by(shard, world.members) for shard in self._shards(made)}
                what = f"{back}, although its members had to keep every shard of the sealed commit {sealed}"
                self.job.must(not all(kept.values()), "SEALED IS KEPT", what)
        self._before = restored

    def _every_shard_is_placed(self, world: ShardedWorld) -> None:
        wanted = min(1 + self._copies, len(world.hosts))
        for shard in self._shards(world):
            parts = world.placed.items()
            what = f"no worker of generation {self.job.generation} trains shard {shard}"
            trained = any(part.shard == shard for _, part in parts)
            self.job.must(trained, "EVERY SHARD HELD", what)
            hosts = {w.host for w, part in parts if shard in (part.shard, *part.keeps)}
            what = f"shard {shard} is kept on {sorted(hosts)}, expected {wanted} hosts"
            self.job.must(len(hosts) >= wanted, "EVERY SHARD HELD", what)

    @staticmethod
    def _shards(world: ShardedWorld) -> range:
        return range(max(part.shards for part in world.placed.values()))

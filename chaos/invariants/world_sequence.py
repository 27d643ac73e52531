"""Which world may follow the last one, and with whom. Pure. See `invariants`."""

from __future__ import annotations

from elastic.chaos.invariants.worker_records import WorkerRecords
from elastic.driver.events import Member, PublishWorld
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Worker


class WorldSequence(WorkerRecords):
    """The worlds of one journal, one after the other."""

    def __init__(self, settings: Settings, samples: int) -> None:
        super().__init__(settings, samples)
        self._worlds = 0
        self._finished = False  # some have returned and were released

    def _publishes(self, world: PublishWorld, let_go: set[Worker]) -> None:
        workers = [member.worker for member in world.members]
        generation, size = world.generation, len(workers)
        what = f"generation {generation} follows {self._generation}"
        self._must(generation == self._generation + 1, "ONE GENERATION", what)
        for rank, member in enumerate(world.members):
            self._may_be_a_member(member, rank, size)
        self._has_a_legal_size(workers)
        self._leaves_nobody_behind(set(workers), let_go)
        self._begins_from_the_newest(world, workers, let_go)
        self._keeps_the_order(world, workers)
        wrong = self._samples.began(generation, size, world.commit)
        self._must(not wrong, "EACH SAMPLE ONCE", wrong)
        self._remember_digests(world)
        for rank, worker in enumerate(workers):
            known = self._workers[worker]
            known.before, known.placed, known.ready = known.placed, generation, False
            known.first = known.first or generation
            if rank < world.holders:
                known.holds = world.commit
        self._generation, self._base = generation, world.commit
        self._members = {worker: rank for rank, worker in enumerate(workers)}
        self._trained = self._trained or world.commit is not None
        self._broken_at, self._stop_at, self._checks = None, None, {}
        self._worlds += 1
        self._waits.end("gathering", "stop", "end")

    def _remember_digests(self, world: PublishWorld) -> None:
        """Only of what can still be compared: the world begins from its commit, and what is older is over."""
        base = world.commit
        if base is None:
            self._digests.clear()
            return
        kept = {c: d for c, d in self._digests.items() if c.generation >= base.generation}
        if base in kept:
            kept[Commit(world.generation, 0)] = kept[base]
        self._digests = kept

    def _may_be_a_member(self, member: Member, rank: int, size: int) -> None:
        worker, place, known = member.worker, member.place, self._workers.get(member.worker)
        if known is None:
            self._broken("FENCED STAYS OUT", f"{worker}, a member, is not alive")
        if known.going:
            self._broken("FENCED STAYS OUT", f"{worker} is a member, though it {known.going}")
        if not known.ready:
            what = f"{worker} is a member, but was not ready since generation {known.placed}"
            self._broken("ONE GENERATION", what)
        if (place.rank, place.size) != (rank, size):
            what = f"{worker} has rank {place.rank} of {place.size}, expected {rank} of {size}"
            self._broken("RANK 0 IS NO OTHER", what)

    def _has_a_legal_size(self, workers: list[Worker]) -> None:
        least = 1 if self._finished else self.settings.workers_min
        if not self.settings.elastic:
            least = self.settings.np
        leaving = any(
            self._workers[w].asked_to_leave or w.slot >= self._hosts.get(w.host, 0) for w in workers
        )
        most = self.settings.workers_max + leaving
        what = f"a world of {len(workers)}, expected {least} to {most} workers"
        self._must(least <= len(workers) <= most, "SIZE", what)

    def _leaves_nobody_behind(self, chosen: set[Worker], let_go: set[Worker]) -> None:
        for worker in self._members:
            known = self._workers.get(worker)
            if known is None or worker in chosen or worker in let_go or known.going:
                continue
            if known.stranded or not known.running:
                continue  # outside elastic.run: it comes back by itself, as a newcomer
            what = f"{worker} of generation {self._generation} was not let go, fenced or lost"
            self._broken("ONE GENERATION", f"{what}, and is not in the next world")

    def _begins_from_the_newest(
        self, world: PublishWorld, workers: list[Worker], let_go: set[Worker]
    ) -> None:
        held: dict[Worker, Commit] = {}
        here = {*workers, *let_go}
        for worker in self._members:
            known = self._workers.get(worker)
            if worker in here and known is not None and known.ready and known.commit is not None:
                held[worker] = known.commit
        newest = max(held.values(), default=None)
        began = f"generation {world.generation} begins from commit {world.commit}"
        if world.commit != newest:
            self._broken("NEVER BACK", f"{began}, expected {newest}, the newest that is held")
        if self._trained and world.commit is None:
            self._broken("NEVER BACK", f"{began}: all that was trained is lost, and nobody said so")
        holders = {worker for worker in workers if held.get(worker) == newest}
        if newest is None:
            holders = set()
        if set(workers[: world.holders]) != holders:
            what = f"ranks below {world.holders} are said to hold {newest}"
            self._broken("NEVER BACK", f"{what}, expected {', '.join(sorted(map(str, holders)))}")
        if self._stop_at is not None:
            old = sum(worker in self._members for worker in workers)
            what = f"{old} members had stopped in one place, {len(holders)} hold its commit"
            self._must(old == len(holders), "NEVER BACK", what)

    def _keeps_the_order(self, world: PublishWorld, workers: list[Worker]) -> None:
        end = len(self._members)  # that of a newcomer
        ranks = [self._members.get(worker, end) for worker in workers]
        for part in (ranks[: world.holders], ranks[world.holders :]):
            if part != sorted(part):
                what = f"old ranks are now in the order {part[:16]}, expected {sorted(part)[:16]}"
                self._broken("RANK 0 IS NO OTHER", what)

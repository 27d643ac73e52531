"""Check that each world is a valid successor of the previous one. Pure: no I/O, no clock. See `invariants`."""

from __future__ import annotations

from elastic.chaos.invariants.observed_job import LiveWorker, ObservedJob
from elastic.driver.events import Member, PublishWorld
from elastic.driver.reasons import Reason, ReasonKind
from elastic.protocol.messages import Commit, Worker


class WorldSequence:
    """Checker of the sequence of worlds in one journal."""

    def __init__(self, job: ObservedJob) -> None:
        self.job = job
        self.worlds = 0

    def publishes(self, world: PublishWorld, let_go: set[Worker]) -> None:
        workers = [member.worker for member in world.members]
        generation, size = world.generation, len(workers)
        what = f"generation {generation} follows {self.job.generation}"
        self.job.must(generation == self.job.generation + 1, "ONE GENERATION", what)
        for rank, member in enumerate(world.members):
            self._may_be_a_member(member, rank, size)
        self._has_a_legal_size(workers, let_go)
        self._includes_all_ready(set(workers), let_go)
        self._begins_from_the_newest(world, workers, let_go)
        self._keeps_the_order(world, workers)
        self._has_the_metadata_of_all(world, workers)
        # If no worker holds a commit, training continues from the newest durable commit.
        durable = self.job.durable
        back_to = None
        if self.job.settings.restarts is not None:
            back_to = durable.generation if durable else 0
        kept = [each.generation for w in workers for each in self.job.workers[w].kept]
        if kept:
            back_to = min([*kept] if back_to is None else [*kept, back_to])
        wrong = self.job.samples.began(generation, size, world.commit or durable, back_to)
        self.job.must(not wrong, "EACH SAMPLE ONCE", wrong)
        self._remember_digests(world)
        for rank, worker in enumerate(workers):
            known = self.job.workers[worker]
            known.before, known.placed, known.ready = known.placed, generation, False
            known.first = known.first or generation
            if self.job.workers[workers[0]].running:
                known.trained_in = known.trained_in or generation
            if rank < world.holders:
                known.holds = world.commit
        self.job.generation, self.job.base = generation, world.commit
        self.job.members = {worker: rank for rank, worker in enumerate(workers)}
        self.job.trained = self.job.trained or world.commit is not None
        self.job.broken_at, self.job.stop_at, self.job.checks = None, None, {}
        self.worlds += 1
        self.job.waits.end("gathering", "stop", "end")

    def _remember_digests(self, world: PublishWorld) -> None:
        base = world.commit
        if base is None:
            self.job.digests.clear()
            return
        kept = {c: d for c, d in self.job.digests.items() if c.generation >= base.generation}
        if base in kept:
            kept[Commit(world.generation, 0)] = kept[base]
        self.job.digests = kept

    def _has_the_metadata_of_all(self, world: PublishWorld, workers: list[Worker]) -> None:
        sent = [self.job.workers[worker].metadata for worker in workers]
        what = f"generation {world.generation} has other metadata than its members have sent"
        self.job.must(world.metadata in ([], sent), "LATEST METADATA", what)

    def _may_be_a_member(self, member: Member, rank: int, size: int) -> None:
        worker, place, known = member.worker, member.place, self.job.workers.get(member.worker)
        if known is None:
            self.job.broken("FENCED STAYS OUT", f"{worker}, a member, is not alive")
        if known.going:
            self.job.broken("FENCED STAYS OUT", f"{worker} is a member, although it {known.going}")
        if self.job.settings.health_check and not known.healthy:
            state = "is pending" if known.healthy is None else "has failed"
            what = f"{worker} is a member, but the health check of its slot {state}"
            self.job.broken("UNHEALTHY STAYS OUT", what)
        if not known.ready:
            what = f"{worker} is a member, but was not ready since generation {known.placed}"
            self.job.broken("ONE GENERATION", what)
        if (place.rank, place.size) != (rank, size):
            what = f"{worker} has rank {place.rank} of {place.size}, expected {rank} of {size}"
            self.job.broken("RANK 0 IS NO OTHER", what)

    def _has_a_legal_size(self, workers: list[Worker], let_go: set[Worker]) -> None:
        least = 1 if self.job.finished else self.job.settings.workers_min
        if not self.job.settings.elastic:
            least = self.job.settings.np
        leaving = any(
            self.job.workers[w].asked_to_leave or w.slot >= self.job.hosts.get(w.host, 0)
            for w in workers
        )
        most = self.job.workers_max + (leaving or self.job.shrinks)
        self.job.shrinks = self.job.shrinks and len(workers) > self.job.workers_max
        what = f"a world of {len(workers)}, expected {least} to {most} workers"
        self.job.must(least <= len(workers) <= most, "SIZE", what)
        if len(workers) < self.job.workers_max and self.job.workers[workers[0]].running:
            here = {*workers, *let_go}
            for worker, known in self.job.workers.items():
                if known.ready and known.running and not known.going and worker not in here:
                    what = f"{worker} waits, but a world of {len(workers)} has no place for it"
                    excused = known.asked_to_leave or known.dismissed or known.silent
                    self.job.must(excused, "SIZE", what)

    def _includes_all_ready(self, chosen: set[Worker], let_go: set[Worker]) -> None:
        for worker in self.job.members:
            known = self.job.workers.get(worker)
            if known is None or worker in chosen or worker in let_go or known.going:
                continue
            if known.stranded or not known.running:
                continue  # valid: a worker outside elastic.run joins later as a new worker
            what = f"{worker} of generation {self.job.generation} was neither released, fenced nor lost"
            self.job.broken("ONE GENERATION", f"{what}, but is missing from the next world")

    def _begins_from_the_newest(
        self, world: PublishWorld, workers: list[Worker], let_go: set[Worker]
    ) -> None:
        held: dict[Worker, Commit] = {}
        here = {*workers, *let_go}
        for worker in self.job.members:
            known = self.job.workers.get(worker)
            if worker in here and known is not None and known.ready and known.commit is not None:
                held[worker] = known.commit
        newest = max(held.values(), default=None)
        if newest is not None and self._is_doubted(newest):
            newest = self._to_return_to([self.job.workers[w] for w in held], newest)
            held = {
                worker: newest
                for worker, commit in held.items()
                if newest in (commit, *self.job.workers[worker].kept)
            }
        began = f"generation {world.generation} begins from commit {world.commit}"
        if world.commit != newest:
            self.job.broken(
                "NEVER BACK", f"{began}, expected {newest}, the newest that a member holds"
            )
        cause = world.reason.facts.get("cause")
        from_storage = isinstance(cause, Reason) and cause.kind is ReasonKind.FROM_CHECKPOINT
        if self.job.trained and world.commit is None and not from_storage:
            self.job.broken(
                "NEVER BACK", f"{began}: all training is lost, and this was not reported"
            )
        holders = {worker for worker in workers if held.get(worker) == newest}
        if newest is None:
            holders = set()
        if set(workers[: world.holders]) != holders:
            what = f"ranks below {world.holders} are listed as holders of {newest}"
            self.job.broken(
                "NEVER BACK", f"{what}, expected {', '.join(sorted(map(str, holders)))}"
            )
        if self.job.stop_at is not None and not any(
            self.job.workers[worker].own_pace for worker in held
        ):
            old = sum(worker in self.job.members for worker in workers)
            what = f"{old} members stopped at one safepoint, but {len(holders)} hold its commit"
            self.job.must(old == len(holders), "NEVER BACK", what)

    def _is_doubted(self, commit: Commit) -> bool:
        if self.job.doubted is None:
            return False
        after, until = self.job.doubted
        return after < commit and commit.generation <= until

    def _to_return_to(self, holders: list[LiveWorker], newest: Commit) -> Commit:
        """Return the newest held commit that precedes all steps whose gradients may be wrong.

        If no such commit exists, return the oldest held commit.
        """
        kept = [commit for known in holders for commit in known.kept]
        sound = [commit for commit in kept if not self._is_doubted(commit)]
        return max(sound) if sound else min(kept, default=newest)

    def _keeps_the_order(self, world: PublishWorld, workers: list[Worker]) -> None:
        end = len(self.job.members)  # sort key that places new workers last
        ranks = [self.job.members.get(worker, end) for worker in workers]
        for part in (ranks[: world.holders], ranks[world.holders :]):
            if part != sorted(part):
                what = f"old ranks are now in the order {part[:16]}, expected {sorted(part)[:16]}"
                self.job.broken("RANK 0 IS NO OTHER", what)

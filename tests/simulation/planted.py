"""Bugs to plant: each a small patch of the real code, of a kind that somebody could write, and that a test must catch.

The names that they replace are those of `elastic.driver`, `elastic.runtime.recovery` and `elastic.state`. Nothing of
this is ever imported by the product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from elastic.driver.agents.agent_pool import AgentPool
from elastic.driver.events import HostLost
from elastic.driver.job.job_decisions import JobDecisions
from elastic.driver.membership import reconnect
from elastic.driver.membership.failure_detection import suspicion
from elastic.driver.membership.failure_detection.frozen import Frozen
from elastic.driver.membership.failure_detection.stuck import Stuck
from elastic.driver.membership.failure_detection.suspicion import Suspicions
from elastic.driver.membership.health_checks import HealthChecks
from elastic.driver.membership.preemption_notices import Notices
from elastic.driver.membership.reconnect import Reconnects
from elastic.driver.membership.records.roster import WorkerStage
from elastic.driver.membership.scheduling.rank_order import RankOrder
from elastic.driver.membership.scheduling.slots import Slots
from elastic.driver.membership.scheduling.worker_pool import WorkerPool
from elastic.driver.membership.worker_reports import WorkerReports
from elastic.driver.membership.worlds import composition, worlds
from elastic.driver.membership.worlds.gathering import Gathering
from elastic.driver.membership.worlds.give_up import GiveUpRules
from elastic.driver.membership.worlds.planned_change import PlannedChange
from elastic.driver.membership.worlds.spoilt_commits import SpoiltCommits
from elastic.driver.membership.worlds.worlds import Phase, Worlds
from elastic.driver.processes.liveness_timeouts import LivenessTimeouts
from elastic.driver.reasons import Reason
from elastic.exact import verification_rules
from elastic.exact.kept_commits import KeptCommits
from elastic.protocol import messages
from elastic.protocol.messages import Commit, Worker
from elastic.runtime.recovery import Recovery
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.sampler import ElasticSampler
from elastic.state.snapshots.snapshot import _Copy


@dataclass(frozen=True)
class Bug:
    """``bug`` is given what stands there, and returns what is to stand there instead."""

    where: Any  # a class or a module
    name: str
    bug: Callable[[Any], Any]
    changing: bool = False  # found where hosts and workers come and go all the time
    announced: bool = False  # found where machines say that they go
    damaged: bool = False  # found where memory is damaged, and spoils all
    verified: bool = False  # found where workers compute wrong gradients
    health_check: bool = False  # found where slots are checked before their workers are admitted
    standbys: int = 0  # found where so many stand by
    first: int = 0  # the seed to begin with, since earlier ones do not have what it takes

    def plant(self, setattr: Callable[[Any, str, Any], None]) -> None:
        setattr(self.where, self.name, self.bug(getattr(self.where, self.name)))


# ---- health checks ---------------------------------------------------------------------------------------------------


def counts_as_passed(original: Any) -> Any:
    return lambda self, record, event: self._passed(record)


def welcomed_at_once(original: Any) -> Any:
    return lambda self, record: self.welcome(record, [])


# ---- the driver: who trains, and from what ---------------------------------------------------------------------------


def oldest_first(original: Any) -> Any:
    def arrange(survivors: Any, newcomers: Any, commits: Any) -> RankOrder:
        newest = max((c for w in survivors if (c := commits.get(w))), default=None)
        holders = [w for w in survivors if commits.get(w) == newest] if newest else []
        return RankOrder([*survivors, *newcomers], len(holders), newest)

    return arrange


def joiner_first(original: Any) -> Any:
    def arrange(survivors: Any, newcomers: Any, commits: Any) -> RankOrder:
        made: RankOrder = original(survivors, newcomers, commits)
        joined = [w for w in made.order if w in set(newcomers)]
        rest = [w for w in made.order if w not in set(newcomers)]
        return dataclasses.replace(made, order=[*joined, *rest])

    return arrange


def room_for_all(original: Any) -> Any:
    def compose(*args: Any, **limits: Any) -> Any:
        return original(*args, **{**limits, "workers_max": limits["workers_max"] + 1})

    return compose


def standbys_forgotten(original: Any) -> Any:
    def candidates(ready: Any, members: Any) -> Any:
        return original([each for each in ready if not each.stands_by], members)

    return candidates


def standby_holds(original: Any) -> Any:
    def arrange(survivors: Any, newcomers: Any, commits: Any) -> RankOrder:
        made: RankOrder = original(survivors, newcomers, commits)
        return dataclasses.replace(made, holders=len(made.order)) if made.commit else made

    return arrange


def one_more(original: Any) -> Any:
    return lambda self: original(self) + (1 if self.spare else 0)


def number_alone(original: Any) -> Any:
    def arrange(survivors: Any, newcomers: Any, commits: Any) -> RankOrder:
        held = [c for w in survivors if (c := commits.get(w)) is not None]
        newest = max(held, key=lambda commit: (commit.number, commit.generation), default=None)
        if newest is None:
            return RankOrder([*survivors, *newcomers], 0, None)
        holders = [w for w in survivors if commits.get(w) == newest]
        lacking = [w for w in survivors if commits.get(w) != newest]
        return RankOrder([*holders, *lacking, *newcomers], len(holders), newest)

    return arrange


def everybody_goes(original: Any) -> Any:
    def compose(old: Any, new: Any, commits: Any, **limits: Any) -> Any:
        made = original([s for s in old if not s.leaving], new, commits, **limits)
        return dataclasses.replace(made, leaving=[s for s in old if s.leaving])

    return compose


def one_is_enough(original: Any) -> Any:
    return lambda self: 1


def rank_0_matters(original: Any) -> Any:
    def all_lost(self: GiveUpRules, world: Any, gathering: Any) -> Any:
        first = self._staff.roster.get(world.members[0]) if world.members else None
        if world.trained and first is None:
            return "rank 0 is lost, and nobody is left to go on from"
        return original(self, world, gathering)

    return all_lost


def nobody(original: Any) -> Any:
    return lambda self, roster: iter(())


def earliest_answer(original: Any) -> Any:
    def stop(self: PlannedChange, now: float, members: Iterable[Worker]) -> dict[int, list[Worker]]:
        check = min(passed for passed, _ in self._answers.values()) + 1
        found = {check: [*members]}
        self.checks = dict.fromkeys(found[check], check)
        self.by = now + self.settings.elastic_timeout_s
        return found

    return stop


# ---- the driver: fences and waits ------------------------------------------------------------------------------------


def fenced_may_return(original: Any) -> Any:
    """Who was given up has a connection again: it is one of us."""

    def reconnected(self: Reconnects, event: Any) -> Any:
        record = self.roster.get(event.worker)
        if record is not None and record.killed_for:
            record.killed_for, record.exit_by, record.stage = None, None, WorkerStage.CONNECTED
        return original(self, event)

    return reconnected


def without_metadata(original: Any) -> Any:
    return lambda *fields: original(*fields[:-1])


def in_reverse(original: Any) -> Any:
    return lambda members: original(members[::-1])


def lost_means_dead(original: Any) -> Any:
    """A lost host's workers are taken for dead, and their slots for free."""

    def host_lost(self: Frozen, event: HostLost) -> None:
        original(self, event)
        for worker in [*self.roster.hosts.get(event.host, {})]:
            self.roster.remove(worker)

    return host_lost


def killed_means_dead(original: Any) -> Any:
    """An order to kill is taken for an exit."""

    def kill(self: WorkerPool, record: Any, reason: Reason) -> None:
        fresh = not record.killed_for
        original(self, record, reason)
        if fresh:
            self.roster.remove(record.worker)

    return kill


def immortals_awaited(original: Any) -> Any:
    return lambda self, record: 1e6


def stuck_for_ever(original: Any) -> Any:
    return lambda self, now: []


def phase_forgotten(original: Any) -> Any:
    def progressed(self: Stuck, event: Any) -> None:
        changed = {name: getattr(event, name) for name in event.__struct_fields__} | {"phase": ""}
        original(self, type(event)(**changed))

    return progressed


def never_busy(original: Any) -> Any:
    return 1e9


def goes_on_after_the_end(original: Any) -> Any:
    def end(self: Worlds, code: int, reason: Reason) -> Any:
        try:
            original(self, code, reason)
        except worlds.JobFinished:
            if self.phase is Phase.DONE and code:
                self.phase = Phase.TRAINING

    return end


def any_generation(original: Any) -> Any:
    """A Ready of an older world counts for the present one."""

    def ready(self: WorkerReports, event: Any) -> Any:
        changed = {name: getattr(event, name) for name in event.__struct_fields__}
        if event.worker in self.worlds.members:
            changed |= {"generation": self.worlds.generation, "number": 0}
        return original(self, type(event)(**changed))

    return ready


# ---- the driver: which agent serves a host --------------------------------------------------------------------------


def adopts_nobody(original: Any) -> Any:
    def made(self: AgentPool, attach: Any, *, starts_agents: bool, adopted: Any) -> None:
        original(self, attach, starts_agents=starts_agents)

    return made


def ordered_means_running(original: Any) -> Any:
    """An agent is believed to run what it was told to start."""

    def registered(self: AgentPool, agent: Any, host: Any, said: Any, caller: str) -> None:
        running = sorted({*host.running, *said.running})
        original(self, agent, host, msgspec.structs.replace(said, running=running), caller)

    return registered


# ---- the driver: how a job ends --------------------------------------------------------------------------------------


def nobody_unseen(original: Any) -> Any:
    return lambda self, event: set()


# ---- the worker ------------------------------------------------------------------------------------------------------


def counted(original: Any) -> Any:
    def committed(self: Any) -> Commit:
        self._count = getattr(self, "_count", 0) + 1
        newest = self.newest = Commit(self.generation, self._count)
        return newest

    return committed


def stop_at_own_check(original: Any) -> Any:
    def receive(self: Recovery, message: Any) -> Any:
        if isinstance(message, messages.StopAt):
            message = messages.StopAt(message.generation, message.change, self._checks)
        return original(self, message)

    return receive


def old_label(original: Any) -> Any:
    def adopt(self: Recovery) -> Commit:
        self.newest = self.newest or Commit(self.generation, 0)
        return self.newest

    return adopt


def resync_skipped(original: Any) -> Any:
    def take_place(self: Recovery, world: messages.World) -> None:
        size = world.place.size
        original(
            self, messages.World(world.generation, world.place, world.store, size, world.commit, "")
        )

    return take_place


def hold_forgotten(original: Any) -> Any:
    """It answers how far it is, and runs on."""

    def prepare(self: Recovery, change: int) -> Any:
        answer = original(self, change)
        self._hold_at = None
        return answer

    return prepare


def torn_commit_kept(original: Any) -> Any:
    """The commit is numbered by the check before, which others have saved another state for."""

    def committed(self: Recovery) -> Any:
        made = original(self)
        if self.running and not self._stopped and self._checks:
            made = self.newest = Commit(self.generation, self._checks)
        return made

    return committed


# ---- samples and state, which a simulation only has a model of -------------------------------------------------------


def cursor_one_short(original: Any) -> Any:
    def reset(self: ElasticSampler) -> None:
        done, self.processed_num = self.processed_num, max(0, self.processed_num - 1)
        original(self)
        self.processed_num = done

    return reset


def own_samples_only(original: Any) -> Any:
    def record_batch(self: ElasticSampler, batch_idx: int, batch_size: int) -> None:
        self.processed_num = min(self.processed_num + batch_size, len(self.dataset))

    return record_batch


def old_partition(original: Any) -> Any:
    return lambda self: None


def order_of_its_own(original: Any) -> Any:
    def epoch_order(self: ElasticSampler) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.epoch + 1000 * self.rank)
        return torch.randperm(len(self.dataset), generator=generator)

    return epoch_order


def does_nothing(original: Any) -> Any:
    return lambda self, *args: None


def the_second_is_right(original: Any) -> Any:
    """The vote of the others does not count."""

    def verdict(found: Any, ranks: int) -> Any:
        result = original(found, ranks)
        if result is None or not result.culprits:
            return result
        return result._replace(culprits=(found[0].rank,))

    return verdict


def never(original: Any) -> Any:
    return lambda self, *args: False


def rank_1_is_never_checked(original: Any) -> Any:
    def checks(*of: Any) -> Any:
        return tuple(each for each in original(*of) if 1 not in (each.owner, each.second))

    return checks


def always_agrees(original: Any) -> Any:
    return lambda self, tensor: True


def zombies_renew(original: Any) -> Any:
    """Who is heard of has a lease, whatever was decided about it."""
    return lambda self, key, now: self.grant(key, now)


SIMULATED = {
    "standbys are taken beyond the largest world": Bug(worlds, "compose", room_for_all, standbys=2),
    "who stands by is not taken any more": Bug(
        worlds, "candidates", standbys_forgotten, standbys=2
    ),
    "a standby counts as a holder of a commit": Bug(
        composition, "arrange", standby_holds, standbys=2
    ),
    "standbys come on top of standbys": Bug(WorkerPool, "_wanted", one_more, standbys=2),
    "workers are started on a machine that goes": Bug(Slots, "close", does_nothing, announced=True),
    "a host whose agent stays away is not lost": Bug(AgentPool, "_missing", does_nothing, first=8),
    "a check that fails is forgotten": Bug(
        HealthChecks, "_failed", counts_as_passed, health_check=True
    ),
    "the second to compute is always right": Bug(
        verification_rules, "verdict", the_second_is_right, verified=True
    ),
    "a rank is never checked": Bug(
        verification_rules, "checks", rank_1_is_never_checked, verified=True
    ),
    "a wrong result is not reported": Bug(
        WorkerReports, "miscomputed", does_nothing, verified=True
    ),
    "what a wrong worker has computed stays": Bug(
        SpoiltCommits, "found", does_nothing, verified=True
    ),
    "no commit is doubted": Bug(SpoiltCommits, "doubts", never, verified=True),
    "copies outlive the steps they hold": Bug(
        KeptCommits, "forget_after", does_nothing, verified=True
    ),
    "an older commit is not restored": Bug(Recovery, "goes_back", does_nothing, verified=True),
    "a quarantine is forgotten": Bug(Slots, "quarantine", does_nothing, verified=True),
    "nobody waits for a check": Bug(WorkerPool, "hold", welcomed_at_once, health_check=True),
    "an agent is tried once": Bug(AgentPool, "_start_again", does_nothing, first=36),
    "what was ordered runs": Bug(AgentPool, "_registered", ordered_means_running),
    "a driver does not await the agents of the one before": Bug(
        AgentPool, "__init__", adopts_nobody, first=6
    ),
    "a lost worker is awaited at the end": Bug(JobDecisions, "_unseen", nobody_unseen),
    "rank 0 is the oldest, not a holder": Bug(composition, "arrange", oldest_first, first=13),
    "a joiner is made the source": Bug(composition, "arrange", joiner_first),
    "commits are compared by number alone": Bug(composition, "arrange", number_alone, first=13),
    "one worker is always enough": Bug(GiveUpRules, "needed", one_is_enough),
    "the job ends with rank 0": Bug(GiveUpRules, "all_lost", rank_0_matters, first=5),
    "survivors are not waited for": Bug(Gathering, "awaited", nobody),
    "all stop where the last one is": Bug(PlannedChange, "stop", earliest_answer, changing=True),
    "who was fenced may return": Bug(Reconnects, "reconnected", fenced_may_return),
    "a world is repeated without metadata": Bug(
        reconnect, "TellWorld", without_metadata, first=241
    ),
    "metadata is not in rank order": Bug(worlds, "_metadata_of", in_reverse, first=1),
    "a lost host's workers are dead": Bug(Frozen, "host_lost", lost_means_dead),
    "an order to kill is an exit": Bug(WorkerPool, "kill", killed_means_dead),
    "no deadline for an exit": Bug(WorkerPool, "_dies_within_s", immortals_awaited, first=21),
    "who is stuck is never fenced": Bug(Suspicions, "to_fence", stuck_for_ever),
    "a long phase is forgotten": Bug(Stuck, "progressed", phase_forgotten, first=16),
    "who computes is idle": Bug(suspicion, "BUSY_CPU", never_busy, first=28),
    "the driver decides on after the end": Bug(Worlds, "end", goes_on_after_the_end, first=5),
    "a word of an older generation counts": Bug(WorkerReports, "ready", any_generation, first=21),
    "commits are counted, a stop twice": Bug(Recovery, "committed", counted, changing=True),
    "a commit is one check too early": Bug(Recovery, "committed", torn_commit_kept),
    "each stops where it is": Bug(Recovery, "receive", stop_at_own_check, changing=True),
    "nobody is held for an answer": Bug(Recovery, "_prepare", hold_forgotten, changing=True),
    "what is spoilt is gone on from": Bug(WorkerReports, "spoilt", does_nothing, damaged=True),
    "what was copied is not a commit": Bug(Recovery, "adopt", old_label, first=15),
    "the re-sync is skipped": Bug(Recovery, "_take_place", resync_skipped),
}
TOLD = {  # by a scenario: what leads there is too rare for chance
    "who leaves goes, whatever it holds": (
        Bug(worlds, "compose", everybody_goes),
        "28-the-only-holder-leaves",
    ),
    "who is needed stays to the end of its machine": (
        Bug(Notices, "overdue", does_nothing),
        "45-a-machine-goes-away-and-is-needed",
    ),
}
TRIED = {  # by a check of `test_planted_bugs`, without a simulation
    "a zombie renews its lease": (Bug(LivenessTimeouts, "renew", zombies_renew), "lease"),
    "the cursor is one short": (Bug(ElasticSampler, "reset", cursor_one_short), "samples"),
    "progress is that of one rank": (
        Bug(ElasticSampler, "record_batch", own_samples_only),
        "samples",
    ),
    "the old partition is kept": (Bug(ElasticSampler, "_follow_world", old_partition), "samples"),
    "each rank has its own order": (
        Bug(ElasticSampler, "_epoch_order", order_of_its_own),
        "samples",
    ),
    "restore() leaves the optimizer": (
        Bug(OptimizerStateHandler, "_place_entries", does_nothing),
        "state",
    ),
    "restore() leaves the learning rate": (
        Bug(OptimizerStateHandler, "_place_options", does_nothing),
        "state",
    ),
    "a commit trusts versions alone": (Bug(_Copy, "_sample_agrees", always_agrees), "state"),
}

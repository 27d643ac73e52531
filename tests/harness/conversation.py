"""Short notation for events of a Membership, with a manual clock, and invariants after every event.

talk = running(4)                                  # four workers train in generation 2, each on a slot of host h
assert talk.tell(exited("h:0")) == [...]
talk.wait(1.0)                                     # with TimePassed at every deadline on the way
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from elastic.driver.events import (
    Action,
    Event,
    ExitCause,
    HostLost,
    HostsChanged,
    ProbeWorkers,
    PublishWorld,
    Report,
    StartWorker,
    TimePassed,
    WorkerChecked,
    WorkerConnected,
    WorkerDisconnected,
    WorkerExited,
    WorkerFailed,
    WorkerFrozen,
    WorkerLeaving,
    WorkerLocated,
    WorkerPaced,
    WorkerProbed,
    WorkerProgressed,
    WorkerQuit,
    WorkerRaised,
    WorkerReady,
    WorkerResumed,
    WorkerReturned,
    WorkerStranded,
    WorkerThawed,
)
from elastic.driver.membership.membership import Membership
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Address, Commit, KeptCommit, OlderCommits, Worker

Kind = TypeVar("Kind", bound=Action)
TICK_S = 0.001


def worker(name: str) -> Worker:
    """Parse a worker: ``h:0`` is the first incarnation, ``h:0#2`` the second."""
    return Worker.parse(name if "#" in name else f"{name}#1")


def store(name: str) -> Address:
    """Return an address of the store, which differs between workers."""
    return Address(worker(name).host, 7000 + worker(name).slot)


def connected(name: str) -> Event:
    return WorkerConnected(worker(name), 4711)


def ready(
    name: str,
    generation: int,
    commit: tuple[int, int] | None = None,
    *,
    layout: str = "x",
    running: bool = True,
    kept: Sequence[tuple[int, int]] = (),
) -> Event:
    """``kept``: older commits, each with 10 steps a generation."""
    held = Commit(*commit) if commit else None
    shape = layout if running else ""
    older = OlderCommits(tuple(KeptCommit(Commit(*e), 10 * e[0] + e[1]) for e in kept))
    return WorkerReady(worker(name), generation, held, store(name), shape, running, kept=older)


def failed(name: str, generation: int, *, differs: bool = False) -> Event:
    return WorkerFailed(worker(name), generation, "connection closed by peer", differs)


def stranded(name: str, generation: int, *, differs: bool = False) -> Event:
    return WorkerStranded(worker(name), generation, "connection closed by peer", differs)


def checked(name: str, generation: int, check: int, change: int = 1, group: str = "") -> Event:
    return WorkerChecked(worker(name), generation, change, check, group)


def leaving(name: str) -> Event:
    return WorkerLeaving(worker(name), "SIGTERM")


def resumed(name: str, generation: int) -> Event:
    return WorkerResumed(worker(name), generation, {"formed": 10.0})


def raised(
    name: str,
    generation: int,
    commit: tuple[int, int] | None,
    summary: str = "ValueError: x",
    *,
    hardware: bool = False,
    beginning: bool = False,
) -> Event:
    held = Commit(*commit) if commit else None
    trace = f"Traceback ...\n{summary}\n"
    return WorkerRaised(
        worker(name), generation, held, summary, trace, hardware, beginning=beginning
    )


def has_quit(name: str, generation: int, code: int = 0) -> Event:
    return WorkerQuit(worker(name), generation, code)


def returned(name: str, generation: int) -> Event:
    return WorkerReturned(worker(name), generation)


def disconnected(name: str, *, silent: bool = False) -> Event:
    return WorkerDisconnected(worker(name), silent)


def frozen(name: str, how: str = "stopped by a signal") -> Event:
    return WorkerFrozen(worker(name), how)


def thawed(name: str) -> Event:
    return WorkerThawed(worker(name))


def inside(
    name: str,
    generation: int,
    collective: str = "loss",
    *,
    entered: int = 7,
    for_s: float = 1.0,
    line: str = "",
) -> Event:
    """The worker waits in a collective, by default for one second already."""
    return WorkerProgressed(worker(name), generation, entered, collective, for_s, line=line)


def outside(name: str, generation: int, *, entered: int = 7, phase: str = "") -> Event:
    """The worker is in user code; ``phase``: in a phase that is marked as long."""
    return WorkerProgressed(worker(name), generation, entered, "", 0.0, phase)


def paced(name: str, generation: int, share: float, collectives: int = 100) -> Event:
    """The worker has waited for this share of the last 30 seconds."""
    return WorkerPaced(worker(name), generation, collectives, 30.0 * share, 30.0)


def host_lost(host: str) -> Event:
    return HostLost(host, "its agent was not heard of for 2 s")


def exited(
    name: str,
    code: int = -9,
    output: str = "",
    reason: str = "",
    cause: ExitCause = ExitCause.UNKNOWN,
) -> Event:
    return WorkerExited(worker(name), code, reason, output, cause=cause)


def hosts(**slots: int) -> Event:
    return HostsChanged(slots)


def fixed_hosts(**slots: int) -> Event:
    return HostsChanged(slots, fixed=True)


class MembershipConversation:
    """A conversation with a Membership ``m`` at the time ``now``."""

    def __init__(self, **settings: Any) -> None:
        workers = settings.setdefault("np", 4)
        settings.setdefault("workers_min", 2)
        settings.setdefault("workers_max", workers)
        settings.setdefault("elastic", True)
        self.m = Membership(Settings(**settings))
        self.now = 0.0
        self.processes: dict[str, tuple[float, float]] = {}
        self.traced: set[str] = set()  # under a debugger
        self.stopped: set[str] = set()  # standbys that do not answer, which is not known yet
        self._probed: dict[str, tuple[float, float, float]] = {}

    def works(self, name: str, *, cpu: float = 0.0, io: float = 0.0, traced: bool = False) -> None:
        """Let probes of a worker report this CPU usage and these bytes per second from now on."""
        name = str(worker(name))
        self.processes[name] = (cpu, io)
        (self.traced.add if traced else self.traced.discard)(name)

    def tell(self, *events: Event) -> list[Action]:
        """Process events one after the other, and return all actions."""
        actions: list[Action] = []
        for event in events:
            self.now += TICK_S
            actions += self._handle(event)
        return actions

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass with all due deadlines. Detects a deadline that returns forever."""
        actions: list[Action] = []
        until = self.now + seconds
        while (deadline := self.m.next_deadline()) is not None and deadline <= until:
            assert deadline > self.now
            self.now = deadline
            actions += self._handle(TimePassed())
        self.now = until
        return actions

    def _handle(self, event: Event) -> list[Action]:
        actions = self.m.handle(event, self.now)
        self.m.check()
        for probe in [action for action in actions if isinstance(action, ProbeWorkers)]:
            for name in [str(w) for w in probe.workers if str(w) in self.processes]:
                actions = [*actions, *self._handle(self._answer(name))]
            for standby in probe.workers:
                record = self.m.roster.get(standby)
                if record is not None and record.stands_by and str(standby) not in self.stopped:
                    actions = [*actions, *self._handle(WorkerLocated(standby, 0, ""))]
        return actions

    def _answer(self, name: str) -> Event:
        """Return the kernel's counters, which grow as set by ``works``."""
        cpu, io = self.processes[name]
        at, cpu_s, io_bytes = self._probed.get(name, (self.now, 100.0, 1e6))
        cpu_s, io_bytes = cpu_s + cpu * (self.now - at), io_bytes + io * (self.now - at)
        self._probed[name] = (self.now, cpu_s, io_bytes)
        traced = name in self.traced
        return WorkerProbed(worker(name), cpu_s, int(io_bytes), "t" if traced else "S", traced)

    def connect(self, *names: str) -> list[Action]:
        return self.tell(*map(connected, names))

    def ready(
        self,
        *names: str,
        generation: int | None = None,
        commit: tuple[int, int] | None = None,
        running: bool = True,
    ) -> list[Action]:
        """Workers report that they wait for a world; ``generation`` is the current one by default."""
        last = self.m.generation if generation is None else generation
        return self.tell(*(ready(name, last, commit, running=running) for name in names))

    def join(self, *names: str) -> list[Action]:
        """Newcomers reach elastic.run."""
        return [*self.connect(*names), *self.ready(*names, generation=0)]

    def resume(self) -> list[Action]:
        return self.tell(*(resumed(str(w), self.m.generation) for w in self.m.members))

    def stop_all(self, check: int = 4) -> list[Action]:
        """All members answer a planned change, stop at the safepoint, and wait for the next world."""
        names, generation, change = self.members, self.m.generation, self.m.worlds.change.number
        actions = self.tell(*(checked(n, generation, check - 1, change) for n in names))
        return [*actions, *self.ready(*names, commit=(generation, check))]

    @property
    def members(self) -> list[str]:
        return [str(member) for member in self.m.members]


def started(workers: int = 4, **settings: Any) -> MembershipConversation:
    """All are in the world of init(), generation 1, and none has entered elastic.run."""
    talk = MembershipConversation(np=workers, **settings)
    names = [f"h:{slot}" for slot in range(workers)]
    talk.tell(hosts(h=workers))
    talk.connect(*names)
    talk.ready(*names, running=False)
    assert talk.m.generation == 1
    return talk


def running(workers: int = 4, **settings: Any) -> MembershipConversation:
    """All train in generation 2."""
    talk = started(workers, **settings)
    talk.ready(*(f"h:{slot}" for slot in range(workers)))
    talk.resume()
    assert talk.m.generation == 2 and talk.m.phase.value == "training"
    return talk


FOUR = ("a:0", "a:1", "b:0", "b:1")


def on_two_hosts(**settings: Any) -> MembershipConversation:
    """Return a job on two hosts of two slots, whose `FOUR` workers train in generation 2."""
    defaults = {"np": 4, "workers_min": 1, "elastic_timeout_s": 1e6}
    talk = MembershipConversation(**{**defaults, **settings})
    talk.tell(hosts(a=2, b=2))
    talk.connect(*FOUR)
    talk.ready(*FOUR, running=False)
    talk.ready(*FOUR)
    talk.resume()
    assert talk.m.generation == 2
    return talk


def static(workers: int = 2, **settings: Any) -> MembershipConversation:
    """A job that can't recover, in the world of init()."""
    return started(workers, elastic=False, workers_min=workers, **settings)


def the(kind: type[Kind], actions: list[Action]) -> Kind:
    """Return the only action of a kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def has(kind: type[Action], actions: list[Action]) -> bool:
    return any(isinstance(action, kind) for action in actions)


def all_lost(exits: dict[str, str], wrote: str = "") -> Reason:
    """Return why a job ends after all members of generation 2 have exited. ``exits``: how each process ended."""
    causes = [because(ReasonKind.LOST_EXITED, worker=each, exit=how) for each, how in exits.items()]
    several = because(ReasonKind.SEVERAL, causes=causes, more=0)
    return because(
        ReasonKind.ALL_LOST, members=len(exits), generation=2, cause=several, wrote=wrote
    )


def names(actions: list[Action], kind: type[Action] = StartWorker) -> list[str]:
    """Return the workers of actions of a kind."""
    return [str(action.worker) for action in actions if isinstance(action, kind)]  # type: ignore[attr-defined]


def order(world: PublishWorld) -> list[str]:
    return [str(member.worker) for member in world.members]


def said(actions: list[Action]) -> str:
    """Return the log lines of actions."""
    return "\n".join(action.text for action in actions if isinstance(action, Report))

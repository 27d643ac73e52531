"""A cluster for fault tests: hosts with agents, an etcd, drivers, and the results of a job on them.

Everything is a real program, started as a user starts it; each writes to a file in the bench's folder.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from elastic.chaos.harness.journal_tail import JobProgress, JournalTail
from elastic.chaos.inject.report import report
from elastic.chaos.invariants.invariants import BrokenInvariant, check_journal
from elastic.driver.events import WorkerConnected
from elastic.driver.journal.journal import read
from harness import wording
from harness.waiting import wait_until
from stress.hosts import sshd, steps
from stress.hosts.adoption import Adoptions
from stress.hosts.merge_journals import join, term_of
from stress.hosts.namespaces import Network
from stress.hosts.programs import HostProgram
from stress.hosts.report import Mark, ScenarioMeasurement, ScenarioOutcome
from stress.hosts.steps import Note, WorkerNotes

HOSTS = ("a", "b", "c", "d")
ETCD, DRIVER, STANDBY = "etcd", "driver", "standby"
ETCD_PORT = 2379
SERVES = "serving insecure client requests"  # a line of etcd
ENDPOINT = f"{ETCD}:{ETCD_PORT}"
START_S = 120.0  # seconds for a job's workers to start and train; two cores import torch four times
CHANGE_S = 90.0  # seconds for a smaller or larger world to train
LOOK_S = 0.02
TAIL_BYTES = 512  # end of a worker's notes, which contains the latest one


class HostCluster:
    """Four hosts for workers, and one each for etcd, the driver and a standby driver. A context manager.

    ``slack``: factor for all time limits; 1.0 on an otherwise idle machine.
    """

    def __init__(self, folder: Path, *, slack: float = 1.0) -> None:
        self.folder = folder
        self.slack = slack
        self.network = Network([*HOSTS, ETCD, DRIVER, STANDBY], folder)
        self.secret = folder / "secret"
        self._etcds: list[HostProgram] = []
        self._jobs = 0

    def __enter__(self) -> HostCluster:
        self.secret.touch(0o600)
        self.secret.write_text(secrets.token_hex(32) + "\n")
        self.network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._etcds:
            each.end()
        self.network.close()

    @property
    def etcd(self) -> HostProgram:
        """The latest one."""
        return self._etcds[-1]

    def start_etcd(self) -> HostProgram:
        """Start etcd, with the data of an earlier one if any. Returns once it answers."""
        url = f"http://{self.network.hosts[ETCD].address}:{ETCD_PORT}"
        peers = "http://127.0.0.1:2380"
        words = ["etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync"]
        words += ["--listen-client-urls", url, "--advertise-client-urls", url]
        words += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        words += ["--initial-cluster", f"default={peers}"]
        self._etcds.append(HostProgram(self.network.hosts[ETCD], ETCD, words, self.folder))
        self.etcd.wait_for(SERVES)
        return self.etcd

    @contextlib.contextmanager
    def job(self, name: str, *, hosts: Sequence[str] = HOSTS) -> Iterator[HostedJob]:
        """Context of a job with its own name. At its end, remaining processes are killed and all links are healed."""
        self._jobs += 1
        folder = self.folder / f"{self._jobs:02}-{re.sub('[^a-z]+', '-', name)}"
        (folder / "steps").mkdir(parents=True)
        job = HostedJob(self, name, f"job{self._jobs}", folder, hosts)
        try:
            yield job
        finally:
            for program in job.programs:
                program.end()
            for each in self.network.hosts.values():
                self.network.heal(each.name)


class HostedJob:
    """Agents and drivers of one job, and the notes of its workers."""

    def __init__(
        self,
        bench: HostCluster,
        title: str,
        name: str,
        folder: Path,
        hosts: Sequence[str],
        slots: int = 1,
    ) -> None:
        self.network = bench.network
        self.title = title
        self.name = name
        self.folder = folder
        self.hosts = hosts
        self.slots = slots  # of each host
        self.journals: list[Path] = []  # journals of the drivers that may have been the leader
        self.agents: dict[str, HostProgram] = {}  # the latest of each host
        self.drivers: list[HostProgram] = []
        self.programs: list[HostProgram] = []
        self.measured: list[ScenarioMeasurement] = []
        self._secret = bench.secret
        self._slack = bench.slack

    # ---- programs --------------------------------------------------------------------------------------------------

    def start_agent(self, host: str) -> HostProgram:
        words = ["elasticrun", "agent", "--etcd", ENDPOINT, "--job", self.name, "--host", host]
        words += ["--slots", str(self.slots), "--secret-file", str(self._secret)]
        self.agents[host] = self._start(host, f"agent-{host}", words)
        return self.agents[host]

    def start_driver(self, *flags: str, on: str = DRIVER) -> HostProgram:
        """Start a driver, with failover unless ``flags`` say otherwise."""
        journal = self.folder / f"journal.{len(self.drivers) + 1}.jsonl"
        words = ["--etcd", ENDPOINT, "--job", self.name, "--secret-file", str(self._secret)]
        return self._drive([*words, *(flags or ["--standby"])], journal, on)

    def start_driver_by_ssh(self, *flags: str) -> HostProgram:
        """Start a driver that starts the agents by ssh, and continues the previous driver's journal, if any."""
        if not self.drivers:
            hosts = [self.network.hosts[name] for name in self.hosts]
            self.programs += sshd.start(hosts, self.folder / "ssh")
            self.network.hosts[DRIVER].mounts[self.folder / "ssh" / "ssh_config"] = sshd.CONFIG
        listed = ",".join(f"{name}:{self.slots}" for name in self.hosts)
        return self._drive(["-H", listed, *flags], self.folder / "journal.1.jsonl", DRIVER)

    def _drive(self, flags: Sequence[str], journal: Path, host: str) -> HostProgram:
        size = str(len(self.hosts) * self.slots)
        words = ["elasticrun", "-np", size, "--min-np", "1", "--max-np", size, *flags]
        words += ["--journal", str(journal), "--blacklist-cooldown-range", "0.2", "1"]
        if journal not in self.journals:
            self.journals.append(journal)
        name = f"driver{len(self.drivers) + 1}"
        self.drivers.append(self._start(host, name, [*words, *self.command()]))
        return self.drivers[-1]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "stress.hosts.training", str(self.folder)]

    def start(self) -> HostedJob:
        """Start an agent on each host and one driver. Returns once all workers train."""
        for host in self.hosts:
            self.start_agent(host)
        self.start_driver()
        self.trains([*self.hosts] * self.slots, timeout=START_S)
        return self

    def _start(self, host: str, name: str, words: Sequence[str]) -> HostProgram:
        env = {"ELASTIC_DIGESTS": "1"}
        program = HostProgram(self.network.hosts[host], name, words, self.folder, env=env)
        self.programs.append(program)
        return program

    def leader(self) -> HostProgram:
        """Return the live driver that became leader last; the first one if none has."""
        alive = [driver for driver in self.drivers if driver.process.poll() is None]
        return max(alive or self.drivers, key=_term)

    # ---- training --------------------------------------------------------------------------------------------------

    def trains(
        self, hosts: Iterable[str], *, after: float = 0.0, timeout: float = CHANGE_S
    ) -> float:
        """Wait until exactly these hosts have committed a step together. Return the time when that was seen.

        Args:
            hosts: host of each worker of the world.
        """
        wanted = Counter(hosts)
        since = max(after, time.monotonic() if not after else 0.0)

        def together() -> bool:
            latest = self._latest()
            found = Counter(
                host
                for host, note in latest
                if note.kind == steps.COMMITTED and note.at > since and note.size == wanted.total()
            )
            return found == wanted

        return self._wait_until(together, f"{sorted(wanted.elements())} to train", timeout)

    def worker_pid(self, host: str) -> int:
        """Return the process ID of the latest worker on a host."""
        files = [path for path in self._notes() if path.name.split(".")[0] == host]
        return int(max(files, key=lambda path: path.stat().st_mtime).name.split(".")[1])

    def followed(self) -> Callable[[float], float]:
        """Prepare to measure a failover; call it before a driver is hurt.

        The returned function waits until another driver has heard from every member of the world, and returns the
        milliseconds since the given time.
        """
        before = JournalTail(self._by_term()[-1], JobProgress()).look()
        later = Adoptions(before.members)
        followers: list[JournalTail[JobProgress]] = [
            JournalTail(path, JobProgress()) for path in self.journals
        ]
        for follower in followers:
            follower.look()
            follower.story = later

        def adopted() -> bool:
            for follower in followers:
                follower.look()
            return later.done > 0

        def wait(at: float) -> float:
            awaited = "another driver to have all workers"
            return 1e3 * (self._wait_until(adopted, awaited, CHANGE_S) - at)

        return wait

    def measure(
        self,
        what: str,
        at: float,
        *,
        survivors: int | None,
        mark: Mark | None = None,
        adopted_ms: float | None = None,
    ) -> None:
        """Record the state of the survivors since ``at``."""
        seen = steps.aftermath(self.workers(), at, time.monotonic())
        asked = (mark or Mark()).eased(self._slack)
        self.measured.append(ScenarioMeasurement(what, seen, survivors, asked, adopted_ms))

    def workers(self) -> list[WorkerNotes]:
        """Return the notes of every process."""
        return [
            WorkerNotes(path.name.split(".")[0], steps.notes_of(path.read_text()))
            for path in self._notes()
        ]

    # ---- the end ---------------------------------------------------------------------------------------------------

    def finish(self, *, all_heard: bool = True) -> ScenarioOutcome:
        """End the training, and judge the whole job. ``all_heard``: no worker was hurt before it had connected."""
        (self.folder / "over").touch()
        leader = self.leader()
        code = leader.wait(CHANGE_S)
        broken = [f"elasticrun ended with exit code {code}\n{self._state()}"] if code else []
        journal = self.folder / "journal.jsonl"
        join(self._by_term(), journal)
        settings, entries = read(journal)
        try:
            check_journal(journal)
        except BrokenInvariant as error:
            broken.append(str(error))
        heard = {each.event.pid for each in entries if isinstance(each.event, WorkerConnected)}
        for path in self._notes() if all_heard else ():
            host, _, pid = path.name.partition(".")
            if int(pid) not in heard:
                broken.append(f"process {pid} was started on host {host}, but never connected")
        seen = report(settings, entries, [], code=code)
        return ScenarioOutcome(
            self.title,
            self.measured,
            lost=seen.steps.lost,
            compared=seen.digests.compared,
            differing=seen.digests.differing,
            broken=broken,
        )

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _by_term(self) -> list[Path]:
        """Return the journals of the drivers that have led, in that order."""
        terms = {part: term_of(part) for part in self.journals}
        return sorted((part for part in terms if terms[part]), key=lambda part: terms[part])

    def _notes(self) -> list[Path]:
        return sorted((self.folder / "steps").iterdir())

    def _latest(self) -> list[tuple[str, Note]]:
        """Return the last note of each process, with its host."""
        found = []
        for path in self._notes():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                lines = file.read().decode().split("\n")
            notes = steps.notes_of("\n".join(lines[-3:]))  # its last two complete lines
            committed = [note for note in notes if note.kind == steps.COMMITTED]
            found += [(path.name.split(".")[0], note) for note in (committed or notes)[-1:]]
        return found

    def _wait_until(self, true: Callable[[], bool], awaited: str, timeout: float) -> float:
        return wait_until(true, awaited, timeout, look_s=LOOK_S, state=self._state)

    def _state(self) -> str:
        latest = ", ".join(
            f"{host}: {note.kind} {note.step} of {note.size}" for host, note in self._latest()
        )
        tails = [program.tail() for program in self.drivers[-2:]]
        return "\n".join([f"the latest notes: {latest or 'none'}", *tails])


def _term(driver: HostProgram) -> int:
    """Return the term with which it became leader; 0 if it has not logged any."""
    found = [
        match[1] for line in driver.lines if (match := re.search(wording.ELECTED_LEADER, line))
    ]
    return int(found[-1]) if found else 0

"""Large numbers of agents and workers as tasks of one process, for a real driver. The protocol is real.

Each agent has the connection, the handshake and the rules of a real one (`Uplink`, `AgentState`); each worker is the
pure `Recovery` and `Progress` of a real one, without a process: its steps and its restores take no time.

    python -m stress.load.agents < orders    one JSON object per line: Begin, then Lose, Count or Finish

Answers are JSON objects, one per line: `Together` whenever all members of a world have their place, `Adopted` whenever
all agents serve the same driver. The process ends on Finish or at the end of its input.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from elastic.driver.agents.driver_choice import AgentState
from elastic.driver.agents.driver_connection import Uplink
from elastic.driver.agents.host_agent import HERE_S
from elastic.driver.agents.merged_reports import Relayed, ReportMerger
from elastic.driver.agents.messages import (
    AgentId,
    AgentMessage,
    Attach,
    Beat,
    Detach,
    Drop,
    Here,
    Kill,
    Probe,
    Registered,
    Reject,
    Seen,
    Start,
    Tell,
    TellPlaces,
)
from elastic.driver.events import WorkerDisconnected, WorkerExited, WorkerProbed
from elastic.driver.network.host_lists import parse_address
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol import messages
from elastic.protocol.framing import TAG_BYTES
from elastic.protocol.messages import Message, Worker, encoded
from elastic.runtime.recovery import Phase, Recovery
from stress.load.worker import LAYOUT, LightWorker

TICK_S = 1.0  # interval of a worker's progress checks
HEAD = 4 + TAG_BYTES  # bytes of a frame besides its body


# ---- orders and answers --------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, tag=True):
    """Create these hosts, and connect them to this driver. ``secret`` is hexadecimal."""

    driver: str
    secret: str
    hosts: dict[str, int]
    lease_s: float = Settings.lease_s


class Lose(msgspec.Struct, tag=True):
    """Lose a host suddenly, with its agent and its workers."""

    host: str


class Count(msgspec.Struct, tag=True):
    """Report the number of messages so far."""


class Finish(msgspec.Struct, tag=True):
    """End this process without a message to the driver."""


class Together(msgspec.Struct, tag=True):
    """All members of this generation have their place. Times are CLOCK_MONOTONIC in seconds."""

    generation: int
    size: int
    broken_at: float  # time when the last member received Broken of the previous world
    last_at: float  # time when the last member received its place
    # bytes that all hosts together received for it: Broken of the previous world, and all places
    bytes_told: int


class Adopted(msgspec.Struct, tag=True):
    """Every agent serves a driver of this term."""

    term: int
    at: float
    agents: int


class Counted(msgspec.Struct, tag=True):
    """Number of messages of all agents, without `Beat` and `Here`."""

    heard: int
    said: int


Order = Begin | Lose | Count | Finish
Answer = Together | Adopted | Counted
orders = msgspec.json.Decoder(Order)
answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


# ---- an agent ------------------------------------------------------------------------------------------------------


class LightAgent:
    """One host: its agent and its workers."""

    def __init__(self, host: str, slots: int, fleet: LightAgents) -> None:
        self.host = host
        self.slots = slots
        self.workers: dict[Worker, LightWorker] = {}
        self.state = AgentState()
        self._fleet = fleet
        self._here_sent_at = 0.0
        self._merger = ReportMerger()
        self._merging: asyncio.TimerHandle | None = None
        self.uplink = Uplink(
            AgentId(host, time.time_ns()),
            fleet.secret,
            fleet.find,
            opened=lambda: None,
            received=self._received,
            closed=lambda reason: self._merger.reset(),
            missing=lambda reason: None,
            lease_s=fleet.lease_s,
        )
        self._running = asyncio.create_task(self.uplink.run())
        self._ticking: asyncio.TimerHandle | None = None
        self._tick_later(fleet.random.uniform(0.0, TICK_S))

    def crash(self) -> None:
        self._running.cancel()
        self.workers.clear()
        for timer in (self._ticking, self._merging):
            if timer is not None:
                timer.cancel()

    def train(self, generation: int) -> None:
        """Continue training: all members of this world have reached its first collective."""
        for worker in self.workers.values():
            if worker.trains and worker.recovery.generation == generation:
                worker.train()

    def _received(self, message: Any) -> None:
        self._fleet.heard += not isinstance(message, Beat)
        match message:
            case Tell(workers, word):
                self._fleet.told(message)
                if isinstance(word, messages.World):
                    self.state.record_world(word.generation)
                self._relay(self._merger.sent(workers, word))
                for each in workers:
                    found = self.workers.get(each)
                    if found is not None:
                        self._tell(found, word)
            case TellPlaces(members, world):
                self._fleet.told(message)
                self.state.record_world(world.generation)
                self._relay(self._merger.sent([each for each, _ in members], world))
                for each, place in members:
                    found = self.workers.get(each)
                    if found is not None:
                        self._tell(found, msgspec.structs.replace(world, place=place))
            case Beat():
                self._beaten()
            case Attach():
                self._attached(message)
            case Start(worker):
                if self.state.may_start(worker) and worker not in self.workers:
                    found = self.workers[worker] = LightWorker(worker, self._worker_message)
                    found.begin()
            case Kill(worker):
                self._exit(worker, -9)
            case Probe(workers):
                for each in workers:
                    if each in self.workers:
                        self._say(Seen(WorkerProbed(each, 0.0, 0, "S")))
            case Drop(worker):
                self._exit(worker, 1)
            case Detach() | Reject():
                self.state.detached()
                self.workers.clear()

    def _beaten(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._here_sent_at >= HERE_S:
            self._here_sent_at = now
            self.uplink.send(Here())

    def _attached(self, attach: Attach) -> None:
        outcome = self.state.attached(attach)
        if outcome.refused:
            self.uplink.drop(f"refused: {outcome.refused}")
            return
        if outcome.kill:
            self.workers.clear()
        running, exits = sorted(self.workers), [*self.state.exits.values()]
        self._say(Registered(self.slots, "127.0.0.1", ["127.0.0.1/8"], running, exits, attach.job))
        for each in self.workers.values():
            each.hear(messages.Restate())
            if each.recovery.running:
                self._worker_message(each.worker, LAYOUT)
        self._fleet.serves(self, attach.term)

    def _tell(self, worker: LightWorker, word: Message) -> None:
        generation = worker.recovery.generation
        worker.hear(word)
        if worker.recovery.phase is Phase.OVER:
            self._exit(worker.worker, 0)
        elif worker.trains and worker.recovery.generation != generation:
            self._fleet.has_its_place(worker.recovery)

    def _exit(self, worker: Worker, code: int) -> None:
        if self.workers.pop(worker, None) is not None:
            event = WorkerExited(worker, code)
            self.state.exited(event)
            self._relay(self._merger.gone(worker))
            self._say(Seen(WorkerDisconnected(worker)))
            self._say(Seen(event))

    def _worker_message(self, worker: Worker, message: Message) -> None:
        now = asyncio.get_running_loop().time()
        self._relay(self._merger.received(worker, message, now))

    def _relay(self, relayed: Sequence[Relayed]) -> None:
        for message in relayed:
            self._say(message)
        at = self._merger.flush_at
        if self._merging is not None and self._merging.when() != at:
            self._merging.cancel()
            self._merging = None
        if self._merging is None and at is not None:
            self._merging = asyncio.get_running_loop().call_at(at, self._flush)

    def _flush(self) -> None:
        self._merging = None
        self._relay(self._merger.flush())

    def _say(self, message: AgentMessage) -> None:
        self._fleet.said += 1
        self.uplink.send(message)

    def _tick_later(self, delay_s: float) -> None:
        self._ticking = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        for worker in self.workers.values():
            worker.tick(now)
        self._tick_later(TICK_S)


# ---- all agents ----------------------------------------------------------------------------------------------------


class LightAgents:
    """All agents of the process. ``tell`` receives each `Answer`."""

    def __init__(self, begin: Begin, tell: Callable[[Answer], None]) -> None:
        self.secret = bytes.fromhex(begin.secret)
        self.lease_s = begin.lease_s
        self.random = random.Random(len(begin.hosts))
        self.heard = self.said = 0  # messages
        self._driver = parse_address(begin.driver)
        self._tell = tell
        self._bytes = 0  # received for the current change
        self._broken_at = 0.0
        self._generation = self._placed = 0
        self._terms: dict[str, int] = {}
        self.agents = {host: LightAgent(host, n, self) for host, n in begin.hosts.items()}

    async def find(self) -> list[tuple[str, int]]:
        return [self._driver]

    def lose(self, host: str) -> None:
        self._terms.pop(host, None)
        self.agents.pop(host).crash()

    def counted(self) -> Counted:
        return Counted(self.heard, self.said)

    async def close(self) -> None:
        for agent in self.agents.values():
            agent.crash()
        await asyncio.sleep(0)

    # ---- called by agents

    def serves(self, agent: LightAgent, term: int) -> None:
        self._terms[agent.host] = term
        if len(self._terms) == len(self.agents) and set(self._terms.values()) == {term}:
            self._tell(Adopted(term, time.monotonic(), len(self.agents)))

    def told(self, tell: Tell | TellPlaces) -> None:
        word = tell.world if isinstance(tell, TellPlaces) else tell.message
        if isinstance(word, messages.Broken):
            self._broken_at = time.monotonic()
        if isinstance(word, messages.Broken | messages.World):
            self._bytes += HEAD + len(encoded(tell))

    def has_its_place(self, recovery: Recovery) -> None:
        generation, size = recovery.generation, recovery.place.size
        if generation != self._generation:
            self._generation, self._placed = generation, 0
        self._placed += 1
        if self._placed < size:
            return
        bytes_told, self._bytes = self._bytes, 0
        self._tell(Together(generation, size, self._broken_at, time.monotonic(), bytes_told))
        for agent in self.agents.values():
            asyncio.get_running_loop().call_soon(agent.train, generation)


async def serve(lines: asyncio.StreamReader, tell: Callable[[Answer], None]) -> None:
    """Execute orders until Finish or the end of ``lines``. Raises Invalid."""
    first = orders.decode(await lines.readline() or b"{}")
    if not isinstance(first, Begin):
        raise Invalid("the first order must be Begin")
    fleet = LightAgents(first, tell)
    try:
        while line := await lines.readline():
            match orders.decode(line):
                case Lose(host):
                    fleet.lose(host)
                case Count():
                    tell(fleet.counted())
                case Finish():
                    return
    finally:
        await fleet.close()


def _print(answer: Answer) -> None:
    line = msgspec.json.encode(answer) + b"\n"
    while line:
        line = line[os.write(1, line) :]


async def _main() -> None:
    lines = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await serve(lines, _print)


def main(arguments: Sequence[str]) -> int:
    if arguments:
        print("usage: python -m stress.load.agents < orders", file=sys.stderr)
        return 2
    try:
        asyncio.run(_main())
    except (Invalid, msgspec.MsgspecError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

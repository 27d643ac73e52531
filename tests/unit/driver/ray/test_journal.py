"""Journal in Ray's store: drivers killed at any call, two writers at once, and an unavailable head."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.etcd.leader_election import LeadershipLost
from elastic.driver.events import TimePassed
from elastic.driver.journal.entries import Entry, Header, Snapshot, Writer, decoded, header_of
from elastic.driver.journal.journal import SnapshotPolicy
from elastic.driver.journal.writer_chapters import (
    Head,
    Place,
    SegmentedRecord,
    chapter_name,
    counting,
)
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.ray.cluster import RayUnavailable
from elastic.driver.ray.journal import RayArchive, RayJournal
from elastic.driver.ray.kv import RetryingKV
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from harness.golden import raises, recorded
from harness.journal_contract import FakeKeyValues, InRay, Killed
from unit.driver.journal.test_journal_contract import Drive

SETTINGS = Settings(np=2, workers_min=1, workers_max=2, elastic=True)
HEADER = header_of(SETTINGS, job="a1", writer=Writer(1, "here:1"))


@pytest.fixture(scope="module")
def job():
    sim = Simulation(2, workers=6, steps=60, faults=10, mild=True)
    sim.run()
    return sim.settings, sim.driver.entries[:160]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("elastic.driver.journal.record_pieces.PIECE", 2000)


# ---- killed at any call ----------------------------------------------------------------------------------------------


async def a_day(drive: Drive, entries: Sequence[Any], known: list[bytes]) -> None:
    """Begin, and take snapshots of several pieces. ``known`` receives the recorded states, and "settled"."""
    await drive.begin()
    known += [take_snapshot(drive.membership), b"settled"]
    for entry in entries:
        drive.journal.record(entry.at, entry.event, drive.membership.handle(entry.event, entry.at))
        known.append(take_snapshot(drive.membership))
        await drive.journal.settle()
        known.append(b"settled")
        await drive.journal.rest()


async def killed_at(place: InRay, call: int, entries: Sequence[Any], settings: Settings) -> Any:
    """Return what the driver knew, or None if it made fewer calls."""
    known: list[bytes] = []
    archive = place.archive
    place.archive = lambda: with_life(archive(), place, call)  # type: ignore[method-assign]
    try:
        await a_day(Drive(place, settings, every=6), entries, known)
        return None
    except Killed:
        return known
    finally:
        place.archive = archive  # type: ignore[method-assign]


def with_life(archive: RayArchive, place: InRay, calls: int) -> RayArchive:
    place.latest.lives_for = calls
    return archive


@pytest.mark.slow
def test_driver_may_be_killed_at_any_call(tmp_path, job, small_pieces):
    """Also between the pieces of a snapshot, and while the previous chapters are removed."""
    settings, entries = job

    async def story() -> int:
        for call in range(1000):
            place = InRay(tmp_path)
            known = await killed_at(place, call, entries[:16], settings)
            if known is None:
                return call
            past = await place.archive().past()
            if past is None:
                assert b"settled" not in known
                continue
            # Everything settled is in the journal; what was only recorded may be.
            states = [state for state in known if state != b"settled"]
            settled = known.count(b"settled")
            assert (
                take_snapshot(past.membership)
                in (states or [take_snapshot(past.membership)])[settled - 1 :]
            )
        raise AssertionError("it never ends")

    calls = asyncio.run(story())
    assert calls > 40


@pytest.mark.slow
async def test_successors_may_be_killed_at_any_call(tmp_path, job, small_pieces):
    settings, entries = job
    for call in range(1000):
        place = InRay(tmp_path)
        first = Drive(place, settings, every=6)
        await first.begin()
        await first.tell(entries[:14])
        known = first.kill()
        archive = place.archive()
        place.latest.lives_for = call
        with contextlib.suppress(Killed):
            past = await archive.past()
            assert past is not None
            await archive.go_on(past, Writer(2))
            return
        third = Drive(place, settings, every=6)
        past = await third.go_on(Writer(3))
        assert take_snapshot(third.membership) == known
        await third.tell(entries[14:30])
        known = third.kill()
        past = await place.archive().past()
        assert past is not None and take_snapshot(past.membership) == known and past.term == 3
    raise AssertionError("it never ends")


async def test_incomplete_snapshot_is_ignored_and_removed_by_the_next_one(
    tmp_path, job, small_pieces
):
    settings, entries = job
    place = InRay(tmp_path)
    drive = Drive(place, settings, every=10)
    await drive.begin()
    for entry in entries[:10]:
        drive.journal.record(entry.at, entry.event, drive.membership.handle(entry.event, entry.at))
        await drive.journal.settle()
    place.latest.lives_for = 1  # piece
    with pytest.raises(Killed):
        await drive.journal.rest()
    torn = [key for key in place.kept if "/000001-000001-" in key]
    assert len(torn) == 1
    head = msgspec.json.decode(place.kept[torn[0]].partition(b"\n")[0], type=Head)
    assert head.piece == 1 and head.of > 1
    second = Drive(place, settings, every=10)
    past = await second.go_on()
    assert past.replayed == 10 and take_snapshot(past.membership) == take_snapshot(drive.membership)
    await second.tell(entries[10:40])
    assert not any("/000001-" in key for key in place.kept if "/records/" in key)


# ---- two writers at once ---------------------------------------------------------------------------------------------


@types.coroutine
def _one_call() -> Generator[None, None, None]:
    yield


class InSteps:
    """Calls that a test executes one at a time.

    Some run once more later, as requests that were given up but not lost.
    """

    def __init__(
        self, kept: dict[str, bytes], late: list[Callable[[], object]], seed: float
    ) -> None:
        self._kv = FakeKeyValues(kept)
        self._late = late
        self._random = random.Random(seed)

    async def put(self, key: str, value: bytes) -> None:
        await self._call(lambda: self._kv.put(key, value), again=True)

    async def create(self, key: str, value: bytes) -> bool:
        return bool(await self._call(lambda: self._kv.create(key, value)))

    async def get(self, keys: Sequence[str]) -> Any:
        return await self._call(lambda: self._kv.get(keys))

    async def keys(self, prefix: str) -> Any:
        return await self._call(lambda: self._kv.keys(prefix))

    async def remove(self, prefix: str) -> None:
        await self._call(lambda: self._kv.remove(prefix), again=True)

    async def _call(self, call: Callable[[], object], *, again: bool = False) -> object:
        await _one_call()
        if again and self._random.random() < 0.1:
            self._late.append(call)
        return call()


@dataclass
class EntryTimes:
    """In place of `RecoveredJob`: the times of the entries."""

    header: Header
    entries: list[float]
    replayed: int = 0


def entry_times(header: Header, lines: Sequence[bytes]) -> EntryTimes:
    entries: list[float] = []
    for text in lines:
        match decoded(text):
            case Snapshot(snapshot):
                entries = json.loads(bytes(snapshot))
            case Entry(at):
                entries.append(at)
    return EntryTimes(header, entries)


class Storm:
    """Drivers that start, lose contact, return late and die, in an order determined by the seed.

    Invariant: a driver that may act knows everything that any driver has acted on before, in order.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kept: dict[str, bytes] = {}
        self.late: list[Callable[[], object]] = []
        self.acted: list[float] = []
        self.deposed = 0
        self.entry = 0

    async def driver(self) -> None:
        kv: Any = InSteps(self.kept, self.late, self.random.random())
        archive = RayArchive("night", kv=kv)
        state: list[float] = []
        policy = SnapshotPolicy(
            take=lambda: json.dumps(state + [0.0] * 20).encode(), snapshot_every=3
        )
        try:
            found: Any = await archive.past()
            if found is None:
                journal = await archive.begin(HEADER, policy)
            else:
                state += found.entries
                journal = await archive.go_on(found, Writer(2), policy)
            self.act(state)
            while True:
                for _ in range(self.random.randint(1, 3)):
                    self.entry += 1
                    state.append(float(self.entry))
                    journal.record(float(self.entry), TimePassed())
                await journal.settle()
                self.act(state)
                await journal.rest()
        except LeadershipLost:
            assert archive.lost.is_set()
            self.deposed += 1

    def act(self, state: list[float]) -> None:
        known = [entry for entry in state if entry]
        assert known[: len(self.acted)] == self.acted, "it does not know all that was done"
        self.acted = known

    def run(self, steps: int) -> None:
        drivers: list[Coroutine[Any, None, None]] = [self.driver()]
        for _ in range(steps):
            if not drivers or self.random.random() < 0.03:
                drivers.append(self.driver())
            if self.late and self.random.random() < 0.2:
                self.late.pop(self.random.randrange(len(self.late)))()
            index = self.random.choice([len(drivers) - 1, self.random.randrange(len(drivers))])
            if self.random.random() < 0.01:
                drivers.pop(index).close()
                continue
            try:
                drivers[index].send(None)
            except StopIteration:
                del drivers[index]
        for left in drivers:
            left.close()


@pytest.mark.parametrize(
    "seeds",
    [
        *(pytest.param(range(at, at + 40), marks=pytest.mark.slow) for at in range(0, 200, 40)),
        [2508],  # deposed while it removes obsolete records
    ],
    ids=str,
)
def test_driver_that_may_act_knows_all_previous_actions(seeds, monkeypatch):
    monkeypatch.setattr("elastic.driver.ray.journal.past_of", entry_times)
    monkeypatch.setattr("elastic.driver.journal.record_pieces.PIECE", 100)
    deposed = acted = 0
    for seed in seeds:
        storm = Storm(seed)
        try:
            storm.run(400)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        deposed += storm.deposed
        acted += len(storm.acted)
    assert (deposed > 2 * len(seeds) and acted > 20 * len(seeds)) or len(seeds) == 1


async def test_late_writes_of_a_deposed_driver_are_ignored(tmp_path, job):
    settings, entries = job
    place = InRay(tmp_path)
    first = Drive(place, settings, every=8)
    await first.begin()
    await first.tell(entries[:7])
    second = Drive(place, settings)
    await second.go_on()
    await second.tell(entries[7:12])
    with raises(LeadershipLost):
        await first.tell(entries[7:10])  # with a snapshot
    past = await place.archive().past()
    assert past is not None and take_snapshot(past.membership) == take_snapshot(second.membership)


async def test_change_of_leader_is_reported_once(tmp_path):
    log: list[tuple[str, str]] = []
    kept: dict[str, bytes] = {}
    first = of(kept, lambda *line: log.append(line))
    await first.past()
    journal = await first.begin(HEADER)
    await of(kept).past()
    for _ in range(2):
        journal.record(1.0, TimePassed())
        with pytest.raises(LeadershipLost):
            await journal.settle()
    assert first.lost.is_set()
    with pytest.raises(LeadershipLost):
        await first.forget()
    assert kept
    [(level, text)] = log
    assert level == "warning"
    recorded("messages", text)


async def test_writer_turn_whose_answer_was_lost_is_recognized_as_acquired(tmp_path):
    """Otherwise the driver would wait for itself."""

    def unheard(change: Callable[[], Any]) -> Any:
        change()
        raise RayUnavailable("the answer got lost")

    kept: dict[str, bytes] = {}
    kv = FakeKeyValues(kept)
    kv.troubles = [lambda change: change()] * 2 + [unheard]
    archive = RayArchive("night", kv=RetryingKV(kv, quiet, pause=no_pause))
    assert await archive.past() is None
    assert [key for key in kept if "/writers/" in key] == ["journal/night/writers/000001"]
    journal = await archive.begin(HEADER)
    kv.troubles = [unheard] * 2
    journal.record(1.0, TimePassed())
    await journal.settle()
    past = await of(kept).past()
    assert past is not None and past.replayed == 1


# ---- deletion --------------------------------------------------------------------------------------------------------


async def test_deletion_removes_one_job_and_keeps_the_second(tmp_path):
    kept: dict[str, bytes] = {}
    for name in ("night", "night2"):
        archive = of(kept, job=name)
        await archive.past()
        await archive.begin(HEADER)
    await of(kept).forget()
    assert kept and all(key.startswith("journal/night2/") for key in kept)
    await archive.forget()
    assert not kept


@pytest.mark.parametrize("calls", range(3))
async def test_interrupted_deletion_leaves_the_job_unchanged_or_removed(tmp_path, calls):
    """Ray may restart the driver, which must not resume from half of a job. The removal may be interrupted too."""
    kept: dict[str, bytes] = {}
    kv = FakeKeyValues(kept)
    archive = RayArchive("night", kv=RetryingKV(kv, quiet))
    await archive.past()
    journal = await archive.begin(HEADER)
    for at in range(8):
        journal.record(float(at), TimePassed())
        await journal.settle()

    def half(change: Callable[[], Any]) -> Any:
        before = dict(kept)
        change()
        kept.update(dict([*before.items() - kept.items()][1:][::2]))
        raise Killed

    kv.troubles = [*([lambda change: change()] * calls), half]
    with pytest.raises(Killed):
        await archive.forget()
    past = await of(kept).past()
    assert (past.replayed if past else None) == (8 if calls == 0 else None)


async def test_writes_after_the_deletion_belong_to_no_job(tmp_path):
    """A driver that was disconnected writes after the end. The next job has its name and turn."""
    kept: dict[str, bytes] = {}
    archive = of(kept)
    await archive.past()
    journal = await archive.begin(HEADER)
    await of(kept).forget()
    journal.record(1.0, TimePassed())
    with pytest.raises(LeadershipLost):
        await journal.settle()
    assert len(kept) == 1
    archive = of(kept)
    assert await archive.past() is None
    await archive.begin(HEADER)
    assert len(kept) == 2, "its turn and its beginning"
    with pytest.raises(LeadershipLost):
        await journal.settle()


async def test_deletion_has_a_time_limit(tmp_path):
    logged: list[tuple[str, str]] = []
    kept: dict[str, bytes] = {"journal/night/writers/000001": b"0123456789ab"}
    kv = FakeKeyValues(kept)
    kv.troubles = [away] * 10**6
    log = lambda *line: logged.append(line)  # noqa: E731
    archive = RayArchive("night", log=log, kv=RetryingKV(kv, quiet, pause=no_pause))
    await archive.forget(within_s=0.0)
    [(level, text)] = logged
    assert level == "warning"
    recorded("messages", text)


# ---- reading ---------------------------------------------------------------------------------------------------------


def written(*records: tuple[bytes, dict[str, Any]]) -> dict[int, bytes]:
    """A chapter of records in pieces of up to 4 bytes."""
    chapter: dict[int, bytes] = {}
    for data, more in records:
        record = SegmentedRecord(bytearray(data), **more)
        while (piece := record.piece()) is not None:
            chapter[len(chapter)] = piece
            record.written += 1
    return chapter


def test_valid_records_are_found_from_the_end(monkeypatch):
    monkeypatch.setattr("elastic.driver.journal.record_pieces.PIECE", 4)
    a, b, c, d = (chapter_name(turn, 0, "0123456789ab") for turn in range(1, 5))
    old = written((b"old", {"begins": True}), (b"gone", {}))
    one = written((b"header", {"begins": True}), (b"x", {}), (b"too late", {}))
    two = written((b"never", {"after": Place(b, 2)}))
    three = written((b"y", {"after": Place(b, 3)}), (b"z", {}), (b"torn apart", {}))
    del three[max(three)]
    chapters = {a: old, b: one, c: two, d: three}
    assert counting(chapters) == ([b"header", b"x", b"y", b"z"], Place(d, 2))
    assert counting({a: old}) == ([b"old", b"gone"], Place(a, 2))
    assert counting({b: {0: one[0]}}) == ([], None), "half of a beginning"
    assert counting({}) == ([], None)
    with raises(ValueError, b):
        counting({**chapters, b: {n: piece for n, piece in one.items() if n != 2}})
    with raises(ValueError):
        counting({a: written((b"x", {}))})


async def test_missing_record_is_detected(tmp_path, job):
    settings, entries = job
    place = InRay(tmp_path)
    drive = Drive(place, settings)
    await drive.begin()
    await drive.tell(entries[:30])
    [key] = [key for key in place.kept if key.endswith("/000000004")]
    del place.kept[key]
    with raises(Invalid):
        await place.archive().past()


async def test_snapshots_keep_the_journal_small(tmp_path, job):
    settings, entries = job
    place = InRay(tmp_path)
    drive = Drive(place, settings, every=20)
    await drive.begin()
    await drive.tell(entries)
    assert place.latest.calls > 100 and len(place.kept) < 40
    drive.kill()
    drive = Drive(place, settings)
    assert await drive.begin("next") is not None
    assert len(place.kept) == 3, "two turns and a beginning"


@pytest.mark.parametrize("name", ["", "a/b", "a\nb"])
def test_names_that_would_form_other_keys_are_rejected(name):
    with raises(Invalid):
        of({}, job=name)


async def test_journal_does_not_begin_without_reading_the_existing_state(tmp_path):
    with pytest.raises(RuntimeError):
        await of({}).begin(HEADER)


# ---- unavailable head ------------------------------------------------------------------------------------------------


def away(change: Callable[[], Any]) -> Any:
    raise RayUnavailable("RpcError: Deadline Exceeded")


def quiet(level: str, text: str) -> None:
    pass


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


def of(
    kept: dict[str, bytes], log: Callable[[str, str], None] = quiet, *, job: str = "night"
) -> RayArchive:
    return RayArchive(job, log=log, kv=RetryingKV(FakeKeyValues(kept), quiet, pause=no_pause))


class Hours:
    """A clock that only advances during pauses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.said: list[tuple[float, str, str]] = []

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def log(self, level: str, text: str) -> None:
        self.said.append((round(self.now - 100.0, 1), level, text))

    def insistent(self, kv: FakeKeyValues, **more: Any) -> RetryingKV:
        return RetryingKV(kv, self.log, clock=lambda: self.now, pause=self.pause, **more)


async def begun(insistent: RetryingKV) -> RayJournal:
    archive = RayArchive("night", kv=insistent)
    await archive.past()
    return await archive.begin(HEADER)


async def test_outage_of_the_head_is_waited_for_and_logged_once():
    hours, kv = Hours(), FakeKeyValues({})
    journal = await begun(hours.insistent(kv))
    kv.troubles = [away] * 20
    journal.record(1.0, TimePassed())
    await journal.settle()
    assert hours.said == [
        (
            3.2,
            "warning",
            "Ray's head does not respond (RpcError: Deadline Exceeded); training continues, and membership changes are"
            " postponed",
        ),
        (round(sum(hours.pauses), 1), "info", "Ray's head responds again after 9.2 s"),
    ]
    assert hours.pauses[:4] == [0.1, 0.2, 0.4, 0.5] and max(hours.pauses) == 0.5
    kv.troubles = [away] * 10
    journal.record(2.0, TimePassed())
    await journal.settle()
    assert len(hours.said) == 4, "the next time it is said again"
    past = await of(kv.kept).past()
    assert past is not None and past.replayed == 2


async def test_short_outage_is_not_logged():
    hours, kv = Hours(), FakeKeyValues({})
    journal = await begun(hours.insistent(kv))
    for _ in range(20):
        kv.troubles = [away] * 3
        journal.record(1.0, TimePassed())
        await journal.settle()
    assert not hours.said and sum(hours.pauses) > 10


async def test_records_during_an_outage_are_written_together():
    kv = FakeKeyValues({})
    journal = await begun(RetryingKV(kv, quiet, pause=no_pause))
    back = threading.Event()

    def until_back(change: Callable[[], Any]) -> Any:
        assert back.wait(30)
        return change()

    kv.troubles = [until_back]
    journal.record(1.0, TimePassed())
    settling = asyncio.ensure_future(journal.settle())
    while kv.troubles:
        await asyncio.sleep(0)
    for at in range(2, 100):
        journal.record(float(at), TimePassed())
    assert not settling.done()
    before = kv.calls
    back.set()
    await settling
    assert kv.calls - before == 3, "a look, and one more record with its look"
    past = await of(kv.kept).past()
    assert past is not None and past.replayed == 99


async def test_call_that_hangs_times_out_and_later_calls_wait_their_turn():
    """The fake fails if two calls run at once."""
    hours, kv = Hours(), FakeKeyValues({})
    journal = await begun(hours.insistent(kv, answer_s=0.01))
    back = threading.Event()

    async def pause(seconds: float) -> None:
        await hours.pause(seconds)
        if hours.now > 110.0:
            back.set()

    def hangs(change: Callable[[], Any]) -> Any:
        assert back.wait(30)
        return change()

    kv.troubles = [hangs]
    journal._turn._kv._pause = pause
    journal._turn._kv._answer_s = 0.01
    journal.record(1.0, TimePassed())
    await journal.settle()
    assert [level for _, level, _ in hours.said] == ["warning", "info"]
    recorded("log", hours.said[0][2])
    past = await of(kv.kept).past()
    assert past is not None and past.replayed == 1


async def test_bug_is_not_treated_as_an_outage():
    kv = FakeKeyValues({})

    def bug(change: Callable[[], Any]) -> Any:
        raise TypeError("no such argument")

    kv.troubles = [bug]
    with pytest.raises(TypeError):
        await RetryingKV(kv, quiet).keys("")

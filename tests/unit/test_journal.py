"""A journal is read back as it was written, and replayed against the machine that wrote it."""

from __future__ import annotations

import json
import stat

import pytest

from elastic.driver import journal
from elastic.driver.events import (
    BreakWorld,
    EndJob,
    HostsChanged,
    Member,
    PublishWorld,
    StartWorker,
    StopRequested,
    TimePassed,
    WorkerExited,
    WorkerReady,
)
from elastic.driver.journal import Journal, ReplayDiffers, read, replay
from elastic.driver.membership import Membership
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol import Address, Commit, Place, Worker

A, B = Worker("h1", 0), Worker("h2", 0, 3)
PLACE = Place(0, 2, 0, 1, 0, 2)
WORLD = PublishWorld(
    4, [Member(A, PLACE)], Address("127.0.0.1", 4711), 1, Commit(3, 17), "1 of 2 ready"
)


def settings(**changes) -> Settings:
    return Settings(np=2, workers_min=1, workers_max=2, elastic=True, **changes)


class Script:
    """A machine that answers each type of event always the same."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def handle(self, event, now):
        match event:
            case HostsChanged():
                return [StartWorker(A, PLACE, "first start"), StartWorker(B, PLACE, "first start")]
            case WorkerReady():
                return [WORLD]
            case WorkerExited():
                return [BreakWorld(4, [A], f"lost at {now}")]
            case TimePassed():
                raise AssertionError("too late")
            case _:
                return [EndJob(1, "asked")]


CONVERSATION = [
    (0.1, HostsChanged({"h1": 1, "h2": 1})),
    (1.0 / 3, WorkerReady(A, 3, Commit(3, 17), Address("127.0.0.1", 4711), layout="x")),
    (7.25, WorkerExited(B, -9, output="last words\n")),
    (9.0, StopRequested("Ctrl-C")),
]


def written(path, machine, conversation=CONVERSATION, **changes):
    log = Journal(path, settings(**changes))
    for at, event in conversation:
        log.record(at, event, machine.handle(event, at))
    log.close()
    return path


def test_what_is_read_is_what_was_written(tmp_path):
    path = written(tmp_path / "j", Script(settings()))
    found, entries = read(path)
    assert found == settings()
    assert [(e.at, e.event) for e in entries] == CONVERSATION
    assert entries[1].actions == [WORLD]


def test_replay_returns_events_and_actions(tmp_path):
    path = written(tmp_path / "j", Script(settings()))
    pairs = replay(path, Script)
    assert [event for event, _ in pairs] == [event for _, event in CONVERSATION]
    assert pairs[2][1] == [BreakWorld(4, [A], "lost at 7.25")]


def test_replay_agrees_with_membership_itself(tmp_path):
    machine = Membership(settings())
    hosts = (0.0, HostsChanged({"h1": 1, "h2": 1}))
    path = written(tmp_path / "j", machine, [hosts, (1.0, StopRequested("enough"))])
    actions = [action for _, actions in replay(path) for action in actions]
    assert [type(a) for a in actions] == [StartWorker, StartWorker, EndJob]


def test_replay_names_the_first_difference(tmp_path):
    path = written(tmp_path / "j", Script(settings()))

    class Changed(Script):
        def handle(self, event, now):
            if isinstance(event, WorkerExited):
                return [BreakWorld(4, [A], "another reason")]
            return super().handle(event, now)

    with pytest.raises(ReplayDiffers, match=r"line 4, WorkerExited.*'lost at 7.25'.*another"):
        replay(path, Changed)


def test_a_missing_action_is_a_difference(tmp_path):
    path = written(tmp_path / "j", Script(settings()))

    class Lazy(Script):
        def handle(self, event, now):
            return super().handle(event, now)[:1]

    with pytest.raises(ReplayDiffers, match=r"line 2.*action 2 was recorded as StartWorker"):
        replay(path, Lazy)


def test_an_event_that_raised_must_raise_again(tmp_path):
    log = Journal(tmp_path / "j", settings())
    log.record(1.0, TimePassed(), error="AssertionError: too late")
    log.close()
    assert replay(tmp_path / "j", Script) == [(TimePassed(), [])]

    log = Journal(tmp_path / "j", settings())
    log.record(1.0, StopRequested("x"), error="AssertionError: too late")
    log.close()
    with pytest.raises(ReplayDiffers, match="raised nothing"):
        replay(tmp_path / "j", Script)


def test_each_event_is_in_the_file_at_once(tmp_path):
    log = Journal(tmp_path / "j", settings())
    log.record(1.0, TimePassed())
    assert json.loads((tmp_path / "j").read_text().splitlines()[1]) == {
        "at": 1.0,
        "event": {"type": "TimePassed"},
    }
    log.close()


def test_a_torn_last_line_is_left_out(tmp_path):
    path = written(tmp_path / "j", Script(settings()))
    path.write_bytes(path.read_bytes()[:-20])
    assert len(replay(path, Script)) == len(CONVERSATION) - 1


def test_only_the_user_may_read_it_and_it_keeps_no_secret(tmp_path):
    path = tmp_path / "j"
    path.touch(0o644)
    written(path, Script(settings()), env={"TOKEN": "hunter2"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "hunter2" not in path.read_text()
    assert read(path)[0].env == {"TOKEN": ""}


def test_the_story_has_the_latest_events(tmp_path):
    log = Journal(None, settings())
    assert log.story() == "no events yet"
    for n in range(300):
        log.record(float(n), StopRequested(f"n{n}"), [EndJob(1, "x")])
    story = log.story()
    assert "n99'" not in story and "n100'" in story and "n299'" in story
    assert "-> EndJob code=1 reason='x'" in story


def test_a_full_disk_ends_the_journal_and_not_the_job():
    said: list[str] = []
    log = Journal("/dev/full", settings(), failed=said.append)  # type: ignore[arg-type]
    log.record(1.0, TimePassed())
    log.record(2.0, TimePassed())
    assert said == ["the journal '/dev/full' ends here: No space left on device"]


def test_bad_files_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(Invalid, match="cannot write the journal"):
        Journal(tmp_path / "missing" / "j", settings())
    with pytest.raises(Invalid, match="cannot read the journal"):
        read(tmp_path / "none")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(Invalid, match="is no journal"):
        read(tmp_path / "text")
    (tmp_path / "empty").touch()
    with pytest.raises(Invalid, match="is no journal"):
        read(tmp_path / "empty")
    path = written(tmp_path / "j", Script(settings()))
    path.write_text(path.read_text().replace('"at":9.0', '"at":nine'))
    with pytest.raises(Invalid, match="line 5, is no journal entry"):
        read(path)


def test_the_program_tells_the_story_and_whether_the_replay_agrees(tmp_path, capsys):
    hosts = (5.0, HostsChanged({"h1": 1, "h2": 1}))
    path = written(tmp_path / "good", Membership(settings()), [hosts])
    assert journal.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "    +0.000  HostsChanged hosts={'h1': 1, 'h2': 1}" in out
    assert "-> StartWorker worker=h1:0#1" in out
    assert "the replay agrees: 1 events" in out

    path = written(tmp_path / "bad", Script(settings()), [hosts])
    assert journal.main([str(path)]) == 1
    assert "the replay differs: line 2" in capsys.readouterr().err

    assert journal.main([str(tmp_path / "none")]) == 2
    assert journal.main([]) == 2

"""`elasticrun replay`: the live page of a finished job, from its journal."""

import pytest

from elastic.driver.commandline.offline import replay_cli
from elastic.driver.commandline.offline.replay_cli import ReplayClock, play
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.explain.journal_file import JournalEntries
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.errors import Invalid
from harness.golden import raises, recorded
from harness.kept_journals import unpacked
from unit.driver.monitoring.explain.test_explain import HERE


def test_replay_clock_runs_faster_than_real_time_and_stops():
    now = [100.0]
    clock = ReplayClock(5000.0, 10.0, lambda: now[0])
    assert clock.now() == 5000.0
    now[0] = 103.0
    assert clock.now() == 5030.0
    clock.stop()
    now[0] = 200.0
    assert clock.now() == 5030.0


def test_page_reaches_the_end_of_the_job(tmp_path):
    file = unpacked(HERE / "jobs" / "stuck.jsonl.xz", tmp_path)
    model = PageModel(TimeSpent(JobView()), name="stuck", command=["python"], least=2, most=3)
    with JournalEntries(file) as found:
        offset = found.reading.offset or 0.0
        for entry in found:
            play(model, entry, entry.at + offset)
            at = entry.at + offset
    shown = model.full(at)
    code, why = shown["set"]["job"]["ended"]
    assert code == 1 and "stuck" in why
    assert len(shown["rows"]["workers"]) == 3
    recorded("log", shown["add"]["log"])


def test_film_is_written_and_its_size_printed(tmp_path, capsys):
    file = unpacked(HERE / "jobs" / "killed.jsonl.xz", tmp_path)
    assert (
        replay_cli.main([str(file), "--svg", str(tmp_path / "film.svg"), "--length", "12"], {}) == 0
    )
    recorded("output", capsys.readouterr().out)
    assert 'dur="12s"' in (tmp_path / "film.svg").read_text()


@pytest.mark.parametrize(
    "flags", [[], ["--speed", "-1", "FILE"], ["--svg", "no/such/film.svg", "FILE"], ["nothing"]]
)
def test_invalid_flags_are_rejected(flags, tmp_path):
    file = str(unpacked(HERE / "jobs" / "killed.jsonl.xz", tmp_path))
    with raises(Invalid):
        replay_cli.main([file if flag == "FILE" else flag for flag in flags], {})

"""`python -m elastic.chaos simulate` and `replay`: what they print when nothing is wrong, and when something is."""

import pytest

from elastic.chaos.__main__ import main
from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.journal import journal
from harness.golden import recorded


def test_simulate_reports_the_number_of_seeds(capsys):
    assert main(["simulate", "--seed", "3", "--seeds", "2", "--workers", "4", "--steps", "40"]) == 0
    recorded("output", capsys.readouterr().out)


def test_shards_are_simulated_in_jobs_of_few_workers(capsys):
    assert main(["simulate", "--sharded", "--seeds", "2", "--workers", "4", "--steps", "40"]) == 0
    assert capsys.readouterr().out
    assert main(["simulate", "--sharded", "--workers", "300"]) == 2


def test_one_seed_prints_its_events_and_its_journal_replays(tmp_path, capsys):
    path = tmp_path / "seed.jsonl"
    assert main(["simulate", "--seed", "7", "--journal", str(path)]) == 0
    said = capsys.readouterr().out
    assert "PublishWorld generation=1" in said and "seed 7: " in said
    assert main(["replay", str(path)]) == 0
    said = capsys.readouterr().out
    recorded("log", said)
    assert journal.main([str(path)]) == 0


def test_violation_prints_the_command_to_reproduce_and_writes_a_journal(
    tmp_path, capsys, monkeypatch
):
    def planted(self, process):
        assert process.recovery.generation < 2, "planted"

    monkeypatch.setattr(Simulation, "labelled", planted)
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--seed", "7", "--workers", "4", "--steps", "40"]) == 1
    said = capsys.readouterr().out
    assert "seed 7: planted" in said
    assert "simulate --seed 7 --workers 4 --steps 40" in said
    assert "\ncommit   " in said
    path = tmp_path / "simulated-seed-7.jsonl"
    assert f"replay {path.name}" in said
    assert main(["replay", str(path)]) == 0  # the driver did nothing wrong
    recorded("output", capsys.readouterr().out)


def test_changed_decision_is_found_by_replay(tmp_path, capsys):
    path = tmp_path / "seed.jsonl"
    main(["simulate", "--seed", "7", "--workers", "4", "--steps", "40", "--journal", str(path)])
    path.write_text(path.read_text().replace('"kind":"entering"', '"kind":"fell out"'))
    assert main(["replay", str(path)]) == 1
    recorded("output", capsys.readouterr().err)


@pytest.mark.parametrize("flag", ["--seeds", "--workers", "--steps"])
def test_bad_numbers_are_refused(flag, capsys):
    assert main(["simulate", flag, "0"]) == 2
    recorded("output", capsys.readouterr().err, flag)


@pytest.mark.parametrize(
    "words",
    [
        ["--faults", "-1"],
        ["--seconds", "5"],
        ["--workers", "200", "--seconds", "0"],
        ["--workers", "200", "--seconds", "-1"],
        ["--workers", "200", "--seconds", "nan"],
        ["--workers", "200", "--seconds", "inf"],
        ["--workers", "200", "--journal", "x.jsonl"],
        ["--journal", "/nowhere/x.jsonl"],
        ["--journal", "/tmp"],
    ],
)
def test_impossible_options_are_refused_before_the_simulation(words, capsys, monkeypatch):
    monkeypatch.setattr(Simulation, "run", lambda self: pytest.fail("it ran"))
    assert main(["simulate", *words]) == 2
    recorded("output", capsys.readouterr().err)


def test_unreported_samples_are_not_counted_as_checked(tmp_path, capsys):
    path = tmp_path / "seed.jsonl"
    main(["simulate", "--workers", "2", "--steps", "5", "--faults", "0", "--journal", str(path)])
    path.write_text(
        "".join(
            line + "\n" for line in path.read_text().splitlines() if "WorkerDigested" not in line
        )
    )
    assert main(["check", str(path)]) == 0
    assert main(["check", "--samples", "10", str(path)]) == 1
    recorded("output", capsys.readouterr().err)
    assert main(["check", "--samples", "0", str(path)]) == 2
    recorded("output", capsys.readouterr().err)

"""The command line: what can be known to be wrong is said in one sentence, before anything is started."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from elastic.chaos.__main__ import COMMANDS, main

JOB = ["--", "elasticrun", "-np", "2", "--min-np", "1", sys.executable, "-c", "pass"]
OFTEN = ["--mean-time-between-faults", "1"]


def refused(capsys, *words: str) -> str:
    """The sentence with which a command is refused."""
    assert main(list(words)) == 2
    said: str = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", start)


def test_it_says_what_there_is(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)


def test_an_unknown_command_is_refused(capsys):
    assert "no command 'rum'; give one of run, check" in refused(capsys, "rum")


def test_a_command_that_is_not_installed_does_not_break_the_others(capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, "nothing", "is not there")
    assert "nothing is not part of this installation" in refused(capsys, "nothing")


def test_what_a_command_raises_by_mistake_is_not_hidden(monkeypatch):
    broken = SimpleNamespace(add_arguments=lambda parser: None, main=lambda options: 1 / 0)
    monkeypatch.setitem(sys.modules, "elastic.chaos.broken", broken)
    monkeypatch.setitem(COMMANDS, "broken", "raises")
    with pytest.raises(ZeroDivisionError):
        main(["broken"])


@pytest.mark.parametrize("name", ["run", "soak", "check"])
def test_each_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "usage: python -m elastic.chaos " + name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (JOB, "give --plan FILE or --mean-time-between-faults S"),
        (
            [*OFTEN, "--faults", "kill,crash", *JOB],
            "--faults: 'crash' is not a fault; give some of",
        ),
        (["--mean-time-between-faults", "0", *JOB], "--mean-time-between-faults is 0; give"),
        (["--mean-time-between-faults", "1e-9", *JOB], "is 1e-09; give at least 0.05 seconds"),
        (["--mean-time-between-faults", "1e9", *JOB], "is 1e+09; give at most 1000000 seconds"),
        ([*OFTEN, "--faults", "", *JOB], "--faults: '' is not a fault; give some of"),
        ([*OFTEN, "--json", "/", *JOB], "--json /: this is a folder; give the name of a file"),
        (["--mean-time-between-faults", "nan", *JOB], "--mean-time-between-faults is nan; give"),
        ([*OFTEN, "--duration", "-1", *JOB], "--duration is -1; give"),
        ([*OFTEN, "--seed", "-1", *JOB], "--seed is -1; give 0 or more"),
        (OFTEN, "give the job after --, started with elasticrun"),
        ([*OFTEN, "--", "python", "train.py"], "give the job after --, started with elasticrun"),
        ([*OFTEN, "--", "elasticrun", "-np", "2", "true"], "not elastic"),
        ([*OFTEN, "--", "elasticrun", "-np", "x", "true"], "'x' must be a whole number"),
        ([*OFTEN, "--", "elasticrun", "--min-np", "1"], "there is no program to run"),
        ([*OFTEN, "--json", "/nowhere/x.json", *JOB], "--json /nowhere/x.json: there is no folder"),
        (
            ["--plan", "/nowhere/plan.toml", *JOB],
            "cannot read the plan /nowhere/plan.toml: No such",
        ),
    ],
)
def test_a_mistake_in_the_words_of_run(words, told, capsys):
    assert told in refused(capsys, "run", *words)


@pytest.mark.parametrize(
    ("plan", "words", "told"),
    [
        ('[[fault]]\nat_s = 1\nkind = "crash"\n', [], "plan.toml, line 3: 'crash' is not a kind"),
        (
            '[[fault]]\nafter_commits = 1\nkind = "kill"\n',
            ["--no-digests"],
            "after_commits needs digests",
        ),
        (
            '[[fault]]\nat_s = 1\nkind = "slow"\nfactor = 10\n',
            [],
            "counts as frozen where the lease is 2 s: give a factor of at most 5.6",
        ),
        (
            "[random]\nmean_time_between_faults_s = 1\nseed = 1\n",
            ["--seed", "2"],
            "keep one of them",
        ),
        ("[random]\nmean_time_between_faults_s = 1\n", OFTEN, "put it into the plan"),
        ("[random]\nmean_time_between_faults_s = 1\n", ["--seed", "-1"], "--seed is -1; give 0"),
        ('[[fault]]\nat_s = 1\nkind = "kill"\n', ["--seed", "1"], "draws nothing at random; leave"),
    ],
)
def test_a_mistake_in_the_plan_of_run(plan, words, told, capsys, tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(plan)
    assert told in refused(capsys, "run", "--plan", str(file), *words, *JOB)


def test_a_partition_without_root_is_refused_before_the_start(capsys, monkeypatch):
    monkeypatch.setattr("elastic.chaos.inject.network.os.geteuid", lambda: 1000)
    said = refused(capsys, "run", *OFTEN, "--faults", "kill,partition", *JOB)
    assert "a partition needs root" in said


def test_a_dry_run_says_what_would_be_done(capsys, tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        '[random]\nmean_time_between_faults_s = 5\nseed = 1\n[[fault]]\nat_s = 1\nkind = "leave"\n'
    )
    assert main(["run", "--plan", str(file), "--dry-run", *JOB]) == 0
    said = capsys.readouterr().out
    assert "would run: elasticrun --journal /" in said
    assert "1.0 s after training began: leave random" in said
    assert "drawn with seed 1:" in said
    assert main(["run", "--plan", str(file), "--dry-run", *JOB]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == said.splitlines()[1:]


def test_a_journal_of_the_users_own_is_used(capsys, tmp_path):
    own = str(tmp_path / "own.jsonl")
    job = ["--", "elasticrun", "-np", "2", "--min-np", "1", "--journal", own, sys.executable]
    assert main(["run", *OFTEN, "--dry-run", *job]) == 0
    assert f"would run: elasticrun -np 2 --min-np 1 --journal {own}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--minutes", "0"], "--minutes is 0; give more than 0"),
        (["--fault-every", "-2"], "--fault-every is -2"),
        (["--workers", "1"], "give at least 2, because one is spared"),
        (["--faults", "kill,crash"], "--faults: 'crash' is not a fault"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json: there is no folder /nowhere"),
    ],
)
def test_a_mistake_in_the_words_of_soak(words, told, capsys):
    assert told in refused(capsys, "soak", *words)


def test_check_refuses_what_is_no_journal(capsys, tmp_path):
    file = tmp_path / "journal.jsonl"
    assert "cannot read the journal" in refused(capsys, "check", str(file))
    file.write_text("{}\n")
    assert "is not a journal" in refused(capsys, "check", str(file))

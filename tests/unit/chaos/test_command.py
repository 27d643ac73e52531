"""The command line: known errors are reported in one sentence, before anything is started."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from elastic.chaos.__main__ import COMMAND_LINE, main
from elastic.chaos.command_line import CommandLine
from harness.golden import recorded

JOB = ["--", "elasticrun", "-np", "2", "--min-np", "1", sys.executable, "-c", "pass"]
OFTEN = ["--mean-time-between-faults", "1"]


def refused(capsys, *words: str) -> str:
    """Return the sentence with which a command is refused."""
    assert main(list(words)) == 2
    said: str = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", start)


def test_overview_lists_all_commands(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMAND_LINE.commands)


def test_an_unknown_command_is_refused(capsys):
    recorded("output", refused(capsys, "rum"))


def test_unexpected_exception_of_a_command_is_raised(monkeypatch):
    broken = SimpleNamespace(add_arguments=lambda parser: None, main=lambda options: 1 / 0)
    monkeypatch.setitem(sys.modules, "broken_command", broken)
    program = CommandLine("program", "Raises.", {"broken": ("broken_command", "raises")})
    with pytest.raises(ZeroDivisionError):
        program.main(["broken"])


@pytest.mark.parametrize("name", ["run", "check"])
def test_each_command_has_a_help_text(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    recorded("output", capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        JOB,
        [*OFTEN, "--faults", "kill,crash", *JOB],
        ["--mean-time-between-faults", "0", *JOB],
        ["--mean-time-between-faults", "1e-9", *JOB],
        ["--mean-time-between-faults", "1e9", *JOB],
        [*OFTEN, "--faults", "", *JOB],
        [*OFTEN, "--json", "/", *JOB],
        ["--mean-time-between-faults", "nan", *JOB],
        [*OFTEN, "--duration", "-1", *JOB],
        [*OFTEN, "--seed", "-1", *JOB],
        OFTEN,
        [*OFTEN, "--", "python", "train.py"],
        [*OFTEN, "--", "elasticrun", "-np", "2", "true"],
        [*OFTEN, "--", "elasticrun", "-np", "x", "true"],
        [*OFTEN, "--", "elasticrun", "--min-np", "1"],
        [*OFTEN, "--json", "/nowhere/x.json", *JOB],
        ["--plan", "/nowhere/plan.toml", *JOB],
    ],
)
def test_wrong_arguments_of_run_are_refused(words, capsys):
    recorded("output", refused(capsys, "run", *words))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ('[[fault]]\nat_s = 1\nkind = "crash"\n', []),
        ('[[fault]]\nafter_commits = 1\nkind = "kill"\n', ["--no-digests"]),
        ('[[fault]]\nat_s = 1\nkind = "slow"\nfactor = 10\n', []),
        ("[random]\nmean_time_between_faults_s = 1\nseed = 1\n", ["--seed", "2"]),
        ("[random]\nmean_time_between_faults_s = 1\n", OFTEN),
        ("[random]\nmean_time_between_faults_s = 1\n", ["--seed", "-1"]),
        ('[[fault]]\nat_s = 1\nkind = "kill"\n', ["--seed", "1"]),
    ],
)
def test_invalid_plan_of_run_is_refused(plan, words, capsys, tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(plan)
    recorded("output", refused(capsys, "run", "--plan", str(file), *words, *JOB))


def test_a_partition_without_root_is_refused_before_the_start(capsys, monkeypatch):
    monkeypatch.setattr("elastic.chaos.inject.network_isolation.os.geteuid", lambda: 1000)
    said = refused(capsys, "run", *OFTEN, "--faults", "kill,partition", *JOB)
    recorded("log", said)


def test_dry_run_lists_the_planned_faults(capsys, tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        '[random]\nmean_time_between_faults_s = 5\nseed = 1\n[[fault]]\nat_s = 1\nkind = "leave"\n'
    )
    assert main(["run", "--plan", str(file), "--dry-run", *JOB]) == 0
    said = capsys.readouterr().out
    recorded("log", said)
    assert main(["run", "--plan", str(file), "--dry-run", *JOB]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == said.splitlines()[1:]


def test_a_journal_of_the_users_own_is_used(capsys, tmp_path):
    own = str(tmp_path / "own.jsonl")
    job = ["--", "elasticrun", "-np", "2", "--min-np", "1", "--journal", own, sys.executable]
    assert main(["run", *OFTEN, "--dry-run", *job]) == 0
    assert f"-np 2 --min-np 1 --journal {own}" in capsys.readouterr().out


def test_check_refuses_a_file_that_is_no_journal(capsys, tmp_path):
    file = tmp_path / "journal.jsonl"
    recorded("output", refused(capsys, "check", str(file)))
    file.write_text("{}\n")
    recorded("output", refused(capsys, "check", str(file)))

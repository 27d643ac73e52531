"""The command line of the stress tests: wrong arguments are refused before anything is started."""

from __future__ import annotations

import pytest

from harness.golden import recorded
from stress.__main__ import COMMAND_LINE, main


def test_overview_lists_all_commands(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMAND_LINE.commands)


@pytest.mark.parametrize("name", COMMAND_LINE.commands)
def test_each_command_has_a_help_text(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    if name == "soak":
        recorded("output", capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ["--minutes", "0"],
        ["--fault-every", "-2"],
        ["--workers", "1"],
        ["--faults", "kill,crash"],
        ["--json", "/nowhere/x.json"],
    ],
)
def test_wrong_arguments_of_soak_are_refused(words, capsys, monkeypatch):
    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", start)
    assert main(["soak", *words]) == 2
    recorded("output", capsys.readouterr().err.strip())

"""An agent as a process: what it does with its starter."""

from __future__ import annotations

import io
import sys
from unittest.mock import create_autospec

import msgspec

from elastic.driver.agents import agent_process
from elastic.driver.launch.starter import READY, Bootstrap


def test_one_that_outlives_its_starter_leaves_only_when_that_has_heard_that_it_is_ready(
    monkeypatch, capsys
):
    """Until then it is in the starter's hands, who kills it if the job ends meanwhile."""
    story: list[str] = []

    class Told(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            story.append("hears the end of its input")
            return super().read(size)

    bootstrap = Bootstrap("j", "here", "5e" * 32, ["127.0.0.1:1"], outlives=True)
    told = Told(msgspec.json.encode(bootstrap) + b"\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(told))
    leave = create_autospec(agent_process._leave, side_effect=lambda: story.append("leaves"))
    monkeypatch.setattr(agent_process, "_leave", leave)
    monkeypatch.setattr(
        agent_process, "serve", create_autospec(agent_process.serve, return_value=0)
    )
    assert agent_process.main() == 0
    assert capsys.readouterr().out.startswith(READY)
    assert story == ["hears the end of its input", "leaves"]

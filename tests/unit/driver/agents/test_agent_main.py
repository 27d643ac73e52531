"""Agent process and its starter."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Any, BinaryIO
from unittest.mock import create_autospec

import msgspec
import pytest

from elastic.driver.agents import agent_main
from elastic.driver.agents.host_agent import FIND_S
from elastic.driver.launch.starter import READY, Bootstrap


def story_of(patch: pytest.MonkeyPatch, wait: Callable[[BinaryIO], list[int]]) -> list[str]:
    """Run an agent that may outlive its starter: it waits for the end of its input. ``wait`` gets the other end."""
    story: list[str] = []
    read, write = os.pipe()
    starter = os.fdopen(write, "wb", buffering=0)

    def waits(reading: list[int], writing: list[int], odd: list[int], timeout_s: float) -> Any:
        assert (reading, writing, odd) == ([read], [], []) and 0 < timeout_s <= FIND_S
        story.append("waits")
        return wait(starter), [], []

    bootstrap = Bootstrap("j", "here", "5e" * 32, ["127.0.0.1:1"], outlives=True)
    starter.write(msgspec.json.encode(bootstrap) + b"\n")
    with starter, os.fdopen(read) as input:
        patch.setattr(sys, "stdin", input)
        patch.setattr(select, "select", waits)
        leave = create_autospec(agent_main._daemonize, side_effect=lambda: story.append("leaves"))
        patch.setattr(agent_main, "_daemonize", leave)
        serve = create_autospec(agent_main.serve, return_value=0)
        patch.setattr(agent_main, "serve", serve)
        assert agent_main.main() == (0 if "leaves" in story else 1)
        assert serve.called == ("leaves" in story)
    return story


def hangs_up(starter: BinaryIO) -> list[int]:
    starter.close()
    return [sys.stdin.fileno()]


def test_agent_that_outlives_its_starter_detaches_after_the_starter_has_received_its_readiness(
    monkeypatch, capsys
):
    """Until then it belongs to the starter, which kills it if the job ends meanwhile."""

    def hears(starter: BinaryIO) -> list[int]:
        assert capsys.readouterr().out.startswith(READY)
        return hangs_up(starter)

    assert story_of(monkeypatch, hears) == ["waits", "leaves"]


def test_agent_without_a_response_of_its_starter_detaches_after_a_time_limit(monkeypatch):
    monkeypatch.setattr(agent_main, "FIND_S", 0.0)
    assert story_of(monkeypatch, lambda starter: []) == ["leaves"]


@pytest.mark.parametrize("pair", [os.pipe, lambda: [s.detach() for s in socket.socketpair()]])
def test_agent_with_a_closed_output_does_not_detach(monkeypatch, pair):
    """Its starter was ended, for example the ssh connection of a job that ends when the agent becomes ready."""
    reader, writer = pair()
    monkeypatch.setattr(agent_main, "STDOUT", writer)

    def ends(starter: BinaryIO) -> list[int]:
        os.close(reader)
        return hangs_up(starter)

    assert story_of(monkeypatch, ends) == ["waits"]
    os.close(writer)

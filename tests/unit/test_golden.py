"""What recorded texts replace: facts of this run and this machine, and no other word or number."""

from __future__ import annotations

import getpass
import os
import socket

import pytest

from harness.golden import steady


def test_numbers_are_kept_when_pytest_or_its_parent_is_the_first_process(monkeypatch):
    text = "rank 1 of 12 left after 1 s: exit code 12"
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "getpid", lambda: 12)
    assert steady(text) == text


def test_number_of_this_process_is_replaced(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 4242)
    assert steady("4242, 14242").split() == ["PID,", "14242"]


@pytest.mark.parametrize("text", ["it needs root", "vm.max_map_count is low", "the host is lost"])
def test_words_equal_to_names_of_the_user_or_machine_are_kept(monkeypatch, text):
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    monkeypatch.setattr(socket, "gethostname", lambda: "vm" if "vm" in text else "host")
    assert steady(text) == text


def test_name_of_this_user_and_machine_is_replaced(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-1")
    assert steady("ann@gpu-1:0123abcd user ann").split() == ["USER@HOST:ID", "user", "USER"]


def test_day_and_machine_are_replaced():
    assert steady("2026-11-28, Linux 6.18.4-a, 2 cores: passed") == "DATE, MACHINE: passed"

"""Trains as training.py does, but a worker stops to come on at some place: STALL, rules as for WAIT, with ``how=``.

Ill: ``sleep``, ``lock`` (a deadlock), ``loop`` (in Python), ``gil`` (held in C, without doing anything). None ends. In
good health, until the file ``file=`` exists: ``work`` computes, ``evaluation`` computes nothing but is marked as a long
phase, ``write`` saves a checkpoint again and again, ``pause`` sleeps, ``slow`` takes a while, once or at each step.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

import training  # type: ignore[import-not-found]

import elastic

CHUNK = b"x" * 262_144
SLOW_S = 0.2


def sleeps(rule: dict[str, str]) -> None:
    time.sleep(3600)


def waits_for_a_lock_that_it_holds(rule: dict[str, str]) -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


def loops(rule: dict[str, str]) -> None:
    while True:
        pass


def holds_the_interpreter_in_c(rule: dict[str, str]) -> None:
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # not sleep(), which ends at a signal
        # Unlike CDLL, which lets other threads run.
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def works(rule: dict[str, str]) -> None:
    while not Path(rule["file"]).exists():
        sum(range(100_000))


def evaluates(rule: dict[str, str]) -> None:
    with elastic.long_phase("evaluation"):
        training.until_exists(rule["file"])


def writes(rule: dict[str, str]) -> None:
    while not Path(rule["file"]).exists():
        with open(f"checkpoint.{training.SLOT}", "wb") as file:
            for _ in range(8):
                file.write(CHUNK)
                time.sleep(0.05)


def pauses(rule: dict[str, str]) -> None:
    training.until_exists(rule["file"])


def is_slow(rule: dict[str, str]) -> None:
    time.sleep(SLOW_S)


HOW: dict[str, Callable[[dict[str, str]], None]] = {
    "sleep": sleeps,
    "lock": waits_for_a_lock_that_it_holds,
    "loop": loops,
    "gil": holds_the_interpreter_in_c,
    "work": works,
    "evaluation": evaluates,
    "write": writes,
    "pause": pauses,
    "slow": is_slow,
}
RULES = training.rules("STALL")
usual = training.at


def at(place: str, step: int) -> None:
    for rule in RULES:
        if training.meant(rule, place, step):
            Path(f"stalls.{training.SLOT}").touch()
            HOW[rule["how"]](rule)
    usual(place, step)


training.at = at

if __name__ == "__main__":
    training.main()

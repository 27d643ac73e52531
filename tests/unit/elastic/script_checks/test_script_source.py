"""Calls of commit() in a script, from its source."""

from __future__ import annotations

import ast

import pytest

from elastic.script_checks.mistakes import CommitCall
from elastic.script_checks.script_source import calls_in

EACH, SOME, RANKS = CommitCall.EACH_STEP, CommitCall.SOME_STEPS, CommitCall.SOME_RANKS


def in_loop(*lines: str) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return f"def train(state):\n    while state.step < 9:\n        optimizer.step()\n{body}\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print('commit')  # state.commit()", []),
        (in_loop("state.commit()"), [EACH]),
        (in_loop("if CASE != 'none': state.commit()"), [EACH]),
        (in_loop("if args.commit: state.commit()"), [EACH]),
        (in_loop("if state.step % 10 == 0: state.commit()"), [SOME]),
        (in_loop("done = state.step > 5", "if done: state.commit()"), [SOME]),
        (in_loop("if time.time() > 5: state.commit()"), [SOME]),
        (in_loop("if self.ready: state.commit()"), [SOME]),
        (in_loop("if hvd.rank() == 0: state.commit()"), [RANKS]),
        (in_loop("if hvd.rank() != 0:", "    pass", "else:", "    state.commit()"), [RANKS]),
        (
            in_loop("if rank == 0:", "    state.commit()", "else:", "    state.commit()"),
            [EACH, EACH],
        ),
        ("for e in es:\n    for b in bs:\n        optimizer.step()\n    state.commit()\n", [SOME]),
        (
            "for e in es:\n    for b in bs:\n        opt.step()\n    sched.step()\n    state.commit()\n",
            [SOME],
        ),
        ("for e in es:\n    epoch(e)\n    lr_scheduler.step()\n    state.commit()\n", [SOME]),
        (in_loop("for x in xs: x.backward()", "state.commit()"), [EACH]),
        (in_loop("if master_process: state.commit()"), [RANKS]),
        (in_loop("if self.is_main: state.commit()"), [RANKS]),
        ("def save(state):\n    state.commit()\n", [SOME]),
        ("callbacks = [hvd.elastic.CommitStateCallback(state, 5)]", [SOME]),
    ],
)
def test_calls_of_commit_are_found_with_when_they_are_made(source, expected):
    assert sorted(calls_in(ast.parse(source)), key=str) == sorted(expected, key=str)

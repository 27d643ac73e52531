"""Calls of commit() in a script, and loops around them, from its source."""

from __future__ import annotations

import ast
import re

import pytest

from elastic.script_checks.mistakes import CommitCall
from elastic.script_checks.script_source import calls_in, restarting_loop_in
from harness.sources import ROOT

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


def function(*lines: str) -> str:
    return "\n".join(["def train(state, loader):", *(f"    {line}" for line in lines)])


def restarting(source: str, name: str = "train") -> str:
    tree = ast.parse(source)
    [definition] = [
        each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == name
    ]
    return restarting_loop_in(definition, tree)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("for epoch in range(10)", ["state.commit()"]),
        ("for epoch in range(1, epochs + 1)", ["step(state)", "state.commit()"]),
        ("for state.epoch in range(args.epochs)", ["state.commit()"]),
        ("for epoch in tqdm(range(10))", ["state.commit()"]),
        ("for (number, epoch) in enumerate(range(10))", ["state.commit()"]),
        ("for epoch in range(10)", ["for x in loader:", "    opt.step()", "    state.commit()"]),
        ("for step in range(10)", ["if state.step % 5 == 0:", "    state.commit()"]),
    ],
)
def test_a_loop_that_counts_from_a_constant_restarts(head, body):
    assert restarting(function(f"{head}:", *(f"    {line}" for line in body))) == head


def test_a_local_counter_restarts():
    source = function("epoch = 0", "while epoch < 10:", "    epoch += 1", "    state.commit()")
    assert restarting(source) == "while epoch < 10"


def test_a_commit_in_a_function_that_receives_the_state_counts():
    epoch = "def one(state):\n    state.commit()\n\n\n"
    loop = function("for epoch in range(10):", "    one(state)")
    assert restarting(epoch + loop) == "for epoch in range(10)"
    assert restarting(loop) == ""


@pytest.mark.parametrize(
    "lines",
    [
        ["while state.epoch < 10:", "    state.epoch += 1", "    state.commit()"],
        ["for state.epoch in range(state.epoch, 10):", "    state.commit()"],
        ["for epoch in range(10 - state.epoch):", "    state.commit()"],
        ["first = state.epoch", "for epoch in range(first, 10):", "    state.commit()"],
        ["epoch = state.epoch", "while epoch < 10:", "    epoch += 1", "    state.commit()"],
        ["for epoch in range(first(), 10):", "    state.commit()"],
        ["for e in range(9):", "    if e < state.epoch: continue", "    state.commit()"],
        ["for e in range(9):", "    if e >= state.epoch: opt.step()", "    state.commit()"],
        ["for e in range(9):", "    while state.step < 9 * e:", "        state.commit()"],
        ["while state.step < 90:", "    for _ in range(9): opt.step()", "    state.commit()"],
        ["while state.step < 90:", "    for _ in range(9): state.commit()"],
        ["while order := receive():", "    for _ in range(order): state.commit()"],
        ["for x in loader:", "    state.commit()"],
        ["for _ in range(3): warm_up(state)", "while state.step < 9: state.commit()"],
        ["while True:", "    state.commit()"],
    ],
)
def test_a_loop_that_may_depend_on_the_state_is_right(lines):
    assert restarting(function(*lines)) == ""


def written() -> list[tuple[str, str]]:
    """Return the source of each example, benchmark and training script, and each Python snippet of the pages."""
    found = [
        (str(path), path.read_text())
        for folder in ("examples", "benchmarks", "tests/harness/scripts")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        found += [(str(page), block) for block in blocks]
    return found


def test_every_training_function_of_this_repository_counts_in_its_state():
    judged, restarts = 0, []
    for name, text in written():
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue  # a part of a function
        for each in ast.walk(tree):
            if isinstance(each, ast.FunctionDef) and any(
                ast.unparse(by).endswith("elastic.run") for by in each.decorator_list
            ):
                judged += 1
                if restarting_loop_in(each, tree):
                    restarts.append((name.rpartition("/")[2], each.name))
    assert judged > 40
    assert restarts == [("mistaken.py", "train_in_a_range")]

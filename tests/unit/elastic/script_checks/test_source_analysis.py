"""Calls of commit() in a script, and loops around them, from its source."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys

import pytest

from elastic.script_checks import source_analysis
from elastic.script_checks.commit_calls import calls_in
from elastic.script_checks.mistakes import CommitCall, RestartingLoop
from elastic.script_checks.restarting_loops import Definition, restarting_loop
from elastic.script_checks.source_analysis import committing
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
def test_calls_of_commit_are_found_with_their_frequency(source, expected):
    assert sorted(calls_in(ast.parse(source)), key=str) == sorted(expected, key=str)


def function(*lines: str) -> str:
    return "\n".join(["def train(state, loader):", *(f"    {line}" for line in lines)])


def defined(node: ast.FunctionDef, tree: ast.AST) -> Definition:
    """A function of this file, which calls others of the file by their names."""
    functions = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}

    def called(name: ast.expr) -> Definition | None:
        found = functions.get(name.id) if isinstance(name, ast.Name) else None
        return None if found is None else defined(found, tree)

    return Definition(node, called, committing(tree, node))


def restarting(source: str, name: str = "train") -> str:
    tree = ast.parse(source)
    [definition] = [
        each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == name
    ]
    found = restarting_loop(defined(definition, tree))
    return "" if found is None else found.head


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


def test_commit_in_a_function_that_receives_the_state_is_found():
    epoch = "def one(state):\n    state.commit()\n\n\n"
    loop = function("for epoch in range(10):", "    one(state)")
    assert restarting(epoch + loop) == "for epoch in range(10)"
    assert restarting(loop) == ""


FIT = """
def fit(state, epochs, first=0):
    for epoch in range(epochs):
        state.commit()


"""


@pytest.mark.parametrize(
    ("lines", "head"),
    [
        (["fit(state, 10)"], "for epoch in range(epochs)"),
        (["with timer():", "    fit(epochs=10, state=state)"], "for epoch in range(epochs)"),
        (["if args.train: fit(state, 10)"], "for epoch in range(epochs)"),
        (["result = fit(state, args.epochs)"], "for epoch in range(epochs)"),
        (["for phase in ('a', 'b'): fit(state, 10)"], "for phase in ('a', 'b')"),
        (
            ["while True:", "    try: fit(state, 10)", "    except OSError: continue", "    break"],
            "for epoch in range(epochs)",
        ),
        (
            ["while True:", "    for epoch in range(9): state.commit()", "    break"],
            "for epoch in range(9)",
        ),
        (
            [
                *("def one():", "    for epoch in range(9): state.commit()"),
                *("", "one_of(state)", "def one_of(own):"),
                *("    for epoch in range(8): own.commit()",),
            ],
            "for epoch in range(8)",
        ),
    ],
)
def test_a_loop_in_a_function_or_a_loop_that_the_state_does_not_control_restarts(lines, head):
    assert restarting(FIT + function(*lines)) == head


@pytest.mark.parametrize(
    "lines",
    [
        ["fit(state, 10 - state.epoch)"],
        ["if state.epoch == 0: fit(state, 10)"],
        ["while state.epoch < 3:", "    fit(state, 10)", "    state.epoch += 1"],
        ["for x in loader: fit(state, 10)"],
        ["while True:", "    if state.done: break", "    fit(state, 10)"],
        ["while True: fit(state, 10)"],
        ["fit(*parts)"],
        ["fit(other, 10)"],
        ["def one(): fit(state, 10)"],
        ["def one():", "    for e in range(9): state.commit()", "", "while state.e < 9: one()"],
        ["for e in range(9):", "    if e < trainer.first: continue", "    state.commit()"],
        ["for x in (1,): state.commit()"],
        ["for x in [a, b]: state.commit()"],
    ],
)
def test_function_that_may_depend_on_the_state_is_not_reported(lines):
    assert restarting(FIT + function(*lines)) == ""


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
def test_loop_that_may_depend_on_the_state_is_not_reported(lines):
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


def test_restarting_loop_is_found_in_no_training_function_but_the_mistaken_one():
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
                if restarting_loop(defined(each, tree)):
                    restarts.append((name.rpartition("/")[2], each.name))
    assert judged > 40
    assert restarts == [("mistaken.py", "train_in_a_range")]


# ---- the source of running code --------------------------------------------------------------------------------------

LOOPS = """
def fit(state, epochs):
    for epoch in range(epochs):
        state.commit()
"""
SCRIPT = """
import loops
from loops import fit


def direct(state):
    fit(state, 10)


def by_module(state):
    loops.fit(state, 10)


def by_argument(state, fit=print):
    fit(state, 10)


def right(state):
    while state.epoch < 10:
        optimizer.step()
        state.commit()


def without(state):
    pass
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script and its module, as they run."""
    for name, text in (("loops", LOOPS), ("script", SCRIPT)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("loops", "script"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("script")
    for name in ("loops", "script"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["direct", "by_module"])
def test_a_loop_in_another_module_restarts(script, name):
    found = source_analysis.restarting_loop(getattr(script, name))
    assert found == RestartingLoop("for epoch in range(epochs)", "fit")


@pytest.mark.parametrize("name", ["by_argument", "right", "without"])
def test_uncalled_function_is_not_checked(script, name):
    assert source_analysis.restarting_loop(getattr(script, name)) is None


def test_a_script_that_is_edited_after_its_start_is_not_judged_by_its_new_source(script, tmp_path):
    """Even if the time and the size of the file are the same, as after an edit within its granularity."""
    file = tmp_path / "script.py"
    times = file.stat()
    assert source_analysis.commits(script.right) == [EACH]
    file.write_text(SCRIPT.replace("    fit(state, 10)", "    fit(state, 99)", 1))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size
    assert source_analysis.commits(script.right) == [EACH]
    assert source_analysis.restarting_loop(script.direct) is None
    file.write_text(SCRIPT.replace("while state.epoch < 10", "for e in range(10)"))
    assert source_analysis.commits(script.right) == [SOME]
    assert source_analysis.restarting_loop(script.right) is None


def test_function_without_a_commit_is_reported_only_if_modules_are_unedited(
    script, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        source_analysis, "script_files", lambda modules: [str(tmp_path / "loops.py")]
    )
    written_at = (tmp_path / "loops.py").stat().st_mtime
    for began_at, expected in ((written_at + 0.1, [SOME]), (written_at - 1.0, [SOME])):
        monkeypatch.setattr(source_analysis, "process_began_at", lambda at=began_at: at)
        assert source_analysis.commits(script.without) == expected
    (tmp_path / "loops.py").write_text("done = True\n")
    os.utime(tmp_path / "loops.py", (written_at, written_at))
    for began_at, expected in ((written_at + 0.1, []), (written_at - 1.0, [SOME])):
        monkeypatch.setattr(source_analysis, "process_began_at", lambda at=began_at: at)
        assert source_analysis.commits(script.without) == expected

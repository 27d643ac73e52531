"""Scripts for Keras and TensorFlow with one mistake each, in real jobs, and the examples without mistakes."""

from __future__ import annotations

import ast
import re

import pytest

from frameworks.test_scripts import ENV, PATIENCE_S, PATIENT, START_S, command, forked
from harness.history import SCRIPTS

ANCHOR = re.compile(r"elastic: warning: .*#([a-z0-9-]+)\)$", re.MULTILINE)
QUICK = ("fit, only metrics reduced",)

cases = {
    node.targets[0].id: ast.literal_eval(node.value)
    for node in ast.parse((SCRIPTS / "mistaken_keras.py").read_text()).body
    if isinstance(node, ast.Assign)
    and isinstance(node.targets[0], ast.Name)
    and node.targets[0].id == "WRONG"
}
WRONG: dict[str, set[str]] = cases["WRONG"]
RIGHT = [
    *("fit", "fit, commits once per epoch", "fit, accumulation", "fit, loss scale"),
    *("loop", "loop, DistributedOptimizer", "loop, list of variables", "loop, shard in training"),
    *("loop, shard anew in a reset callback", "loop, traced before", "loop, embedding"),
    *("loop, two models", "eager", "eager, list of variables", "fit, plain SGD"),
]
CASES = [(case, kinds) for case, kinds in WRONG.items()] + [(case, set()) for case in RIGHT]


@forked
@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        pytest.param(case, kinds, marks=[] if case in QUICK else [pytest.mark.nightly, PATIENT])
        for case, kinds in CASES
    ],
)
def test_each_mistake_is_reported_in_the_first_steps_without_false_reports(job, case, kinds):
    script = ["python", SCRIPTS / "mistaken_keras.py"]
    training = job("-np 2 --min-np 1", script, env={**ENV, "CASE": case})
    training.succeed(START_S if case in QUICK else PATIENCE_S)
    assert sorted(ANCHOR.findall(training.output)) == sorted(kinds)


@pytest.mark.nightly
@PATIENT
@pytest.mark.parametrize("environment", ["torch", "jax", "legacy"])
@pytest.mark.parametrize(
    "case",
    ["fit", "fit, plain optimizer", "fit, only metrics reduced", "fit, nothing in the state"],
)
def test_script_checks_of_keras_fit_report_expected_mistakes_on_each_backend(
    job, environment, case
):
    env = {**ENV, "CASE": case}
    env |= {"TF_USE_LEGACY_KERAS": "1"} if environment == "legacy" else {}
    env |= {} if environment == "legacy" else {"KERAS_BACKEND": environment}
    training = job("-np 2 --min-np 1", ["python", SCRIPTS / "mistaken_keras.py"], env=env)
    training.succeed(PATIENCE_S)
    assert sorted(ANCHOR.findall(training.output)) == sorted(WRONG.get(case, set()))


@pytest.mark.nightly
@PATIENT
def test_a_script_that_never_mentions_commits_is_reported(job):
    training = job("-np 2 --min-np 1", ["python", SCRIPTS / "uncommitted_keras.py"], env=ENV)
    training.succeed(PATIENCE_S)
    assert ANCHOR.findall(training.output) == ["no-commit"]


@pytest.mark.nightly
@PATIENT
@pytest.mark.parametrize("example", ["keras_elastic.py", "tensorflow2_elastic.py"])
def test_strict_check_finds_no_mistake_in_the_examples(job, example):
    training = job("-np 2 --min-np 1 --strict", command(example), env=ENV)
    training.succeed(PATIENCE_S)
    assert not ANCHOR.findall(training.output)

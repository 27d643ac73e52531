"""Scripts with one mistake each, in real jobs: which kinds are reported in the first steps, and what --strict does."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from elastic.driver.reasons import ReasonKind
from harness.history import SCRIPTS

EXAMPLES = Path(__file__).parents[3] / "examples"
ANCHOR = re.compile(r"elastic: warning: .*#([a-z0-9-]+)\)$", re.MULTILINE)
QUICK = ("no commit", "plain optimizer, loss reduced", "everything", "evaluation loader")

with mock.patch.dict(os.environ, CASE="plain"):
    source = (SCRIPTS / "mistaken.py").read_text().partition("class Rows")[0]
    cases: dict[str, object] = {}
    exec(source, cases)
WRONG: dict[str, set[str]] = cases["WRONG"]  # type: ignore[assignment]
RIGHT: list[str] = cases["RIGHT"]  # type: ignore[assignment]
CASES = [(case, kinds) for case, kinds in WRONG.items()] + [(case, set()) for case in RIGHT]


@pytest.mark.forked
@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        pytest.param(case, kinds, marks=[] if case in QUICK else pytest.mark.nightly)
        for case, kinds in CASES
    ],
)
def test_each_mistake_is_reported_in_the_first_steps_without_false_reports(job, case, kinds):
    training = job("-np 2 --min-np 1", ["python", SCRIPTS / "mistaken.py"], env={"CASE": case})
    training.succeed(90)
    assert sorted(ANCHOR.findall(training.output)) == sorted(kinds)
    told = [each["kind"] for each in training.events("WorkerFoundMistake")]
    assert sorted(told) == sorted(kinds)


@pytest.mark.forked
def test_a_script_that_never_mentions_commits_is_reported(job):
    training = job("-np 2 --min-np 1", ["python", SCRIPTS / "uncommitted.py"])
    training.succeed(90)
    assert ANCHOR.findall(training.output) == ["no-commit"]


@pytest.mark.forked
def test_strict_ends_the_job_with_exit_code_2_at_the_first_mistake(job):
    command = ["python", SCRIPTS / "mistaken.py"]
    training = job("-np 2 --min-np 1 --strict", command, env={"CASE": "nothing"})
    assert training.wait(60) == 2
    [ended] = training.actions("EndJob")
    assert ended["code"] == 2 and ended["reason"]["kind"] == ReasonKind.SCRIPT_REFUSED.value


@pytest.mark.forked
def test_disabled_checks_report_no_mistake(job):
    command = ["python", SCRIPTS / "mistaken.py"]
    off = {"CASE": "nothing", "ELASTIC_CHECKS": "off"}
    training = job("-np 2 --min-np 1 --strict", command, env=off)
    training.succeed(60)
    assert not ANCHOR.findall(training.output)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "example",
    [
        *("minimal.py", "ddp_elastic.py", "digits.py", "timm_elastic.py", "exact.py"),
        *("fsdp_elastic.py", "zero_elastic.py"),
        *("gpt.py --steps 30", "fabric_elastic.py", "lightning_elastic.py"),
        *("accelerate_elastic.py", "transformers_elastic.py", "horovod/horovod_elastic.py"),
    ],
)
def test_strict_check_finds_no_mistake_in_the_examples(job, example):
    training = job("-np 2 --min-np 1 --strict", [sys.executable, *f"{EXAMPLES}/{example}".split()])
    training.succeed(240)
    assert not ANCHOR.findall(training.output)

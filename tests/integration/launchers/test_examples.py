"""The examples behave as their first lines promise, in small."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from harness import wording
from harness.program import stdout_of

EXAMPLES = Path(__file__).parents[3] / "examples"
SVG = "http://www.w3.org/2000/svg"  # the name of a namespace


def run(*words: str | Path, cwd: Path) -> str:
    return stdout_of(sys.executable, *words, cwd=cwd)


@pytest.mark.nightly
def test_minimal_example_run_directly_is_a_world_of_one(tmp_path):
    printed = run(EXAMPLES / "minimal.py", cwd=tmp_path)
    assert "workers 1" in printed
    assert "y = 3.00 x + 1.00" in printed


@pytest.mark.nightly
@pytest.mark.forked
def test_minimal_example_survives_the_loss_of_rank_0(job):
    fitting = job("-np 3 --min-np 2", ["python", EXAMPLES / "minimal.py"])
    fitting.wait_for("step 40 .*workers 3")
    fitting.kill(rank=0)
    fitting.wait_for(
        wording.RECOVERED
    )  # rank 0 may be back before the others print their next line
    fitting.wait_for("y = 3.00 x [+] 1.00")
    fitting.succeed()


@pytest.mark.nightly  # jobs/test_exact.py compares every bit of every commit
@pytest.mark.forked
def test_exact_example_has_the_same_weights_when_a_worker_is_killed(job, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("EPOCHS", "4")
    monkeypatch.setenv("PAUSE", "0")
    undisturbed = run(EXAMPLES / "exact.py", cwd=tmp_path).splitlines()[-1]
    assert undisturbed.startswith("after 32 steps the weights are")
    training = job(
        "-np 3 --min-np 1 --blacklist-cooldown-range 0.1 1",
        ["python", EXAMPLES / "exact.py"],
        env={"PAUSE": "0.05"},
    )
    training.wait_for("epoch 1 .*workers 3")
    training.kill(rank=0)
    training.wait_for("epoch 2")
    training.succeed()
    training.wait_for(undisturbed)


@pytest.mark.nightly
@pytest.mark.forked
def test_digits_example_reaches_its_accuracy_when_a_worker_is_killed(job):
    learning = job(
        "-np 3 --min-np 1 --blacklist-cooldown-range 0.5 2",
        ["python", EXAMPLES / "digits.py", "--epochs", "20"],
    )
    learning.wait_for("epoch  3/20", timeout=60)
    learning.kill(rank=1)
    learning.succeed(timeout=100)
    learning.wait_for(r"test accuracy (9[7-9]|100)\.\d% \(wanted: 97%\)")


@pytest.mark.slow
@pytest.mark.forked
def test_gpt_example_writes_metrics_and_a_report(job):
    small = "--steps 30 --layers 1 --width 32 --context 32 --corpus-bytes 200000 --log-every 5"
    training = job(
        "-np 2 --min-np 1 --report out.html",
        ["python", EXAMPLES / "gpt.py", "--out", "out", *small.split()],
    )
    training.wait_for("step   10/30", timeout=60)
    training.kill(rank=0)
    training.succeed(timeout=100)
    out = training.folder / "out"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    assert sorted(set(steps)) == list(range(1, 31))
    assert all(after >= before for before, after in itertools.pairwise(steps)), steps
    assert lines[-1]["validation_loss"] < 5.5
    page = (training.folder / "out.html").read_text()
    assert wording.JOB_ENDED_WELL in page
    assert wording.KILLED_SIGKILL in page
    for reported in ("loss", "tokens_per_s", "validation_loss", "sample"):
        assert f">{reported}</" in page, "numbers in tiles, texts as they are"
    assert page.count(">steps</") == 1
    assert "://" not in page.replace(SVG, ""), "nothing is loaded from elsewhere"

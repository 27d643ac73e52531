"""The scripts in examples/horovod run unchanged under horovodrun; those that can recover also lose a worker."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "examples" / "horovod"


def command(script: str, flags: str = "") -> list[str | Path]:
    return ["python", SCRIPTS / script, *flags.split()]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_the_scripts_do_not_mention_elastic(script):
    """Horovod is the only thing that it imports from here."""
    tree = ast.parse(script.read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    modules = {
        str(node.module).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    assert imported & {"horovod.torch", "horovod.tensorflow", "horovod.keras", "horovod.mxnet"}
    assert not {"elastic", "horovod"} & modules
    assert not any(name.partition(".")[0] == "elastic" for name in imported)


@pytest.mark.forked
def test_mnist_example_reaches_its_accuracy(job):
    running = job("-np 2", command("horovod_mnist.py", "--epochs 4 --fp16-allreduce"))
    running.succeed()
    reached = [
        float(match[1])
        for line in running.lines
        if (match := re.search(r"Test set: Average loss: [\d.]+, Accuracy: ([\d.]+)%", line))
    ]
    assert len(reached) == 4
    assert reached[-1] > 70


@pytest.mark.forked
def test_imagenet_resumes_from_its_last_checkpoint(job, tmp_path):
    """Its learning rate warms up; the second job finds the files of the first one's rank 0."""
    flags = (
        "--images 256 --batches-per-allreduce 2 --fp16-allreduce --warmup-epochs 1"
        f" --checkpoint-format {tmp_path}/checkpoint-{{epoch}}.pt"
    )
    first = job("-np 2", command("horovod_imagenet.py", f"{flags} --epochs 1"))
    first.succeed()
    first.wait_for(r"starting with epoch #1")
    first.wait_for(r"Train Epoch #1: .* lr 0.05000")
    first.wait_for(r"Validate Epoch #1: loss \d")
    second = job("-np 2", command("horovod_imagenet.py", f"{flags} --epochs 2"))
    second.succeed()
    second.wait_for("starting with epoch #2")
    second.wait_for("Validate Epoch #2")
    assert "Epoch #1:" not in second.output
    assert [path.name for path in sorted(tmp_path.glob("*.pt"))] == [
        "checkpoint-1.pt",
        "checkpoint-2.pt",
    ]


@pytest.mark.nightly
@pytest.mark.forked
def test_synthetic_benchmark_reports_per_worker_and_total_rates(job):
    flags = "--batch-size 4 --width 8 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3"
    running = job("-np 2", command("horovod_synthetic_benchmark.py", flags))
    running.succeed()
    running.wait_for(r"Iter #2: \d+\.\d img/sec per CPU")
    each = running.wait_for(r"Img/sec per CPU: (\d+\.\d) \+-\d+\.\d")
    total = running.wait_for(r"Total img/sec on 2 CPU\(s\): (\d+\.\d) \+-\d+\.\d")
    assert float(total[1]) == pytest.approx(2 * float(each[1]), abs=0.2)


@pytest.mark.slow
@pytest.mark.forked
def test_elastic_training_continues_when_workers_are_killed(job):
    """First rank 0, then another one; the learning rate follows the size of the world."""
    running = job(
        "-np 3 --min-np 1 --blacklist-cooldown-range 0.5 1",
        command("horovod_elastic.py", "--epochs 5 --log-interval 20"),
    )
    running.wait_for("epoch 1 batch 0 size 3", timeout=60)
    running.kill(rank=0)
    running.wait_for_world(3, timeout=60)
    running.wait_for("epoch 3 batch [0-9]+ ", timeout=60)
    running.kill(rank=1)
    running.succeed(timeout=100)
    done = running.wait_for(r"done: epochs 5, size (\d), lr ([\d.]+), accuracy (0\.[89]\d*|1\.0+)")
    assert float(done[2]) == pytest.approx(0.005 * int(done[1]))
    assert len(running.worlds()) >= 3


@pytest.mark.forked
def test_process_sets_script_trains_two_sets_with_alltoall(job):
    running = job("-np 3", command("horovod_process_sets.py", "--steps 41"))
    running.succeed()
    for number in (1, 2):
        first = running.wait_for(rf"set {number} step 0 loss ([\d.]+)")
        last = running.wait_for(rf"set {number} step 40 loss ([\d.]+)")
        assert float(last[1]) < float(first[1])
    running.wait_for(r"rank and set: \[\[0, 1\], \[1, 2\], \[2, 1\]\]")

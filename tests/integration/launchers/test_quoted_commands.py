"""The shell commands that README and the pages quote: each is run here unchanged, or has a reason not to be.

They find what a reader has by then: the script of README or of the page, the list of hosts, a job that trains.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import wording
from harness.job import Job, elasticrun
from harness.processes import clean_environment
from harness.sources import ROOT

PAGES = [
    "README.md",
    *(
        str(page.relative_to(ROOT))
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.parent.name not in ("reference", "decisions")
        and page.name not in ("faults.md", "hosts.md", "soak.md")  # which commands write
    ),
]
PROGRAMS = "elasticrun|horovodrun|python3?|make|pip|torchrun|srun|kubectl|helm|ssh"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) \S")
LONG_S = 240.0  # on a busy machine TensorFlow alone takes a minute to import

# Run as they are written. Ports may be taken by others: 8080 becomes a free one.
RUN = {
    "README.md": {
        "elasticrun -np 4 --min-np 2 --journal job.journal python train.py",
        "elasticrun -np 4 --min-np 2 python train.py",
        "elasticrun -np 4 train.py",
        "elasticrun --min-np 2 --host-discovery-script ./hosts.sh python train.py",
        "python -m elastic.chaos run --mean-time-between-faults 20 -- elasticrun -np 4 --min-np 1 python train.py",
    },
    "docs/index.md": {"elasticrun -np 4 --min-np 2 --report report.html python train.py"},
    "docs/install.md": {
        "elasticrun --check-build",
        "elasticrun --help",
        "elasticrun --help-all",
        "elasticrun docs",
        "elasticrun doctor",
        "elasticrun docs many-hosts",
    },
    "docs/migration.md": {
        "horovodrun -np 4 python train.py",
        "horovodrun -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python train.py",
    },
    "docs/coming-from/horovod.md": {
        "horovodrun -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python train.py"
    },
    "docs/coming-from/torchrun.md": {"elasticrun -np 4 python train.py"},
    "docs/pytorch.md": {
        "elasticrun --standalone --nproc-per-node 4 train_ddp.py --lr 0.1",
        "elasticrun -np 4 --min-np 2 train_ddp.py",
    },
    "docs/reports.md": {"elasticrun -np 4 --min-np 2 --tensorboard runs/gpt python train.py"},
    "docs/networks.md": {"elasticrun -np 4 --network-interface ::1 python train.py"},
    "docs/many-hosts.md": {"elasticrun secret job.secret"},
    "docs/dashboard.md": {"elasticrun -np 4 --min-np 2 --dashboard :8080 python train.py"},
}
# Run on one job that trains, in this order: what stands in brackets is left out, capitals are filled in.
STEERED = (
    "elasticrun jobs",
    "elasticrun status [JOB]",
    "elasticrun scale [JOB] 8",
    "elasticrun drain [JOB] HOST",
    "elasticrun remove [JOB] WORKER",
    "elasticrun stacks [JOB] [RANK]",
    "elasticrun logs [JOB] [RANK]",
    "elasticrun stop [JOB]",
)
# Run on the journal that it leaves.
AFTERWARDS = (
    "elasticrun explain job.journal",
    "elasticrun explain --html report.html job.journal",
    "elasticrun explain --json job.journal",
    "elasticrun replay --svg film.svg --length 30 job.journal",
)
PLAYED = "elasticrun replay --speed 20 job.journal"  # until Ctrl-C
RUN["docs/commands.md"] = set(STEERED)
RUN["docs/explain.md"] = {*AFTERWARDS, PLAYED}
RUN_SOMEWHERE = set().union(*RUN.values())

# Not run here, and why. The longest beginning that fits counts.
NOT_RUN = {
    "make ": "installs, or runs the tests itself, for minutes; CONTRIBUTING.md says what each target takes",
    "pip ": "test_wheel.py installs the package into an empty environment",
    "python benchmarks/": "measures for minutes: each stands beside its figures, with date and machine",
    "python -m tests.gpu": "needs a GPU",
    "python -m tests.stress": "minutes to hours: tests/integration has parts of it",
    "python -m elastic.chaos simulate": "takes minutes: tests/simulation runs seeds of it",
    "python -m tests.stress fuzz": "30 s of the fuzzer are tests of their own",
    "python -m elastic.chaos run --mean-time-between-faults 22 ": "how a film was made, in half an hour",
    "elasticrun replay --svg docs/film.svg": "the same",
    "elasticrun -np 8 --min-np 4 -H gpu1:4,gpu2:4": "needs two machines: tests/integration/hosts has its like",
    "elasticrun -np 8 --min-np 4 --etcd etcd1": "needs an etcd of that name: tests/integration/etcd has its like",
    "elasticrun ... ": "a part of a command",
    "elasticrun --journal FILE": "a part of a command",
    "elasticrun --report out/report.html ...": "a part of a command",
    "elasticrun -np 4 --min-np 2 --max-np 8 ...": "a part of a command",
    "elasticrun explain": "a name, or with a file of the reader's",
    "elasticrun replay": "a name",
    "elasticrun status": "a name; commands.md has it as it is run",
    "elasticrun logs": "the same",
    "elasticrun stacks --all-threads": "the same; test_steering.py runs it",
    "elasticrun (the driver)": "a picture",
    "elasticrun --slurm": "needs Slurm: tests/integration/launchers/test_slurm_nodes.py has its like",
    "srun ": "needs Slurm: tests/integration/launchers has its like",
    "torchrun ": "another program, before",
    "kubectl ": "another program",
    "ssh ": "another program",
    "helm ": "needs a cluster: tests/charts and tests/cluster have its like",
    "elasticrun k8s": "needs a cluster: tests/cluster has its like",
    "elasticrun --kubernetes": "a part of a command",
    "python -m cluster.measure": "measures for minutes, in a cluster",
    "python -m elastic.chaos": "minutes of chaos: tests/integration/jobs and tests/simulation have parts of it",
    "ELASTIC_NATIVE=0 python -m elastic.chaos run": "the same",
    "OMP_NUM_THREADS=1 python -m elastic.chaos exact": "the same",
    "OMP_NUM_THREADS=1 elasticrun -np 3 --min-np 1 python examples/exact.py": "test_examples.py runs it",
    "EXACT_SEEDS=": "a test itself, for an hour",
    "elasticrun --digests": "a part of a command",
    "elasticrun --verbose": "a part of a command",
    "elasticrun --tls-cert": "a part of a command: test_hostile.py has its like",
    "elasticrun doctor -H": "needs hosts of these names: test_ssh.py has its like",
    "elasticrun secret FILE": "many-hosts.md has it as it is run",
    "elasticrun agent": "needs an etcd of that name: tests/integration/etcd has its like",
    "elasticrun -np 8 --min-np 4 --job bert --etcd": "the same",
    "elasticrun --job bert --etcd": "the same",
    "elasticrun -np 8 -H gpu1:4,gpu2:4": "needs two machines: tests/integration/hosts has its like",
    "elasticrun -np 4 --min-np 1 --checkpoint-dir /shared/": "needs that folder: test_checkpoints.py has its like",
    "elasticrun -np 8 --min-np 2 --checkpoint-dir s3:": "needs a bucket: test_checkpoints_s3.py has its like",
    "elasticrun checkpoints DIR": "a name, with a folder of the reader's",
    "elasticrun checkpoints export": "the same: test_sharded_checkpoints.py has its like",
    "elasticrun -np 4 --min-np 1 python train.py": "with a trainer's script: test_trainers.py has its like",
    "elasticrun -np 2": "the same",
    "elasticrun -np 3 --min-np 1 python examples/lightning_elastic.py": "test_trainers.py has its like",
    "elasticrun -np 4 --min-np 2 examples/fsdp_elastic.py": "test_sharded.py has its like",
    "elasticrun -np 3 --min-np 1 examples/diloco_elastic.py": "test_diloco.py has its like",
    "elasticrun -np 4 --min-np 1 -H eu-1:2": "needs those hosts: test_diloco.py has its like",
    "elasticrun -np 8 --min-np 1 -H eu-1:2": "the same",
    "elasticrun --from": "a flag alone: test_resume.py has its like",
    "elasticrun -np 4 --min-np 2 examples/jax_elastic.py": "test_jax_api.py runs it",
    "elasticrun -np 4 --min-np 2 --checkpoint-dir /shared/gpt": "needs that folder: the same",
    "elasticrun -np 4 --min-np 2 examples/zero_elastic.py": "test_sharded.py has its like",
    "python examples/ray_": "needs a cluster of Ray: tests/integration/ray has its like",
    "python examples/spark_": "needs Java: tests/integration/spark has its like",
    "MODELS=sharded,zero make faults": "needs torch's CUDA build: tests/fakecuda runs some",
    "SEED=46 MODELS=sharded,zero make faults FAULTS=256": "needs torch's CUDA build",
    "python tests/harness/fake_cuda/start.py": "needs torch's CUDA build: tests/fakecuda runs it",
    "python 3.": "a line that a program has written",
    "python [-u]": "a part of a command",
    "elasticrun --strict": "test_script_checks.py runs it",
    "horovodrun -np 4 --timeline-filename": "writes to /tmp: test_timeline.py has its like",
    "OTEL_EXPORTER_OTLP_ENDPOINT=": "needs a collector: test_recovery_traces.py has its like",
    "elasticrun (driver process)": "a picture",
    "elasticrun scale": "a name; commands.md has it as it is run",
    "elasticrun drain": "the same",
    "elasticrun stop": "the same",
    "python -m horovod.tensorflow.data.compute_worker": "two jobs: tests/frameworks/test_scripts.py has its like",
    "horovodrun -np 4 python -m horovod.tensorflow.data": "the same",
    "horovodrun -np 2 python train.py": "the same",
}


def quoted(page: str) -> Iterator[str]:
    """Commands in blocks of shell, without comments, and in the text between backticks."""
    block: str | None = None
    going_on = ""
    for line in (ROOT / page).read_text().splitlines():
        fence = re.match(r"\s*```(\w*)", line)
        if fence is not None:
            block = fence[1] if block is None else None
            continue
        code = block in ("", "sh", "bash", "console") if block is not None else line[:4] == "    "
        if code:
            text = going_on + line.partition("  #")[0].partition(" # ")[0].strip()
            going_on = text[:-1] if text.endswith("\\") else ""
            if not going_on and COMMAND.match(text):
                yield text
        elif block is None:
            yield from filter(COMMAND.match, re.findall(r"`([^`]+)`", line))


def reason(command: str) -> str:
    """Why it is not run; empty: no reason is known."""
    fitting = [begin for begin in NOT_RUN if command.startswith(begin)]
    return NOT_RUN[max(fitting, key=len)] if fitting else ""


@pytest.mark.parametrize("page", PAGES)
def test_each_quoted_command_is_run_or_has_a_reason(page: str) -> None:
    found = set(quoted(page))
    left = {command for command in found if command not in RUN_SOMEWHERE and not reason(command)}
    assert not left, f"{page}: run them here, or say why not: {left}"
    assert RUN.get(page, set()) <= found, f"{page} has no more: {RUN[page] - found}"


def test_each_reason_for_an_unexecuted_command_is_used() -> None:
    everywhere = {command for page in PAGES for command in quoted(page)}
    unused = {begin for begin in NOT_RUN if not any(c.startswith(begin) for c in everywhere)}
    assert not unused


# ---- run ---------------------------------------------------------------------------------------------------------


def script_of(page: str) -> str:
    """The first whole one on the page, or README's."""
    for name in (page, "README.md"):
        for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
            if "import torch" in block and "commit()" in block:
                return str(block)
    raise AssertionError("README has no script")


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A reader's folder."""
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:4\n")
    hosts.chmod(0o755)
    (tmp_path / "train_ddp.py").write_text((ROOT / "examples/ddp_static.py").read_text())
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return clean_environment() | {"PATH": path, "XDG_RUNTIME_DIR": str(folder)}


def ran(command: str, folder: Path) -> str:
    """Return its output."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "command"),
    [
        (page, command)
        for page in PAGES
        if page not in ("docs/commands.md", "docs/explain.md")
        for command in sorted(RUN.get(page, ()))
    ],
)
def test_a_quoted_command_runs_unchanged(page: str, command: str, reader: Path) -> None:
    (reader / "train.py").write_text(script_of(page))
    said = ran(command.replace(":8080", ":0"), reader)
    if command.endswith("train.py"):
        assert wording.TRAINING_ENDED in said or "exit code 0" in said or "worker" in said


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_quoted_commands_on_a_running_job_and_its_journal_run(reader: Path) -> None:
    script = script_of("README.md").replace("state.step < 1000", "True")
    (reader / "train.py").write_text(script)
    flags = "-H localhost:4,127.0.0.2:4 -np 4 --min-np 2 --max-np 4"
    training = Job(flags, "python train.py", folder=reader, env=environment(reader))
    try:
        training.wait_for_world(4, 60)
        training.until(lambda: len(training.worlds()) > 1, "a world of elastic.run", 60)
        for command in STEERED:
            words = re.sub(r" \[\w+\]", "", command)
            words = words.replace("HOST", "127.0.0.2").replace("WORKER", "1")
            assert ran(words, reader)
            if " 8" in command:
                training.wait_for_world(8, 60)
        training.wait(30)
    finally:
        left = training.end()
    assert not left
    (reader / "job.journal").write_bytes(training.journal.read_bytes())
    for command in AFTERWARDS:
        ran(command, reader)
    assert (reader / "report.html").exists() and (reader / "film.svg").exists()
    shown = subprocess.Popen(
        [elasticrun(), *PLAYED.split()[1:]],
        cwd=reader,
        env=environment(reader) | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shown.stdout is not None
    assert re.search(r"http://127\.0\.0\.1:\d+/#\w+", shown.stdout.readline())
    shown.send_signal(signal.SIGINT)
    assert shown.wait(30) == 0
    shown.stdout.close()

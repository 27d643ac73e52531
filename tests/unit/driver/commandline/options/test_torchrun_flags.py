"""torchrun's command lines: the equivalent flags of elasticrun, and errors for those without an equivalent."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.driver.commandline import cli
from elastic.driver.commandline.options.flags import Options, parse
from elastic.driver.commandline.options.torchrun_flags import REFUSED, translated
from elastic.driver.launch.worker_environment import job_environment
from elastic.driver.network.host_lists import ThisHost
from elastic.errors import Invalid
from elastic.protocol.messages import Place, Worker
from harness.golden import raises, recorded
from harness.refusals import refusal_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def ours(line: str, *, cores: int = 8, gpus: int = 0) -> Options:
    return translated(parse([*line.split(), "train.py"]), cores, gpus)


def refusal(line: str, **machine: int) -> str:
    return refusal_of(ours, line, **machine)


def command(line: str) -> list[str]:
    environ = {"PATH": "/usr/bin:/bin"}
    options = cli.read_options(line.split(), environ)
    return cli.make_job(options, environ, this_host=ThisHost(hostname="a")).command


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("--nproc-per-node 4", "-np 4 --slots-per-host 4"),
        ("--nproc_per_node=4 --standalone", "-np 4 --slots-per-host 4"),
        ("--nproc-per-node cpu", "-np 8 --slots-per-host 8"),
        ("--nproc-per-node auto --nnodes 1", "-np 8 --slots-per-host 8"),
        ("--nnodes 2 --nproc-per-node 4 -H a,b", "-np 8 --slots-per-host 4 -H a,b"),
        (
            "--nnodes 2:4 --nproc-per-node 4 -H a,b,c,d --max-restarts 3",
            "-np 8 --min-np 8 --max-np 16 --slots-per-host 4 -H a,b,c,d --reset-limit 3",
        ),
        (
            "--nnodes 2:4 --nproc-per-node 2 --rdzv-backend etcd --rdzv-endpoint e:2379 --rdzv-id bert",
            "-np 4 --min-np 4 --max-np 8 --slots-per-host 2 --etcd e:2379 --job bert",
        ),
        (
            "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint here:0",
            "-np 2 --slots-per-host 2",
        ),
        ("-np 3 --nproc-per-node 4", "-np 3 --slots-per-host 4"),
    ],
)
def test_torchrun_flags_have_equivalents(line: str, same: str):
    found, wanted = ours(line), parse([*same.split(), "train.py"])
    theirs = ["nproc_per_node", "nnodes", "standalone", "max_restarts"]
    theirs += ["rdzv_id", "rdzv_backend", "rdzv_endpoint"]
    assert found == replace(wanted, **{name: getattr(found, name) for name in theirs})


def test_nproc_per_node_gpu_auto_and_cpu_count_gpus_or_cores():
    assert ours("--nproc-per-node gpu", gpus=3).num_proc == 3
    assert ours("--nproc-per-node auto", gpus=3).num_proc == 3
    assert ours("--nproc-per-node cpu", gpus=3).num_proc == 8


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2 --nproc-per-node 4",
        "--nnodes 2 --standalone",
        "--nnodes 4:2",
        "--nproc-per-node gpu",
        "--nproc-per-node many",
        "--rdzv-backend etcd-v2",
        "--rdzv-backend zeus",
        "--nnodes 2 --rdzv-endpoint a:1 --host-discovery-script ./s",
        "--torch-backend gloo",
    ],
)
def test_flag_without_an_equivalent_is_rejected(line: str):
    recorded("messages", refusal(line))


@pytest.mark.parametrize("names", REFUSED)
def test_unsupported_flag_names_an_alternative(names: str):
    valued, instead = REFUSED[names]
    for name in names.split():
        error = refusal_of(parse, [name, *(["1"] if valued else []), "-np", "1", "train.py"])
        recorded("log", error, name, instead)


def test_program_is_a_script_a_module_or_an_executable():
    assert command("-np 1 train.py --lr 1") == [sys.executable, "train.py", "--lr", "1"]
    assert command("--nproc-per-node 1 -m this --lr 1") == [
        sys.executable,
        "-m",
        "this",
        "--lr",
        "1",
    ]
    assert command("-np 1 --no-python sleep 1") == ["sleep", "1"]
    assert command("-np 1 python3 train.py") == ["python3", "train.py"]
    with pytest.raises(Invalid, match="chmod"):
        command("-np 1 --no-python ./train.py")
    with pytest.raises(Invalid, match="combined"):
        command("-np 1 -m --no-python this")
    with raises(Invalid):
        command("-np 1 missing.py")


def test_workers_receive_torchruns_variables():
    environ = {"PATH": "/usr/bin:/bin"}
    options = cli.read_options(["-np", "2", "--rdzv-id", "bert", "train.py"], environ)
    job = cli.make_job(options, environ, this_host=ThisHost(hostname="a"))
    env = job.settings.env
    env |= job_environment(Worker("a", 1, 3), Place(1, 2, 1, 2, 0, 1), False, 1.0)
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(env["MASTER_PORT"]) < 1 << 16
    assert env["TORCHELASTIC_RUN_ID"] == "bert"
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert env["ELASTIC_TORCH_BACKEND"] == "elastic"


def test_given_address_is_kept():
    environ = {"PATH": "/usr/bin:/bin", "MASTER_PORT": "1234"}
    options = cli.read_options(["-np", "2", "--master-addr", "h", "train.py"], environ)
    env = cli.make_job(options, environ, this_host=ThisHost(hostname="a")).settings.env
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("h", "1234")

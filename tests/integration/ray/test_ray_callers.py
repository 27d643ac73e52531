"""`elastic.ray.run` from all of Ray's callers, the end of the caller, and Ray in workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic.driver.launch.starter import AGENT_MODULE
from elastic.driver.reasons import ReasonKind, because
from harness import wording
from harness.history import SCRIPTS
from harness.otlp_collector import otlp_collector
from harness.ports import free_port
from harness.program import output_of
from harness.ray_cluster import RayCluster, RayJob, ray_environment, ray_nodes

pytestmark = pytest.mark.ray

SCRIPT = SCRIPTS / "ray_callers.py"
EXAMPLES = Path(__file__).parents[3] / "examples"
LONG_S = 90.0  # for a whole job, on a busy machine
GONE_S = 30.0
CPUS = 8
Json = dict[str, Any]


@pytest.fixture(scope="module")
def client_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, client_port: int, request: pytest.FixtureRequest
) -> Iterator[RayCluster]:
    """A head and nothing else. Its dashboard is there at night: it takes submitted jobs."""
    head = {"num_cpus": CPUS, "ray_client_server_port": client_port}
    dashboard = bool(request.config.getoption("--nightly"))
    with ray_nodes(tmp_path_factory.mktemp("ray"), head=head, dashboard=dashboard) as running:
        yield running


@pytest.fixture
def call(cluster: RayCluster) -> Iterator[Callable[..., RayJob]]:
    """Runs a part of the script. In the end nothing is left of it in the cluster."""
    jobs = []

    def begin(*arguments: str, script: Path = SCRIPT, **settings: Any) -> RayJob:
        jobs.append(RayJob(cluster, script, *arguments, **settings))
        return jobs[-1]

    yield begin
    left = [process for job in jobs for process in job.end()]
    assert not left, f"these outlived their caller: {left}"
    nothing_is_left(cluster)


def nothing_is_left(cluster: RayCluster) -> None:
    cluster.until(lambda: not ours(cluster), f"{ours(cluster)} to be gone", GONE_S)
    cluster.until(lambda: cluster.available().get("CPU") == CPUS, "all CPUs to be free", GONE_S)


def ours(cluster: RayCluster) -> list[str]:
    """Return the remains of this library in the cluster: actors, placement groups, and processes of jobs."""
    actors = [
        f"{actor['class']} {actor['name']}"
        for actor in cluster.actors()
        if actor["class"] in ("DriverActor", "AgentActor")
    ]
    groups = [f"placement group {group['name']}" for group in cluster.placement_groups()]
    return actors + groups + [f"{pid}: {line}" for pid, line in programs(cluster)]


def programs(cluster: RayCluster, node: str | None = None) -> Iterator[tuple[int, str]]:
    """Agents and workers of jobs, on the head or another node."""
    for pid in cluster.processes(node or cluster.head):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(psutil.Process(pid).cmdline())
            if "elastic.launcher.run_function" in line or AGENT_MODULE in line:
                yield pid, line


def said(job: RayJob, kind: str) -> list[Any]:
    """Return the script's lines of that kind."""
    return [
        json.loads(line.removeprefix(kind)) for line in job.lines if line.startswith(f"{kind} ")
    ]


def met(values: list[Json], number: int, workers: int = 2) -> None:
    """Check that they trained together, and with no other worker."""
    assert [value["rank"] for value in values] == [*range(workers)]
    assert all(value["numbers"] == [number] * workers for value in values)
    assert len({value["pid"] for value in values}) == workers


@pytest.mark.nightly
def test_scripts_and_a_ray_client_run_jobs_concurrently(
    cluster: RayCluster, client_port: int, call: Callable[..., RayJob], tmp_path: Path
):
    (tmp_path / "beside.py").write_text("import os\npid = os.getpid\n")
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent("""
            import json
            import elastic.ray

            def train():
                import elastic, torch
                elastic.init()
                numbers = elastic.allgather(torch.tensor([7]), name="numbers").tolist()
                import beside
                return {"rank": elastic.rank(), "numbers": numbers, "pid": beside.pid()}

            if __name__ == "__main__":
                result = elastic.ray.run(train, num_workers=2)
                print("values", json.dumps(result.values))
        """)
    )
    plain = call(script=script)
    client = call("client", f"ray://127.0.0.1:{client_port}", env={"RAY_ADDRESS": ""})
    plain.succeed(LONG_S)
    client.succeed(LONG_S)
    met(said(plain, "values")[0], 7)
    met(said(client, "values")[0], 3)
    (refused,) = said(client, "refused")
    assert refused.startswith(wording.WORKERS_CPU_EACH_WERE)


@pytest.mark.nightly
def test_label_selector_when_given_then_selects_the_nodes_of_the_workers(tmp_path: Path):
    nodes = ({"num_cpus": 2, "labels": {"pool": name}} for name in ("other", "training"))
    with ray_nodes(tmp_path, [*nodes]) as cluster:
        job = RayJob(cluster, SCRIPT, "labels")
        try:
            job.succeed(2 * LONG_S)
        finally:
            job.end()
        for hosts in said(job, "values"):
            assert [host.rpartition("-")[2] for host in hosts] == [cluster.started[1][:8]] * 2
        assert len(said(job, "values")) == 2
        assert len(said(job, "refused")) == 3 and all(said(job, "refused"))
        assert not ours(cluster)


@pytest.mark.nightly
def test_submitted_job_imports_a_module_from_its_working_directory(
    cluster: RayCluster, tmp_path: Path
):
    (tmp_path / "numbers_of_ours.py").write_text("NUMBER = 11\n")
    (tmp_path / "ray_train.py").write_text(
        textwrap.dedent("""
            import elastic, elastic.ray, numbers_of_ours

            def train():
                import torch
                elastic.init()
                given = torch.tensor([float(numbers_of_ours.NUMBER)])
                return elastic.allreduce(given, name="x", op=elastic.Sum).item()

            if __name__ == "__main__":
                print("values", elastic.ray.run(train, num_workers=1).values)
        """)
    )
    ray = Path(sys.executable).parent / "ray"
    words = (ray, "job", "submit", "--working-dir", ".", "--", "python", "ray_train.py")
    env = ray_environment() | {"RAY_ADDRESS": cluster.dashboard}
    said = output_of(*words, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, timeout=LONG_S)
    assert "values [11.0]" in said
    nothing_is_left(cluster)


@pytest.mark.nightly
def test_submitted_elasticrun_trains_on_the_cluster(cluster: RayCluster, tmp_path: Path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import torch, elastic

            elastic.init()
            both = elastic.allreduce(torch.ones(1), name="x", op=elastic.Sum).item()
            print("value", both, "rank", elastic.rank(), flush=True)
        """)
    )
    programs = Path(sys.executable).parent
    submit = (programs / "ray", "job", "submit", "--working-dir", ".", "--entrypoint-num-cpus", "2")
    words = (*submit, "--", str(programs / "elasticrun"), "-np", "2", "python", "train.py")
    env = ray_environment() | {"RAY_ADDRESS": cluster.dashboard}
    said = output_of(*words, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, timeout=LONG_S)
    assert {f"value 2.0 rank {rank}" in said for rank in (0, 1)} == {True}
    nothing_is_left(cluster)


@pytest.mark.nightly
def test_trials_of_tune_keep_to_their_bundles(
    cluster: RayCluster, call: Callable[..., RayJob], tmp_path: Path
):
    """No job reserves anything beside them. The one that Tune stops leaves nothing, as the other."""
    job = call("trials", str(tmp_path / "results"))
    seen: set[str] = set()

    def trials_are_over() -> bool:
        seen.update(group["name"] for group in cluster.placement_groups())
        return job.process.poll() is not None

    cluster.until(trials_are_over, "both trials to end", LONG_S)
    job.succeed()
    trials = said(job, "trial")
    assert sorted(trial["numbers"] for trial in trials) == [[4, 4], [5, 5]]
    assert len({pid for trial in trials for pid in trial["pids"]}) == 4
    assert len({trial["group"] for trial in trials}) == 2
    assert not [name for name in seen if name.startswith("hvd-elastic:")]


@pytest.mark.nightly
def test_tasks_and_actors_run_jobs_and_impossible_requests_are_refused(call: Callable[..., RayJob]):
    """In one program: Python, torch and Ray are imported once."""
    job = call("tasks+refused")
    job.succeed(LONG_S)
    ((by_task, by_actor),) = said(job, "values")
    met(by_task, 1, workers=1)
    met(by_actor, 2, workers=1)
    not_pickled, too_many = said(job, "Invalid")
    assert wording.FUNCTION_CANT_BE_PICKLED in not_pickled and "lock" in not_pickled
    assert wording.WORKERS_CPU_EACH_WERE in too_many
    assert wording.FREE_NODE in too_many
    (failed,) = said(job, "JobFailed")
    assert failed.startswith(wording.JOB_ENDED_EXIT_CODE_3)
    assert "LookupError: this is what the user did" in job.output
    assert "in fails" in job.output  # its traceback


@pytest.mark.nightly
def test_interrupted_or_killed_caller_leaves_no_process_and_does_not_end_other_jobs(
    cluster: RayCluster, call: Callable[..., RayJob]
):
    interrupted, killed = call("until_ended"), call("until_ended")
    pids = []
    for job in (interrupted, killed):
        job.wait_for("^report", LONG_S)
        pids += [report["pid"] for report in said(job, "report")]
    assert {pid for pid, _ in programs(cluster)} > {*pids}
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.wait(GONE_S) == 1
    assert "KeyboardInterrupt" in interrupted.output
    assert [psutil.pid_exists(pid) for pid in pids] == [False, True]
    killed.process.kill()
    killed.wait()
    nothing_is_left(cluster)


def test_a_detached_job_outlives_its_caller_and_its_driver(
    cluster: RayCluster, call: Callable[..., RayJob], tmp_path: Path
):
    first = call("detached", "bert", folder=tmp_path)
    first.wait_for("^report", LONG_S)
    first.process.kill()
    first.wait()
    second = call("attached", "bert", folder=tmp_path)
    second.wait_for("^report", LONG_S)
    (driver,) = [actor for actor in cluster.actors() if actor["class"] == "DriverActor"]
    assert driver["name"] == "hvd-elastic-driver:bert"
    workers = {pid for pid, _ in programs(cluster)}
    os.kill(driver["pid"], signal.SIGKILL)
    told = len(said(second, "report"))
    second.wait_for("^report", LONG_S, count=told + 3)  # the next driver has them
    assert {pid for pid, _ in programs(cluster)} == workers
    (tmp_path / "go").touch()
    second.succeed(LONG_S)
    (values,) = said(second, "values")
    assert [value["rank"] for value in values] == [0, 1]
    assert all(value["entered"] == [0] for value in values), "no step has failed"
    assert wording.NO_DETACHED_JOB_NAME in said(second, "refused")[0]


@pytest.mark.nightly
def test_a_detached_job_is_scaled_through_ray(call: Callable[..., RayJob], tmp_path: Path):
    job = call("steered", "gpt", folder=tmp_path)
    job.succeed(2 * LONG_S)
    assert said(job, "told") == [
        str(because(ReasonKind.SCALED, workers=2, before=3, leave=1, slots=3)),
        str(because(ReasonKind.SCALED, workers=3, before=2, leave=0, slots=3)),
        str(because(ReasonKind.SCALED, workers=1, before=3, leave=2, slots=3)),
    ]
    (values,) = said(job, "values")
    [made] = [value["made"] for value in values]
    assert made == list(range(len(made))), "rank 0 has made every step once"
    assert wording.OVER not in job.output, "no world has broken"


@pytest.mark.nightly
def test_ray_calls_in_a_worker_survive_the_loss_of_another_node(
    cluster: RayCluster, call: Callable[..., RayJob], tmp_path: Path
):
    """All nodes have one address, so that only Ray's choice decides to which of them a worker is connected."""
    nodes = [cluster.add(num_cpus=0, resources={"there": 1}) for _ in range(2)]
    job = call("inside", folder=tmp_path)
    job.wait_for("^report", LONG_S, count=6)
    [old, lost] = [
        {pid for pid, line in programs(cluster, node) if "run_function" in line} for node in nodes
    ]
    assert len(old) == len(lost) == 1
    cluster.kill(nodes[1])
    job.succeed(LONG_S)
    ((value,),) = said(job, "values")
    assert value == {"worlds": [2, 1], "pid": old.pop()}
    assert "recovered" in job.output
    cluster.kill(nodes[0])


@pytest.mark.nightly
def test_the_example_of_ray_data_trains_on_each_row_once_an_epoch(
    cluster: RayCluster, call: Callable[..., RayJob]
):
    """A worker and the stream's process are lost and return; every epoch has every row, and none twice."""
    rows = 6000
    flags = ["--rows", str(rows), "--batch-size", "50", "--epochs", "10000"]
    job = call(*flags, script=EXAMPLES / "ray_data.py")

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    job.wait_for("^block .* 2 workers", LONG_S)
    kill(next(pid for pid, line in programs(cluster) if "run_function" in line))
    job.wait_for("^block .* 1 workers", LONG_S)
    kill(next(actor["pid"] for actor in cluster.actors() if actor["class"] == "Feed"))
    two = len([line for line in job.lines if re.match("block .* 2 workers", line)])
    job.wait_for("^block .* 2 workers", LONG_S, count=two + 1)
    over = len([line for line in job.lines if line.startswith("epoch ")])
    job.wait_for("^epoch", LONG_S, count=over + 2)
    ends = [line for line in job.lines if line.startswith("epoch ")]
    assert ends == [f"epoch {n}: {rows} rows, sum {sum(range(rows))}" for n in range(len(ends))]


def test_a_process_on_a_node_ends_with_its_raylet():
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    waits = "from elastic.ray.driver_actor import end_with_raylet as ends; ends(); print(); input()"
    actor = subprocess.Popen(
        [sys.executable, "-c", waits],
        env=ray_environment() | {"RAY_RAYLET_PID": str(raylet.pid)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert actor.stdout is not None and actor.stdout.readline()
        assert actor.poll() is None
        raylet.kill()
        assert actor.wait(10.0) == 1
    finally:
        for process in (raylet, actor):
            process.kill()
            process.communicate()


@pytest.mark.nightly
def test_variables_of_opentelemetry_reach_the_driver(
    cluster: RayCluster, call: Callable[..., RayJob], tmp_path: Path
):
    """Those of ``env``, and the caller's own; Ray's processes have neither."""
    script = tmp_path / "traced.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            import elastic.ray

            def train():
                import elastic, torch
                elastic.init()

                @elastic.run
                def loop(state):
                    elastic.allreduce(torch.ones(1), name="x")
                    state.commit()

                loop(elastic.ObjectState(step=0))

            env = {"ELASTIC_OPENTELEMETRY": "1", "OTEL_SERVICE_NAME": "bert"}
            elastic.ray.run(train, num_workers=2, min_workers=1, env=env)
        """)
    )
    with otlp_collector() as traces:
        job = call(script=script, env={"OTEL_EXPORTER_OTLP_ENDPOINT": traces.address})
        job.succeed(LONG_S)
    assert "start" in {span.name for span in traces.spans}
    assert traces.services == {"bert"}

"""Launcher, rank and size of a process, and the rendezvous of the ranks: from the environment alone."""

from __future__ import annotations

import pytest

from elastic.errors import Invalid
from elastic.protocol.messages import Place
from elastic.rendezvous import worker_settings
from elastic.rendezvous.launcher_detection import (
    FIRST_PORT,
    PORTS,
    ByAddress,
    ByFile,
    ByStore,
    ByTorchelasticStore,
    LauncherEnv,
    first_host,
    place,
    started,
)
from harness.golden import raises, recorded
from harness.refusals import refusal_of

MASTER = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
BY_HAND = {"RANK": "2", "WORLD_SIZE": "4", **MASTER}
TORCHRUN = {
    **BY_HAND,
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-1234@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "815",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def start(env: dict[str, str], **more: str) -> LauncherEnv:
    found = started(env | more, parent=99)
    assert found is not None
    return found


def way(
    env: dict[str, str], **more: str
) -> ByAddress | ByTorchelasticStore | ByFile | ByStore | None:
    return start(env, **more).way


def test_process_of_elasticrun_or_without_a_launcher_has_no_static_rendezvous():
    assert started({}) is None
    assert started({"PATH": "/bin"}) is None
    everything = {**TORCHRUN, **OPEN_MPI, **MPICH, **SLURM, "HOROVOD_RANK": "1"}
    assert started(everything | {"ELASTIC_DRIVER": "127.0.0.1:1"}) is None


@pytest.mark.parametrize(
    ("env", "by", "local_rank"),
    [
        (TORCHRUN, "torchrun", 0),
        (BY_HAND, "RANK and WORLD_SIZE", None),
        (BY_HAND | {"LOCAL_RANK": "1"}, "RANK and WORLD_SIZE", 1),
        (
            {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "0", **MASTER},
            "HOROVOD_RANK and HOROVOD_SIZE",
            0,
        ),
        (OPEN_MPI, "mpirun", 2),
        (MPICH, "mpirun", 2),
        (SLURM, "srun", 0),
        # The more explicit one wins.
        (TORCHRUN | {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4"}, "HOROVOD_RANK and HOROVOD_SIZE", None),
        (SLURM | OPEN_MPI, "mpirun", 2),
        (SLURM | OPEN_MPI | BY_HAND, "RANK and WORLD_SIZE", None),
    ],
)  # fmt: skip
def test_launcher_is_detected_from_the_environment(env, by, local_rank):
    found = start(env)
    assert (found.by, found.rank, found.size, found.local_rank) == (by, 2, 4, local_rank)


# ---- rendezvous


def test_under_torchrun_ranks_rendezvous_at_its_agent_once_for_each_restart():
    assert way(TORCHRUN) == ByTorchelasticStore("gpu1", 29500, "hvd-elastic/run7/3/4")
    assert way(TORCHRUN, TORCHELASTIC_RESTART_COUNT="4") == ByTorchelasticStore(
        "gpu1", 29500, "hvd-elastic/run7/4/4"
    )


def test_torchrun_without_its_agent_store_equals_a_manual_start():
    assert way(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="False") == way(BY_HAND)


def test_rank_0_listens_on_a_port_derived_from_master_port():
    found = way(BY_HAND)
    assert isinstance(found, ByAddress)
    assert (found.host, found.port) == ("gpu1", 30509)
    assert isinstance(high := way(BY_HAND, MASTER_PORT="65000"), ByAddress) and high.port == 63991
    assert isinstance(own := way(BY_HAND, ELASTIC_MASTER_PORT="7"), ByAddress) and own.port == 7


def test_ranks_of_one_host_rendezvous_through_a_file():
    for host in ("localhost", "127.0.0.1", "127.0.1.1", "::1"):
        assert isinstance(way(BY_HAND, MASTER_ADDR=host), ByFile)
    assert isinstance(way(OPEN_MPI), ByFile)
    assert isinstance(way(MPICH), ByFile)
    assert isinstance(way(SLURM, SLURM_STEP_NUM_NODES="1"), ByFile)
    assert isinstance(way(OPEN_MPI, ELASTIC_MASTER_PORT="7", MASTER_ADDR="gpu1"), ByAddress)


def test_ranks_of_a_job_use_the_same_file_and_other_jobs_another():
    assert way(OPEN_MPI) == way(OPEN_MPI, OMPI_COMM_WORLD_RANK="1")
    assert way(OPEN_MPI) != way(OPEN_MPI, PMIX_NAMESPACE="prterun-1234@2")
    assert way(SLURM) == way(SLURM, SLURM_PROCID="1", SLURM_LOCALID="1")
    assert way(SLURM) != way(SLURM, SLURM_STEP_ID="1")
    local = BY_HAND | {"MASTER_ADDR": "localhost"}
    assert way(local) != way(local, MASTER_PORT="29501")


def test_launcher_without_a_job_name_is_identified_by_its_process():
    assert started(MPICH, parent=99) == started(MPICH, parent=99)
    assert started(MPICH, parent=99) != started(MPICH, parent=98)


def test_srun_over_several_hosts_rendezvous_at_the_first_host():
    found = way(SLURM)
    assert isinstance(found, ByAddress)
    assert found.host == "gpu07"
    assert FIRST_PORT <= found.port < FIRST_PORT + PORTS
    assert isinstance(told := way(SLURM, **MASTER), ByAddress)
    assert (told.host, told.port) == ("gpu1", 30509)


def test_slurm_batch_script_is_not_a_step():
    """It has a rank and a number of tasks, and runs once."""
    script = {n: v for n, v in SLURM.items() if not n.startswith("SLURM_STEP")}
    assert started(script) is None


def test_mpirun_over_several_hosts_needs_a_master_address():
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with raises(Invalid):
        started(several)
    assert isinstance(found := way(several, MASTER_ADDR="gpu1"), ByAddress) and found.host == "gpu1"


def test_secret_can_be_passed_to_all_ranks():
    assert isinstance(found := way(BY_HAND, ELASTIC_SECRET="00ff"), ByAddress)
    assert found.secret == b"\x00\xff"
    with raises(Invalid):
        way(BY_HAND, ELASTIC_SECRET="hush")


def test_world_of_one_needs_no_rendezvous():
    assert way({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}) is None
    assert way(BY_HAND, RANK="0", WORLD_SIZE="1", MASTER_PORT="x") is None
    assert way(OPEN_MPI, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1") is None
    assert started({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    "env",
    [
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"PMIX_RANK": "0"},
        BY_HAND | {"RANK": "4"},
        BY_HAND | {"RANK": "-1"},
        BY_HAND | {"MASTER_PORT": "99999"},
        BY_HAND | {"LOCAL_RANK": "one"},
        SLURM | {"SLURM_NTASKS": "many"},
    ],
)
def test_insufficient_variables_are_refused(env):
    recorded("messages", refusal_of(started, env))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[01-03,07],login1", "gpu01"),
        ("gpu[3,9]", "gpu3"),
        ("rack2-gpu[10-11].example,x", "rack2-gpu10.example"),
    ],
)
def test_first_host_of_a_slurm_node_list_is_found(nodes, first):
    assert first_host(nodes) == first


# ---- places


def test_places_are_derived_from_hosts():
    hosts = ["a", "b", "a", "b", "a"]
    nobody = [None] * 5
    assert place(0, hosts, nobody) == Place(0, 5, 0, 3, 0, 2)
    assert place(3, hosts, nobody) == Place(3, 5, 1, 2, 1, 2)
    assert place(4, hosts, nobody) == Place(4, 5, 2, 3, 0, 1)


def test_given_local_ranks_are_used():
    assert place(0, ["a", "a"], [1, 0]) == Place(0, 2, 1, 2, 0, 1)
    assert place(1, ["a", "a", "b"], [5, 3, 3]) == Place(1, 3, 3, 2, 0, 2)


def test_contradictory_local_ranks_are_ignored():
    assert place(1, ["a", "a"], [0, 0]) == Place(1, 2, 1, 2, 0, 1)
    assert place(1, ["a", "a"], [1, None]) == Place(1, 2, 1, 2, 0, 1)


# ---- the worker's view


def test_environment_of_a_launcher_is_read():
    env = worker_settings.read(TORCHRUN)
    assert env.started == start(TORCHRUN)
    assert (env.driver, env.bind_host, env.start_timeout_s) == (None, "", 600.0)
    told = worker_settings.read(
        TORCHRUN | {"ELASTIC_BIND": "10.0.0.1", "HOROVOD_START_TIMEOUT": "5"}
    )
    assert (told.bind_host, told.start_timeout_s) == ("10.0.0.1", 5.0)

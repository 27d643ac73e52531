"""docs/horovod.md: the page has all of Horovod's names, and its statements about names, flags and variables are
true.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import horovod.torch as hvd
from elastic.driver.commandline.options import flags
from elastic.driver.commandline.options.argument_parser import IgnoredFlag
from elastic.driver.launch.worker_environment import worker_environment
from elastic.errors import Invalid
from elastic.protocol.messages import Address, Place, Worker
from harness.golden import raises, recorded

PAGE = Path(__file__).parents[3] / "docs" / "horovod.md"
ROOT = PAGE.parents[1]
# Modules of Horovod besides horovod.torch.
MODULES = """
    horovod.run horovod.spark.run horovod.spark.run_elastic horovod.ray
    horovod.data.BaseDataLoader horovod.data.AsyncDataLoaderMixin
    hvd.elastic.run hvd.elastic.TorchState hvd.elastic.ElasticSampler hvd.elastic.State
    hvd.elastic.ObjectState hvd.Compression.none hvd.Compression.fp16
    horovod.common.elastic.State.register_reset_callbacks horovod.common.elastic.State.on_reset
    horovod.common.elastic.State.on_hosts_updated horovod.common.elastic.State.commit
    horovod.common.elastic.State.check_host_updates horovod.common.elastic.State.save
    horovod.common.elastic.State.restore horovod.common.elastic.State.sync
    horovod.common.elastic.State.reset horovod.common.elastic.ObjectState
    horovod.common.elastic.run_fn horovod.common.elastic.notification_manager
    horovod.torch.elastic.state.StateHandler horovod.torch.elastic.state.ModelStateHandler
    horovod.torch.elastic.state.OptimizerStateHandler
    horovod.torch.elastic.state.SamplerStateHandler
    horovod.torch.elastic.state.get_handler_registry
    horovod.torch.elastic.state.set_handler_registry
    horovod.common.exceptions.HorovodInternalError horovod.common.exceptions.HostsUpdatedInterrupt
    horovod.common.exceptions.HorovodVersionMismatchError
    horovod.runner.elastic.worker.WorkerNotificationManager
    horovod.runner.elastic.worker.WorkerNotificationService
    horovod.runner.elastic.worker.WorkerNotificationClient
    horovod.runner.elastic.worker.HostUpdateResult
"""
FLAGS = """
    -v --version -np --num-proc -cb --check-build --disable-cache --start-timeout
    --network-interfaces --network-interface --output-filename --verbose --config-file -p --ssh-port
    -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms --cache-capacity
    --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
    --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
    --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
    --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc
    --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit
    --blacklist-cooldown-range --host-discovery-script --timeline-filename --timeline-mark-cycles
    --no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds
    --stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args
    --tcp --binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
    --log-with-timestamp --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp
    --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile --gloo --mpi --jsrun
"""
VARIABLES = """
    FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER
    TORUS_ALLREDUCE AUTOTUNE AUTOTUNE_LOG TIMELINE TIMELINE_MARK_CYCLES STALL_CHECK_DISABLE
    STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS NUM_NCCL_STREAMS THREAD_AFFINITY
    GLOO_TIMEOUT_SECONDS LOG_LEVEL LOG_HIDE_TIME BATCH_D2D_MEMCOPIES DISABLE_GROUP_FUSION
    ENABLE_ASYNC_COMPLETION DYNAMIC_PROCESS_SETS DISABLE_NVTX_RANGES ENABLE_XLA_OPS
    ADASUM_MPI_CHUNK_SIZE MPI_THREADS_DISABLE CCL_CACHE CONTROLLER CPU_OPERATIONS RANK SIZE
    LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT
    GLOO_IFACE ELASTIC ELASTIC_TIMEOUT START_TIMEOUT
"""
READERS = [
    "elastic/rendezvous/worker_settings.py",
    "elastic/rendezvous/launcher_detection.py",
    "driver/commandline/cli.py",
    "driver/network/interface_selection.py",
]


@functools.cache
def rows() -> dict[str, str]:
    """Return the page's value for each name in the first column: same, better, ..."""
    said: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in said, f"{name} has two rows"
                said[name] = cells[1]
    return said


# Their names are checked where these frameworks are imported: tests/frameworks.
ELSEWHERE = ("horovod.tensorflow.", "horovod.keras.", "horovod.mxnet.")
NAMES = [name for name in rows() if not name.startswith(("-", "HOROVOD_", *ELSEWHERE))]
OPTIONS = [name for name in rows() if name.startswith("-")]
ENVIRONMENT = [name for name in rows() if name.startswith("HOROVOD_")]


def there(name: str) -> Any:
    """Resolve a name. Raises ImportError, AttributeError."""
    first, *rest = name.replace("hvd.", "horovod.torch.", 1).split(".")
    value: Any = importlib.import_module(first)
    path = first
    for part in rest:
        path = f"{path}.{part}"
        try:
            value = getattr(value, part)
        except AttributeError as error:
            try:
                value = importlib.import_module(path)
            except ModuleNotFoundError as absent:
                raise error from absent
    return value


# ---- names ---------------------------------------------------------------------------------------


def test_every_public_name_has_a_row():
    modules = {"elastic", "Compression"}  # whose contents have rows
    missing = {f"hvd.{name}" for name in hvd.__all__ if name not in modules} - rows().keys()
    missing |= {f"hvd.elastic.{name}" for name in hvd.elastic.__all__} - rows().keys()
    assert not missing
    assert not set(MODULES.split()) - rows().keys()


def test_names_match_their_rows_in_the_page():
    for name in NAMES:
        if rows()[name] == "absent":
            with pytest.raises((ImportError, AttributeError), match="hvd-elastic"):
                there(name)
        else:
            assert rows()[name] in ("same", "better"), name
            assert there(name) is not None, name


# ---- flags ---------------------------------------------------------------------------------------


def actions() -> dict[str, Any]:
    parser = flags.build_parser()
    return {option: action for action in parser.actions for option in action.option_strings}


def test_every_flag_has_a_row():
    assert not set(FLAGS.split()) - rows().keys()


def test_flags_match_their_rows_in_the_page():
    known = actions()
    for flag in OPTIONS:
        action = known[flag]
        if flag == "--disable-cache" or isinstance(action, IgnoredFlag):
            recorded("messages", rows()[flag])
        elif flag in ("--mpi", "--jsrun"):
            assert rows()[flag] == "refused", flag
        elif "not available yet" in (action.help or "") or "as -p" in (action.help or ""):
            assert rows()[flag] == "absent", flag
        else:
            assert rows()[flag] in ("same", "better"), flag


# ---- variables -----------------------------------------------------------------------------------


def test_every_variable_has_a_row():
    assert not {f"HOROVOD_{name}" for name in VARIABLES.split()} - rows().keys()


def test_variables_match_their_rows_in_the_page():
    known = "".join((ROOT / file).read_text() for file in READERS)
    told = worker_environment(
        {},
        worker=Worker("h", 0, 1),
        place=Place(0, 1, 0, 1, 0, 1),
        driver=Address("h", 1),
        secret="",
        bind="h",
        elastic=True,
        wait_timeout_s=1.0,
        threads=1,
    )
    flagged = {**flags.parser().variables, **flags.parser().switches}
    for variable in ENVIRONMENT:
        found = f'"{variable}"' in known or variable in told or variable in flagged
        assert found is (rows()[variable] != "absent"), variable


def test_relative_links_point_to_existing_files():
    for page in (PAGE, PAGE.with_name("migration.md")):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_flag_that_is_not_horovods_is_named():
    with raises(Invalid):
        flags.parse(["--np", "2", "python", "train.py"])

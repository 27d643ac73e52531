"""Imports of Horovod in its tests, its examples and scripts, and all of its modules; tries one of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from horovod.unavailable import INTERNALS

FRAMEWORKS = (
    "horovod.tensorflow",
    "horovod.keras",
    "horovod.spark.keras",
)  # their imports take seconds

# All modules of release 0.28.1, from its sources on PyPI; its extensions are last.
MODULES = """
    horovod horovod._keras horovod._keras.callbacks horovod._keras.elastic horovod.common
    horovod.common.basics horovod.common.elastic horovod.common.exceptions
    horovod.common.process_sets horovod.common.util horovod.data horovod.data.data_loader_base
    horovod.keras horovod.keras.callbacks horovod.keras.elastic horovod.mxnet
    horovod.mxnet.compression horovod.mxnet.functions horovod.mxnet.mpi_ops horovod.ray
    horovod.ray.adapter horovod.ray.driver_service horovod.ray.elastic horovod.ray.elastic_v2
    horovod.ray.ray_logger horovod.ray.runner horovod.ray.strategy horovod.ray.utils
    horovod.ray.worker horovod.runner horovod.runner.common horovod.runner.common.service
    horovod.runner.common.service.compute_service horovod.runner.common.service.driver_service
    horovod.runner.common.service.task_service horovod.runner.common.util
    horovod.runner.common.util.codec horovod.runner.common.util.config_parser
    horovod.runner.common.util.env horovod.runner.common.util.host_hash
    horovod.runner.common.util.hosts horovod.runner.common.util.network
    horovod.runner.common.util.safe_shell_exec horovod.runner.common.util.secret
    horovod.runner.common.util.settings horovod.runner.common.util.timeout
    horovod.runner.common.util.tiny_shell_exec horovod.runner.driver
    horovod.runner.driver.driver_service horovod.runner.elastic horovod.runner.elastic.constants
    horovod.runner.elastic.discovery horovod.runner.elastic.driver
    horovod.runner.elastic.registration horovod.runner.elastic.rendezvous
    horovod.runner.elastic.settings horovod.runner.elastic.worker horovod.runner.gloo_run
    horovod.runner.http horovod.runner.http.http_client horovod.runner.http.http_server
    horovod.runner.js_run horovod.runner.launch horovod.runner.mpi_run horovod.runner.run_task
    horovod.runner.task horovod.runner.task.task_service horovod.runner.task_fn
    horovod.runner.util horovod.runner.util.cache horovod.runner.util.lsf
    horovod.runner.util.network horovod.runner.util.remote horovod.runner.util.streams
    horovod.runner.util.threads horovod.tensorflow horovod.tensorflow.compression
    horovod.tensorflow.data horovod.tensorflow.data.compute_service
    horovod.tensorflow.data.compute_worker horovod.tensorflow.elastic horovod.tensorflow.functions
    horovod.tensorflow.gradient_aggregation horovod.tensorflow.gradient_aggregation_eager
    horovod.tensorflow.keras horovod.tensorflow.keras.callbacks horovod.tensorflow.keras.elastic
    horovod.tensorflow.mpi_ops horovod.tensorflow.sync_batch_norm horovod.tensorflow.util
    horovod.torch horovod.torch.compression horovod.torch.elastic horovod.torch.elastic.sampler
    horovod.torch.elastic.state horovod.torch.functions horovod.torch.mpi_ops
    horovod.torch.optimizer horovod.torch.sync_batch_norm
    horovod.spark horovod.spark.common horovod.spark.common._namedtuple_fix
    horovod.spark.common.backend horovod.spark.common.cache horovod.spark.common.constants
    horovod.spark.common.datamodule horovod.spark.common.estimator horovod.spark.common.params
    horovod.spark.common.serialization horovod.spark.common.store horovod.spark.common.util
    horovod.spark.conf horovod.spark.data_loaders horovod.spark.data_loaders.pytorch_data_loaders
    horovod.spark.driver horovod.spark.driver.driver_service horovod.spark.driver.host_discovery
    horovod.spark.driver.job_id horovod.spark.driver.mpirun_rsh horovod.spark.driver.rendezvous
    horovod.spark.driver.rsh horovod.spark.gloo_run horovod.spark.keras horovod.spark.keras.bare
    horovod.spark.keras.datamodule horovod.spark.keras.estimator horovod.spark.keras.optimizer
    horovod.spark.keras.remote horovod.spark.keras.tensorflow horovod.spark.keras.util
    horovod.spark.lightning horovod.spark.lightning.datamodule horovod.spark.lightning.estimator
    horovod.spark.lightning.legacy horovod.spark.lightning.remote horovod.spark.lightning.util
    horovod.spark.mpi_run horovod.spark.runner horovod.spark.task horovod.spark.task.gloo_exec_fn
    horovod.spark.task.mpirun_exec_fn horovod.spark.task.task_info horovod.spark.task.task_service
    horovod.spark.tensorflow horovod.spark.tensorflow.compute_worker horovod.spark.torch
    horovod.spark.torch.datamodule horovod.spark.torch.estimator horovod.spark.torch.remote
    horovod.spark.torch.util
    horovod.torch.mpi_lib_v2 horovod.tensorflow.mpi_lib
"""
# Of files under test/ and examples/ of Horovod's repository, in versions from 2020 to 2023; names that releases before
# 0.28.1 had in another place are left out.
STATEMENTS = """
    import horovod
    import horovod.torch as hvd
    import horovod.tensorflow as hvd
    import horovod.keras as hvd
    import horovod.tensorflow.keras as hvd
    from horovod import run
    from horovod.common.util import env
    from horovod.common.util import extension_available, gloo_built, mpi_built
    from horovod.common.util import gloo_built, mpi_built, nccl_built, ddl_built, ccl_built
    from horovod.common.util import gpu_available, split_list, is_iterable
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from horovod.common.process_sets import ProcessSet, global_process_set
    from horovod.common.elastic import State, ObjectState, run_fn
    from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
    from horovod.torch.compression import Compression
    from horovod.torch.elastic import run
    from horovod.torch.elastic.sampler import ElasticSampler
    from horovod.torch.elastic.state import TorchState, StateHandler, get_handler_registry
    from horovod.torch.functions import broadcast_object
    from horovod.torch.mpi_ops import size, rank, Average
    from horovod.torch.sync_batch_norm import SyncBatchNorm
    from horovod.ray import ElasticRayExecutor, RayExecutor, ray_logger
    from horovod.ray.elastic import ElasticRayExecutor, RayHostDiscovery, TestDiscovery
    from horovod.ray.elastic_v2 import RayHostDiscovery
    from horovod.ray.runner import Coordinator, MiniSettings, RayExecutor
    from horovod.ray.strategy import ColocatedStrategy, PGStrategy
    from horovod.ray.utils import detect_nics, nics_to_env_var
    from horovod.ray.worker import BaseHorovodWorker
    from horovod.runner import run
    from horovod.runner.launch import run_commandline
    from horovod.runner.common.service.compute_service import ComputeService, ComputeClient
    from horovod.runner.common.util import env, secret, timeout
    from horovod.runner.common.util.env import get_env_rank_and_size
    from horovod.runner.common.util.timeout import TimeoutException
    from horovod.runner.elastic import discovery
    from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery, HostManager
    from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager
    import horovod.spark
    from horovod.spark import run, run_elastic
    from horovod.spark.common.backend import Backend, SparkBackend
    from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
    from horovod.spark.common.params import EstimatorParams, ModelParams
    from horovod.spark.common.store import DBFSLocalStore, FilesystemStore, HDFSStore
    from horovod.spark.common.store import LocalStore, Store
    from horovod.spark.runner import run
    from horovod.spark.task import get_available_devices
    from horovod.spark.torch import TorchEstimator, TorchModel
    from horovod.spark.torch.estimator import TorchEstimator
    from horovod.tensorflow.compression import Compression
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
    from horovod.tensorflow.data.compute_service import tf_data_service
    from horovod.tensorflow.data.compute_worker import main
    from horovod.tensorflow.elastic import TensorFlowKerasState, TensorFlowState, run
    from horovod.tensorflow.functions import broadcast_object, broadcast_variables
    from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
    from horovod.tensorflow.keras import callbacks, elastic
    from horovod.tensorflow.mpi_ops import rank, size_op
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
    from horovod.keras.callbacks import BroadcastGlobalVariablesCallback
    from horovod.keras.elastic import KerasState
    import horovod.spark.keras as hvd
    from horovod.spark.keras import KerasEstimator, KerasModel
"""
# Imports without a counterpart here.
REFUSED = """
    from horovod.common.basics import HorovodBasics
    import horovod._keras
    from horovod.ray.adapter import Adapter
    from horovod.ray.driver_service import _driver_fn
    from horovod.runner.common.service.task_service import BasicTaskService, BasicTaskClient
    from horovod.runner.common.service import driver_service
    from horovod.runner.common.util import codec, safe_shell_exec
    from horovod.runner.common.util import config_parser, hosts
    from horovod.runner.common.util import settings as hvd_settings
    from horovod.runner.common.util.address import local_addresses, NoValidAddressesFound
    from horovod.runner.common.util.host_hash import host_hash
    from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
    from horovod.runner.driver import driver_service
    from horovod.runner.elastic import constants
    from horovod.runner.elastic.driver import ElasticDriver
    from horovod.runner.elastic.rendezvous import create_rendezvous_handler
    from horovod.runner.elastic.settings import ElasticSettings
    from horovod.runner.gloo_run import gloo_run
    from horovod.runner import gloo_run
    from horovod.runner.http.http_server import RendezvousServer
    from horovod.runner.js_run import js_run, generate_jsrun_rankfile
    from horovod.runner.mpi_run import mpi_available, is_open_mpi
    from horovod.runner.task import task_service
    from horovod.runner.util import network
    from horovod.runner.util.remote import get_remote_command
    from horovod.runner.util.streams import Pipe
    from horovod.runner.util.threads import in_thread, on_event
    from horovod.spark.common.util import is_databricks
    from horovod.spark.driver.rsh import rsh
    from horovod.spark.lightning.legacy import to_lightning_module
    from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
    from horovod.tensorflow.util import _executing_eagerly
"""


def lines(table: str) -> list[str]:
    return [line.strip() for line in table.strip().splitlines()]


def module_of(statement: str) -> str:
    return statement.split()[1]


def with_framework(names: Iterable[str], wanted: bool) -> list[str]:
    """Return the imports that need TensorFlow or Keras, or the others, without MXNet's."""
    found = [name for name in names if not name.removeprefix("import ").startswith("horovod.mxnet")]
    return [each for each in found if any(name in each for name in FRAMEWORKS) == wanted]


def refused(name: str) -> bool:
    """Return whether a module, or its package, has no counterpart here."""
    words = name.removeprefix("horovod.").split(".")
    above = {".".join(words[:number]) for number in range(1, len(words) + 1)}
    return bool(above & INTERNALS.keys())


def try_module(name: str) -> None:
    """Raise AssertionError if it can't be imported, or is refused without advice."""
    if refused(name):
        try_refused(f"import {name}")
    else:
        importlib.import_module(name)


def try_refused(statement: str) -> None:
    """Raise AssertionError if the import works, or fails as for an unknown module."""
    try:
        exec(statement, {})
    except ImportError as error:
        assert type(error) is ImportError, statement
        assert refused(str(error.name)), f"{statement}: {error.name}"
    else:
        raise AssertionError(f"{statement} works")

"""Every public name takes what Horovod's takes: the same arguments, in the same order, with the same defaults.

What may come after them is ours, and has a default.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

import elastic
from elastic.api import broadcasting
from harness import signatures
from harness.golden import raises

# ruff: noqa: E501
# Horovod's signatures, as its documentation and its users' scripts have them. `none` stands for Compression.none,
# `everybody` for global_process_set; reductions are named.
TORCH = """
    init(comm=None, process_sets=None)
    shutdown()
    is_initialized()
    rank()
    size()
    local_rank()
    local_size()
    cross_rank()
    cross_size()
    is_homogeneous()
    start_timeline(file_path, mark_cycles=False)
    stop_timeline()
    mpi_threads_supported()
    mpi_enabled(verbose=False)
    mpi_built(verbose=False)
    gloo_enabled(verbose=False)
    gloo_built(verbose=False)
    nccl_built(verbose=False)
    ddl_built(verbose=False)
    ccl_built(verbose=False)
    cuda_built(verbose=False)
    rocm_built(verbose=False)
    join(device=-1)
    barrier(process_set=everybody)
    poll(handle)
    synchronize(handle)
    allreduce(tensor, average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody)
    allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody)
    allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody)
    allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody)
    grouped_allreduce(tensors, average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody)
    grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody)
    grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody)
    grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody)
    sparse_allreduce_async(tensor, name, op, process_set=everybody)
    allgather(tensor, name=None, process_set=everybody)
    allgather_async(tensor, name=None, process_set=everybody)
    grouped_allgather(tensors, name=None, process_set=everybody)
    grouped_allgather_async(tensors, name=None, process_set=everybody)
    broadcast(tensor, root_rank, name=None, process_set=everybody)
    broadcast_async(tensor, root_rank, name=None, process_set=everybody)
    broadcast_(tensor, root_rank, name=None, process_set=everybody)
    broadcast_async_(tensor, root_rank, name=None, process_set=everybody)
    alltoall(tensor, splits=None, name=None, process_set=everybody)
    alltoall_async(tensor, splits=None, name=None, process_set=everybody)
    reducescatter(tensor, name=None, compression=none, op=Average, process_set=everybody, prescale_factor=1.0, postscale_factor=1.0)
    reducescatter_async(tensor, name=None, op=Average, process_set=everybody, prescale_factor=1.0, postscale_factor=1.0)
    grouped_reducescatter(tensors, name=None, compression=none, op=Average, process_set=everybody, prescale_factor=1.0, postscale_factor=1.0)
    grouped_reducescatter_async(tensors, name=None, op=Average, process_set=everybody, prescale_factor=1.0, postscale_factor=1.0)
    ProcessSet(ranks_or_comm)
    ProcessSet.size(self)
    ProcessSet.rank(self)
    ProcessSet.included(self)
    add_process_set(process_set)
    remove_process_set(process_set)
    Compression.none.compress(tensor)
    Compression.none.decompress(tensor, ctx)
    Compression.fp16.compress(tensor)
    Compression.fp16.decompress(tensor, ctx)
    DistributedOptimizer(optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=everybody)
    broadcast_parameters(params, root_rank)
    broadcast_optimizer_state(optimizer, root_rank, model=None)
    broadcast_object(obj, root_rank=0, name=None, process_set=everybody)
    allgather_object(obj, name=None)
    SyncBatchNorm(num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
    elastic.run(func)
    elastic.TorchState(model=None, optimizer=None, **kwargs)
    elastic.ElasticSampler(dataset, shuffle=True, seed=0)
    elastic.ElasticSampler.set_epoch(self, epoch)
    elastic.ElasticSampler.record_batch(self, batch_idx, batch_size)
    elastic.ElasticSampler.state_dict(self)
    elastic.ElasticSampler.load_state_dict(self, state_dict)
    elastic.ElasticSampler.reset(self)
"""
ELSEWHERE = """
    horovod.common.elastic.State(bcast_object, get_rank)
    horovod.common.elastic.State.register_reset_callbacks(self, callbacks)
    horovod.common.elastic.State.on_reset(self)
    horovod.common.elastic.State.on_hosts_updated(self, timestamp, update_res)
    horovod.common.elastic.State.commit(self)
    horovod.common.elastic.State.check_host_updates(self)
    horovod.common.elastic.State.save(self)
    horovod.common.elastic.State.restore(self)
    horovod.common.elastic.State.sync(self)
    horovod.common.elastic.State.reset(self)
    horovod.common.elastic.ObjectState(bcast_object, get_rank, **kwargs)
    horovod.common.elastic.run_fn(func, reset)
    horovod.common.exceptions.HostsUpdatedInterrupt(skip_sync=False)
    horovod.common.exceptions.HorovodVersionMismatchError(name, version, installed_version)
    horovod.torch.elastic.state.StateHandler(value)
    horovod.torch.elastic.state.StateHandler.save(self)
    horovod.torch.elastic.state.StateHandler.restore(self)
    horovod.torch.elastic.state.StateHandler.sync(self)
    horovod.torch.elastic.state.StateHandler.set_value(self, value)
    horovod.torch.elastic.state.get_handler_registry()
    horovod.torch.elastic.state.set_handler_registry(registry)
    horovod.runner.elastic.worker.WorkerNotificationManager()
    horovod.runner.elastic.worker.WorkerNotificationManager.init(self, rendezvous_addr=None, rendezvous_port=None, nic=None, hostname=None, local_rank=None)
    horovod.runner.elastic.worker.WorkerNotificationManager.register_listener(self, listener)
    horovod.runner.elastic.worker.WorkerNotificationManager.remove_listener(self, listener)
    horovod.runner.elastic.worker.WorkerNotificationManager.handle_hosts_updated(self, timestamp, update_res)
    horovod.data.data_loader_base.AsyncDataLoaderMixin(async_loader_queue_size=64, *args, **kwargs)
    horovod.data.data_loader_base.AsyncDataLoaderMixin.close_async_loader(self)
    horovod.runner.run(func, args=(), kwargs=None, num_proc=None, min_num_proc=None, max_num_proc=None, slots=None, reset_limit=None, cooldown_range=None, hosts=None, hostfile=None, host_discovery_script=None, start_timeout=None, ssh_port=None, ssh_identity_file=None, disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None, mpi_args=None, network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None, max_np=None)
"""
# Of MXNet, which few have installed: compared with our source. As release 0.28.1 on PyPI has them.
MXNET = """
    allreduce(tensor, average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody, op=None)
    allreduce_(tensor, average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody, op=None)
    grouped_allreduce(tensors, average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody, op=None)
    grouped_allreduce_(tensors, average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody, op=None)
    allgather(tensor, name=None, priority=0, process_set=everybody)
    grouped_allgather(tensors, name=None, priority=0, process_set=everybody)
    broadcast(tensor, root_rank, name=None, priority=0, process_set=everybody)
    broadcast_(tensor, root_rank, name=None, priority=0, process_set=everybody)
    alltoall(tensor, splits=None, name=None, priority=0, process_set=everybody)
    reducescatter(tensor, op=Average, name=None, priority=0, process_set=everybody, prescale_factor=1.0, postscale_factor=1.0)
    grouped_reducescatter(tensors, op=Average, name=None, priority=0, process_set=everybody, prescale_factor=1.0, postscale_factor=1.0)
    DistributedOptimizer(optimizer, gradient_predivide_factor=1.0, num_groups=0, process_set=everybody)
    DistributedOptimizer.create_state(self, index, weight)
    DistributedOptimizer.create_state_multi_precision(self, index, weight)
    DistributedOptimizer.update(self, index, weight, grad, state)
    DistributedOptimizer.update_multi_precision(self, index, weight, grad, state)
    DistributedOptimizer.set_learning_rate(self, lr)
    DistributedOptimizer.set_lr_mult(self, args_lr_mult)
    DistributedOptimizer.set_wd_mult(self, args_wd_mult)
    DistributedTrainer(params, optimizer, optimizer_params=None, compression=none, gradient_predivide_factor=1.0, prefix=None, num_groups=0, process_set=everybody)
    broadcast_parameters(params, root_rank=0, prefix=None)
    broadcast_object(obj, root_rank=0, name=None)
    allgather_object(obj, name=None)
"""
MXNET_REFERENCE = [line.strip() for line in MXNET.strip().splitlines()]
MXNET_SOURCES = [
    *(Path(elastic.__file__).parent / "mxnet").glob("*.py"),
    Path(broadcasting.__file__),
]
# Release 0.28.1 has num_proc=1 in horovod.runner.run; ours stands for that, or for min_num_proc where it is given.
REFERENCE = [f"horovod.torch.{line.strip()}" for line in TORCH.strip().splitlines()]
REFERENCE += [line.strip() for line in ELSEWHERE.strip().splitlines()]


@pytest.mark.parametrize("reference", REFERENCE, ids=lambda line: line.partition("(")[0])
def test_signatures_match_horovods(reference):
    signatures.compare(reference)


SPARK = """
    horovod.spark.run(fn, args=(), kwargs={}, num_proc=None, start_timeout=None, use_mpi=None, use_gloo=None, extra_mpi_args=None, env=None, stdout=None, stderr=None, verbose=1, nics=None, prefix_output_with_timestamp=False, executable=None)
    horovod.spark.torch.TorchEstimator(num_proc=None, model=None, backend=None, store=None, optimizer=None, loss=None, loss_constructors=None, metrics=None, loss_weights=None, sample_weight_col=None, gradient_compression=None, feature_cols=None, input_shapes=None, validation=None, label_cols=None, callbacks=None, batch_size=None, val_batch_size=None, epochs=None, verbose=1, random_seed=None, shuffle_buffer_size=None, shuffle=True, partitions_per_process=None, run_id=None, train_minibatch_fn=None, train_steps_per_epoch=None, validation_steps_per_epoch=None, transformation_fn=None, train_reader_num_workers=None, val_reader_num_workers=None, reader_pool_type='thread', label_shapes=None, inmemory_cache_all=False, use_gpu=True, mp_start_method=None)
    horovod.spark.torch.TorchModel(history=None, model=None, feature_columns=None, input_shapes=None, label_columns=None, optimizer=None, run_id=None, _metadata=None, loss=None, loss_constructors=None)
    horovod.spark.common.store.FilesystemStore(prefix_path, train_path=None, val_path=None, test_path=None, runs_path=None, save_runs=True, storage_options=None, checkpoint_filename=None)
    horovod.spark.common.store.Store.create(prefix_path, *args, **kwargs)
    horovod.spark.common.backend.SparkBackend(num_proc=None, env=None, **kwargs)
    horovod.spark.run_elastic(fn, args=(), kwargs={}, num_proc=None, min_num_proc=None, max_num_proc=None, start_timeout=None, elastic_timeout=None, reset_limit=None, env=None, stdout=None, stderr=None, verbose=1, nics=None, prefix_output_with_timestamp=False, min_np=None, max_np=None)
"""


@pytest.mark.parametrize(
    "reference",
    [line.strip() for line in SPARK.strip().splitlines()],
    ids=lambda line: line.partition("(")[0],
)
def test_spark_signatures_match_horovods(reference):
    pytest.importorskip("pyspark")
    signatures.compare(reference)


@pytest.mark.parametrize(
    "reference", MXNET_REFERENCE, ids=lambda line: "horovod.mxnet." + line.partition("(")[0]
)
def test_mxnet_signatures_match_horovods(reference):
    at = MXNET_SOURCES if "_object(" in reference else MXNET_SOURCES[:-1]
    signatures.compare_source(reference, at)


@pytest.mark.parametrize(
    ("path", "attributes"),
    [
        ("horovod.torch.global_process_set", "ranks process_set_id mpi_comm"),
        (
            "horovod.torch.elastic.ElasticSampler",
            "dataset shuffle seed epoch num_replicas rank remaining_indices num_samples total_size"
            " processed_num processed_indices",
        ),
    ],
)
def test_attributes_read_by_scripts_exist(path, attributes):
    value = resolve_name(path)
    if isinstance(value, type):
        value = value([1, 2, 3])
        for name in attributes.split():
            assert hasattr(value, name), name
    else:
        for name in attributes.split():
            assert hasattr(type(value), name) or name in vars(value), name


def test_a_missing_engine_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.spark", None)
    monkeypatch.delitem(sys.modules, "horovod.spark")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(ImportError):
        importlib.import_module("horovod.spark")


def test_a_front_end_without_its_framework_names_the_package():
    with raises(ImportError):
        importlib.import_module("horovod.mxnet")

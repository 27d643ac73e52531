"""The doors of TensorFlow and Keras take what Horovod's take: see `harness.signatures`.

TENSORFLOW was read off the sources of release 0.28.1, as PyPI has them.
"""

import horovod.keras
import horovod.tensorflow
import horovod.tensorflow.data.compute_service
import horovod.tensorflow.keras  # noqa: F401 - found by their paths
from harness import signatures

# ruff: noqa: E501
# `none` stands for Compression.none, `everybody` for global_process_set.
TENSORFLOW = """
    init()
    allreduce(tensor, average=None, device_dense='', device_sparse='', compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=everybody, ignore_name_scope=False)
    reducescatter(tensor, device_dense='', compression=none, op=Average, name=None, process_set=everybody, ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0)
    grouped_allreduce(tensors, average=None, device_dense='', device_sparse='', compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody, ignore_name_scope=False, name=None)
    grouped_reducescatter(tensors, device_dense='', compression=none, op=Average, process_set=everybody, prescale_factor=1.0, postscale_factor=1.0)
    allgather(tensor, name=None, ignore_name_scope=False, process_set=everybody)
    grouped_allgather(tensors, name=None, ignore_name_scope=False, process_set=everybody)
    broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=everybody)
    broadcast_(variables, root_rank, name=None, process_set=everybody)
    alltoall(tensor, splits=None, name=None, ignore_name_scope=False, process_set=everybody)
    join()
    size_op(process_set_id=0, name=None)
    process_set_included_op(process_set_id=0, name=None)
    local_size_op(name=None)
    rank_op(name=None)
    local_rank_op(name=None)
    broadcast_global_variables(root_rank)
    broadcast_variables(variables, root_rank, process_set=everybody, inplace=False)
    broadcast_object(obj, root_rank=0, session=None, name=None, process_set=everybody)
    broadcast_object_fn(root_rank=0, session=None, name=None, process_set=everybody)
    allgather_object(obj, session=None, name=None, process_set=everybody)
    BroadcastGlobalVariablesHook(root_rank, device='')
    BroadcastGlobalVariablesHook.begin(self)
    BroadcastGlobalVariablesHook.after_create_session(self, session, coord)
    DistributedOptimizer(optimizer, name=None, use_locking=False, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=everybody, scale_local_gradients=True)
    DistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=everybody, scale_local_gradients=True)
    PartialDistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=everybody, local_layers=None, scale_local_gradients=True)
    SyncBatchNormalization(fused=False, **kwargs)
    add_process_set(process_set)
    remove_process_set(process_set)
    elastic.run(func)
    elastic.TensorFlowKerasState(model, optimizer=None, backend=None, **kwargs)
    elastic.TensorFlowState(variables=None, session=None, **kwargs)
    elastic.TensorFlowState.save(self)
    elastic.TensorFlowState.restore(self)
    elastic.TensorFlowState.sync(self)
    data.compute_service.TfDataServiceConfig.compute_client(self, verbose=1)
    data.compute_service.TfDataServiceConfig.to_dict(self)
    data.compute_service.TfDataServiceConfig.from_dict(config)
    data.compute_service.TfDataServiceConfig.write(self, filename)
    data.compute_service.TfDataServiceConfig.read(filename, wait_for_file_creation=False)
    data.compute_service.tf_data_service(compute_config, rank)
    data.compute_service.send_to_data_service(dataset, compute_config, rank, size=None, processing_mode='distributed_epoch', reuse_dataset=False, round_robin=False)
    data.compute_service.compute_worker_fn(compute_config)
"""
KERAS = """
    DistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=everybody, scale_local_gradients=True)
    broadcast_global_variables(root_rank)
    allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=none)
    allgather(value, name=None)
    broadcast(value, root_rank, name=None)
    reducescatter(value, name=None, op=Average)
    load_model(filepath, custom_optimizers=None, custom_objects=None, compression=none)
    callbacks.BroadcastGlobalVariablesCallback(root_rank, device='', local_variables=None)
    callbacks.MetricAverageCallback(device='')
    callbacks.LearningRateScheduleCallback(initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, steps_per_epoch=None)
    callbacks.LearningRateWarmupCallback(initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0)
    callbacks.BestModelCheckpoint(monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', save_freq='epoch')
    elastic.CommitStateCallback(state, batches_per_commit=1)
"""


def test_tensorflow_signatures_match_horovods(rank, size):
    for line in TENSORFLOW.strip().splitlines():
        signatures.compare(f"horovod.tensorflow.{line.strip()}")


def test_keras_signatures_match_horovods(rank, size):
    for door in ("horovod.keras", "horovod.tensorflow.keras"):
        for line in KERAS.strip().splitlines():
            signatures.compare(f"{door}.{line.strip()}")

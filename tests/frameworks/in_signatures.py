"""The doors of TensorFlow and Keras take what Horovod 0.28.1 takes: see `harness.signatures`."""

import horovod.keras
import horovod.tensorflow
import horovod.tensorflow.keras  # noqa: F401 - found by their paths
from harness import signatures

# ruff: noqa: E501
# `none` stands for Compression.none, `everybody` for global_process_set.
TENSORFLOW = """
    allreduce(tensor, average=None, device_dense='', device_sparse='', compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=everybody, ignore_name_scope=False)
    grouped_allreduce(tensors, average=None, device_dense='', device_sparse='', compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=everybody, ignore_name_scope=False, name=None)
    allgather(tensor, name=None, ignore_name_scope=False, process_set=everybody)
    broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=everybody)
    broadcast_(variables, root_rank, name=None, process_set=everybody)
    broadcast_global_variables(root_rank)
    PartialDistributedGradientTape(gradtape, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=everybody, local_layers=None, scale_local_gradients=True)
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


def test_tensorflow_takes_what_horovods_takes(rank, size):
    for line in TENSORFLOW.strip().splitlines():
        signatures.compare(f"horovod.tensorflow.{line.strip()}")


def test_keras_takes_what_horovods_takes(rank, size):
    for door in ("horovod.keras", "horovod.tensorflow.keras"):
        for line in KERAS.strip().splitlines():
            signatures.compare(f"{door}.{line.strip()}")

"""Measure the samples per second of TensorFlow with Horovod on synthetic data.

horovodrun -np 2 python examples/horovod/tensorflow2_synthetic_benchmark.py
"""

import argparse
import timeit

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--num-warmup-batches", type=int, default=5)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=5)
args = parser.parse_args()

hvd.init()
model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(args.width, activation="relu"),
        tf.keras.layers.Dense(args.width, activation="relu"),
        tf.keras.layers.Dense(1000),
    ]
)
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([args.batch_size, args.width])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=999, dtype=tf.int64)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def benchmark_step(first_batch):
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.losses.sparse_categorical_crossentropy(target, probs, from_logits=True)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)


def log(text):
    if hvd.rank() == 0:
        print(text)


benchmark_step(first_batch=True)
timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_warmup_batches)
rates = []
for x in range(args.num_iters):
    time = timeit.timeit(
        lambda: benchmark_step(first_batch=False), number=args.num_batches_per_iter
    )
    rates.append(args.batch_size * args.num_batches_per_iter / time)
    log(f"Iter #{x}: {rates[-1]:.1f} img/sec per worker")
log(f"Total img/sec on {hvd.size()} worker(s): {hvd.size() * np.mean(rates):.1f}")

"""Classify handwritten digits with an elastic custom loop in TensorFlow 2, with Horovod.

horovodrun -np 2 --min-np 1 -H localhost:2 python examples/horovod/tensorflow2_elastic.py
"""

import argparse
import time

import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batches-per-commit", type=int, default=5)
parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes longer")
args = parser.parse_args()

hvd.init()
images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images.reshape(-1, 64) / 16.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(1000).batch(32)

model = tf.keras.Sequential(
    [tf.keras.Input((64,)), tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10)]
)
loss_object = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.optimizers.Adam(0.002 * hvd.size())


@tf.function
def train_one_batch(data, target):
    with tf.GradientTape() as tape:
        loss = loss_object(target, model(data, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


# The optimizer's variables must exist before they are broadcast.
optimizer.build(model.trainable_variables)


@hvd.elastic.run
def train(state):
    for data, target in dataset.skip(state.batch).take(args.steps - state.batch):
        loss = train_one_batch(data, target)
        time.sleep(args.pause)
        if state.batch % 20 == 0 and hvd.rank() == 0:
            print(f"Step #{state.batch}\tLoss: {loss:.6f}\tof {hvd.size()}", flush=True)
        state.batch += 1
        if state.batch % args.batches_per_commit == 0:
            state.commit()


def on_state_reset():
    optimizer.learning_rate.assign(0.002 * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
digest = sum(float(tf.reduce_sum(tf.abs(each))) for each in model.trainable_variables)
print(f"rank {hvd.rank()} ended after {state.batch} steps with {digest!r}")

"""Classify handwritten digits with a TensorFlow 1 graph, MonitoredTrainingSession and Horovod.

horovodrun -np 2 python examples/horovod/tensorflow1_mnist.py
"""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=400, help="of one worker; several share them")
args = parser.parse_args()

tf.disable_eager_execution()
hvd.init()
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)

image = tf.placeholder(tf.float32, [None, 64], name="image")
label = tf.placeholder(tf.int64, [None], name="label")
hidden = tf.get_variable("hidden", [64, 64])
output = tf.get_variable("output", [64, 10])
logits = tf.matmul(tf.nn.relu(tf.matmul(image, hidden)), output)
loss = tf.losses.sparse_softmax_cross_entropy(label, logits)

# Horovod: the learning rate grows with the number of workers.
optimizer = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.001 * hvd.size()))
global_step = tf.train.get_or_create_global_step()
train_op = optimizer.minimize(loss, global_step=global_step)

last_step = args.steps // hvd.size()
hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=last_step)]
if hvd.rank() == 0:
    hooks.append(tf.train.LoggingTensorHook({"step": global_step, "loss": loss}, every_n_iter=50))

drawn = np.random.RandomState(hvd.rank())
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    while not session.should_stop():
        batch = drawn.randint(0, len(images), 32)
        _, value = session.run([train_op, loss], {image: images[batch], label: labels[batch]})
print(f"rank {hvd.rank()} ended with loss {value:.4f}")

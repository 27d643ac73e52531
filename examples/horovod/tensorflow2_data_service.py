"""Classify handwritten digits with data that a separate job prepares for all ranks.

    horovodrun -np 2 python -m horovod.tensorflow.data.compute_worker ~/compute.json &
    horovodrun -np 2 python examples/horovod/tensorflow2_data_service.py ~/compute.json

The data are scikit-learn's 1,797 images of 8 x 8.
"""

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd
import horovod.tensorflow.data.compute_service as compute_service

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("configfile", help="that the compute job writes")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

hvd.init()
compute_config = compute_service.TfDataServiceConfig.read(
    args.configfile, wait_for_file_creation=True
)

images, labels = load_digits(return_X_y=True)
# The compute job does the steps before send_to_data_service(), this job those after it.
dataset = (
    tf.data.Dataset.from_tensor_slices((tf.cast(images, tf.float32), labels))
    .shuffle(2000)
    .map(lambda image, label: (image / 16.0, label))
    .batch(32)
    .send_to_data_service(compute_config, hvd.rank(), hvd.size(), reuse_dataset=True)
    .prefetch(tf.data.AUTOTUNE)
)

weights = tf.Variable(tf.zeros([64, 10]))
for epoch in range(args.epochs):
    samples = 0
    for images, labels in dataset:
        with tf.GradientTape() as tape:
            logits = images @ weights
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        # Ranks get batches on request, so their numbers may differ: each rank trains independently for an epoch.
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        samples += len(labels)
    weights.assign(hvd.allreduce(weights))
    total = int(hvd.allreduce(tf.constant(samples), op=hvd.Sum))
    if hvd.rank() == 0:
        print(f"Epoch {epoch}: {total} samples on {hvd.size()} ranks", flush=True)

if hvd.rank() == 0:
    compute_config.compute_client().shutdown()
